"""What this package can stand in for, and the way back."""

from __future__ import annotations

from typing import Any

import torch

from ._core.stock import check_plain, why_not_plain
from .module import MyTechnique


def build(module: torch.nn.Module) -> MyTechnique:
    """A drop-in for `torch.nn.SiLU`.

    Raises:
        TypeError: `module` has hooks.
    """
    assert isinstance(module, torch.nn.SiLU)
    check_plain([module])
    return MyTechnique().train(module.training)


def restore(module: torch.nn.Module) -> torch.nn.SiLU:
    """The stock module that `build` replaced."""
    assert isinstance(module, MyTechnique)
    return torch.nn.SiLU().train(module.training)


def applies(module: torch.nn.Module) -> str | None:
    """None, or why this very module is left alone: only of the stock class itself is it known what it computes."""
    if type(module) is not torch.nn.SiLU:
        return f"{type(module).__name__} may compute something else than torch.nn.SiLU"
    if module.inplace:
        return "it writes into its input, which this package never does"
    return why_not_plain([module])


def replacements() -> list[dict[str, Any]]:
    """Keyword arguments of `kernel_pytorch.harness.technique.Replacement`, one entry per stock module."""
    return [{"stock": torch.nn.SiLU, "build": build, "restore": restore, "applies": applies}]
