"""What all operators of the library have in common on their way through PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import library  # noqa: F401  (loading it defines the operators)
from .after_import import after_import
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
        gradient: a differentiable function of the same arguments, `Function.apply` of an autograd function.
        flops: of the shapes of the arguments, as `torch.utils.flop_counter.register_flop_formula` wants it.
        sharding: where its tensors may lie; None for replicated tensors alone.
    """
    if sharding is not None:
        add_rule(name, sharding)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=registrations)
    registrations.impl(name, gradient, "Autograd")

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
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*arguments)


def call(operator: Any, gradient: Callable[..., Any], *arguments: Any) -> Any:
    """Call an operator by the shortest way: past its autograd function where there is no gradient to take."""
    if torch.compiler.is_compiling():
        return operator(*arguments)
    if torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in arguments):
        return gradient(*arguments)
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return gradient(*arguments)
    return below_autograd(operator, *arguments)
