"""Level "torchscript": what `torch.jit.script` makes of a definition, with what it gets wrong put right or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .call_kinds import is_transformed


def scripted(definition: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the same positional arguments, compiled by TorchScript the first time it is called.

    Without gradients its executor, which remembers a call with them, would give results that want some. Under
    transforms of torch.func its second derivatives are wrong from the second call on, or it raises. Dynamo does not
    look into it: whoever traces gets the definition itself.
    """
    compiled: Callable[..., Any] | None = None

    def call(*arguments: Any) -> Any:
        nonlocal compiled
        if torch.compiler.is_compiling():
            return definition(*arguments)
        if is_transformed():
            raise RuntimeError(
                f"{_cannot(definition)} TorchScript gives wrong derivatives under transforms of torch.func and in "
                "forward-mode differentiation; level 'reference' is the same formula"
            )
        if compiled is None:
            compiled = torch.jit.script(definition)
        if not torch.is_grad_enabled():
            arguments = tuple(a.detach() if isinstance(a, Tensor) else a for a in arguments)
        try:
            return compiled(*arguments)
        except RuntimeError as error:
            if not _is_recomputed():
                raise
            raise RuntimeError(
                f"{_cannot(definition)} a checkpoint ends its second forward by an exception, which TorchScript hides; "
                "give torch.utils.checkpoint.checkpoint use_reentrant=True, or take level 'reference', the same formula"
            ) from error

    return call


def _cannot(definition: Callable[..., Any]) -> str:
    return f"level 'torchscript' of {definition.__name__} cannot run here:"


def _is_recomputed() -> bool:
    """Whether this is the second forward of a checkpoint: it has hooks of its own on what is saved."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and hooks[0].__module__ == "torch.utils.checkpoint"
