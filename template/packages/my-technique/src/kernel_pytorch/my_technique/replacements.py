"""What this package can stand in for: `patch(model)` puts it there in place, `unpatch(model)` takes it off."""

from __future__ import annotations

from typing import Any

import torch

from ._core import patching
from ._core.patching import Found, Patched
from .functional import my_technique

PACKAGE = "my-technique"


def patch(model: torch.nn.Module) -> Patched:
    """Let `my_technique` compute every `torch.nn.SiLU` of a model, in place.

    Args:
        model: a model, or a part of one, before it is compiled.

    Returns:
        What was replaced, and why the rest was not.

    Raises:
        TypeError: `model` is no module, or is compiled or scripted.
    """
    return patching.patch(model, PACKAGE, [_find])


def unpatch(model: torch.nn.Module) -> None:
    """Undo `patch`: every module has the forward of its class again."""
    patching.unpatch(model, PACKAGE)


def _find(module: torch.nn.Module) -> Found | str | None:
    """Match the stock class only: a subclass or another class may compute something else."""
    if type(module) is not torch.nn.SiLU:
        return None
    if module.inplace:
        return "it writes into its input, which this package never does"
    return Found(_forward, "my_technique")


def _forward(self: torch.nn.Module, input: torch.Tensor) -> Any:
    return my_technique(input, beta=1.0)
