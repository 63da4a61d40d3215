"""What all operators of the library have in common on their way through PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import library  # noqa: F401  (loading it defines the operators)
from .after_import import after_import
from .arguments import check, check_tensors, explained
from .differentiable import has_transform
from .sharding import Rule, add_rule

NAMESPACE = "kernel_pytorch_cuda"
operators = torch.ops.kernel_pytorch_cuda
registrations = torch.library.Library(NAMESPACE, "FRAGMENT")

DTYPE_NAMES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
}
"""As operators take the dtype of a gradient."""

Formula = Callable[..., int]


def register(
    name: str, fake: Callable[..., Any], gradient: Callable[..., Any], flops: Formula, sharding: Rule | None = None
) -> None:
    """Complete an operator that the library defines and implements.

    Args:
        name: of the operator.
        fake: what it allocates: same shapes, dtypes and strides.
        gradient: a differentiable function of the same arguments, which `differentiable` makes of an autograd function.
        flops: of the shapes of the arguments, as `torch.utils.flop_counter.register_flop_formula` wants it.
        sharding: where its tensors may lie; None for replicated tensors alone.
    """
    if sharding is not None:
        add_rule(name, sharding)
    torch.library.register_fake(f"{NAMESPACE}::{name}", _on_one_device(name, fake), lib=registrations)
    registrations.impl(name, _with_tensors(name, gradient), "Autograd")

    def count(counter: ModuleType) -> None:
        counter.register_flop_formula(getattr(operators, name))(flops)

    after_import("torch.utils.flop_counter", count)


def per_element(factor: int) -> Formula:
    """The FLOP formula of an operator that does `factor` operations for each element of its first argument."""

    def formula(shape: Sequence[int], *args: Any, **kwargs: Any) -> int:
        return factor * torch.Size(shape).numel()

    return formula


def below_autograd(operator: Any, *arguments: Any) -> Any:
    """Run an operator from inside its own autograd function."""
    try:
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*arguments)
    except RuntimeError as error:
        if (better := out_of_memory(error)) is None:
            raise
        raise better from None


def out_of_memory(error: Exception) -> torch.OutOfMemoryError | None:
    """PyTorch's own exception, if this one says that: the stable ABI hands on the text of an exception alone."""
    said = type(error) is RuntimeError and str(error).startswith("CUDA out of memory")
    return torch.OutOfMemoryError(str(error)) if said else None


def count_writes(name: str) -> None:
    """Let each call of an operator count as a write to the tensors that it overwrites: autograd looks at that.

    Args:
        name: of an operator whose schema names them, as `Tensor(a!)`. PyTorch itself goes by the schema of operators of
            its own and of `torch.library.custom_op`, and not of those that a library defines.
    """
    operator = getattr(operators, name).default
    written = [place for place, a in enumerate(operator._schema.arguments) if a.alias_info and a.alias_info.is_write]

    def run(keys: Any, *arguments: Any) -> Any:
        result = operator.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, *arguments)
        for place in written:
            torch.autograd.graph.increment_version(arguments[place])
        return result

    registrations.impl(name, run, "ADInplaceOrView", with_keyset=True)


def _on_one_device(name: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """The fake, but for tensors that lie apart: one on "meta" among others is enough for PyTorch to ask a fake."""

    @functools.wraps(fake)
    def checked(*arguments: Any, **keywords: Any) -> Any:
        devices = dict.fromkeys(str(a.device) for a in arguments if isinstance(a, Tensor))
        if len(devices) > 1:
            raise RuntimeError(f"{name}: tensors are on {' and '.join(devices)}; all of them must be on one device")
        return fake(*arguments, **keywords)

    return checked


def _with_tensors(name: str, gradient: Callable[..., Any]) -> Callable[..., Any]:
    """The gradient, but for None where a tensor is required: PyTorch hands it on as a tensor without a type."""
    operator = getattr(operators, name).default

    @functools.wraps(gradient)
    def checked(*arguments: Any) -> Any:
        check_tensors(name, operator, arguments)
        return gradient(*arguments)

    return checked


def call(function: str, operator: Any, gradient: Callable[..., Any], *arguments: Any) -> Any:
    """Call an operator by the shortest way: past its autograd function where there is no gradient to take.

    Args:
        function: that the user called, whose name errors begin with.
        operator: that it calls.
        gradient: as in `register`.
        arguments: of the operator.

    Raises:
        TypeError: an argument is not of its kind, or a tensor is sparse or nested.
        ValueError: a number is not finite, or eps negative.
        RuntimeError: the arguments do not fit, or the kernel could not be launched.
    """
    if torch.compiler.is_compiling():
        return operator(*arguments)
    wants_gradient = check(function, operator, arguments)
    try:
        # `gradient` asks all of this too, but takes microseconds for it. Of transforms and tangents it says that there
        # is no rule for them, and below it they would be lost.
        if (wants_gradient and torch.is_grad_enabled()) or has_transform():
            return gradient(*arguments)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*arguments)
    except Exception as error:
        better = out_of_memory(error) or explained(function, operator, arguments, error)
        if better is None:
            raise
        raise better from None
