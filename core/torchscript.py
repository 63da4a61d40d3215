"""Level "torchscript": what `torch.jit.script` makes of a definition, with what it gets wrong put right or refused."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from .call_kinds import is_transformed


def scripted(definition: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the same positional arguments, compiled by TorchScript the first time it is called.

    Calls without gradients use a separately compiled function. TorchScript's executor remembers which arguments of
    its first calls wanted gradients: later calls without would give results that want some, or raise in inference mode.
    Under transforms of torch.func its second derivatives are wrong from the second call on, or it raises. Dynamo does
    not look into it: traced callers get the definition itself.
    """
    compiled: dict[bool, Callable[..., Any]] = {}

    def call(*arguments: Any) -> Any:
        if torch.compiler.is_compiling():
            return definition(*arguments)
        if is_transformed():
            raise RuntimeError(
                f"{_cannot(definition)} TorchScript gives wrong derivatives under transforms of torch.func and in "
                "forward-mode differentiation; level 'reference' is the same formula"
            )
        with_gradients = torch.is_grad_enabled()
        if with_gradients not in compiled:
            compiled[with_gradients] = torch.jit.script(definition if with_gradients else _copy(definition))
        if not with_gradients:
            arguments = tuple(a.detach() if isinstance(a, Tensor) else a for a in arguments)
        try:
            return compiled[with_gradients](*arguments)
        except RuntimeError as error:
            if not _is_recomputed():
                raise
            raise RuntimeError(
                f"{_cannot(definition)} a checkpoint ends its second forward by an exception, which TorchScript hides; "
                "give torch.utils.checkpoint.checkpoint use_reentrant=True, or take level 'reference', the same formula"
            ) from error

    return call


def _copy(definition: Callable[..., Any]) -> Callable[..., Any]:
    """Copy a function: `torch.jit.script` caches one result per function object."""
    assert isinstance(definition, FunctionType)
    copy = FunctionType(definition.__code__, definition.__globals__, definition.__name__, definition.__defaults__)
    copy.__annotations__, copy.__module__ = definition.__annotations__, definition.__module__
    copy.__qualname__, copy.__kwdefaults__ = definition.__qualname__, definition.__kwdefaults__
    return copy


def _cannot(definition: Callable[..., Any]) -> str:
    return f"level 'torchscript' of {definition.__name__} cannot run here:"


def _is_recomputed() -> bool:
    """Whether this is the second forward of a checkpoint, which installs its own hooks of saved tensors."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"
