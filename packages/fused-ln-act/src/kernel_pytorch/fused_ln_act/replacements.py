"""What this package can stand in for, and the way back."""

from __future__ import annotations

from typing import Any

import torch

from ._core.stock import why_not_plain
from .linear import replacements as linear
from .norm.module import LayerNorm


def applies(module: torch.nn.Module) -> str | None:
    """None, or why this very module is left alone: only of the stock class itself is it known what it computes."""
    if type(module) is not torch.nn.LayerNorm:
        return f"{type(module).__name__} may compute something else than torch.nn.LayerNorm"
    return why_not_plain([module])


def replacements() -> list[dict[str, Any]]:
    """Keyword arguments of `kernel_pytorch.harness.technique.Replacement`, one entry per stock module."""
    return [
        {"stock": torch.nn.LayerNorm, "build": LayerNorm.from_torch, "restore": LayerNorm.to_torch, "applies": applies},
        *linear.replacements(),
    ]
