"""What this package can stand in for, and the way back."""

from __future__ import annotations

from typing import Any

import torch

from ._core.stock import check_plain, why_not_plain
from .module import RMSNorm


def build(module: torch.nn.Module) -> RMSNorm:
    """A drop-in for `torch.nn.RMSNorm` that shares its weight.

    Raises:
        TypeError: `module` has hooks, or its weight is computed.
    """
    assert isinstance(module, torch.nn.RMSNorm)
    check_plain([module])
    return _share(module, RMSNorm(module.normalized_shape, module.eps, elementwise_affine=False))


def restore(module: torch.nn.Module) -> torch.nn.RMSNorm:
    """The stock module that `build` replaced, sharing the weight."""
    assert isinstance(module, RMSNorm)
    return _share(module, torch.nn.RMSNorm(module.normalized_shape, module.eps, elementwise_affine=False))


def applies(module: torch.nn.Module) -> str | None:
    """None, or why this very module is left alone: only of the stock class itself is it known what it computes."""
    if type(module) is not torch.nn.RMSNorm:
        return f"{type(module).__name__} may compute something else than torch.nn.RMSNorm"
    return why_not_plain([module])


def replacements() -> list[dict[str, Any]]:
    """Keyword arguments of `kernel_pytorch.harness.technique.Replacement`, one entry per stock module."""
    return [{"stock": torch.nn.RMSNorm, "build": build, "restore": restore, "applies": applies}]


def _share(source: torch.nn.RMSNorm, target: Any) -> Any:
    target.elementwise_affine = source.elementwise_affine
    target.weight = source.weight
    return target.train(source.training)
