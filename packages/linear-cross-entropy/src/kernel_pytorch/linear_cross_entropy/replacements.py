"""What this package can stand in for, and the way back.

A linear layer is no stock module that `LinearCrossEntropy` could replace unseen, since that takes the target too:
models use `LinearCrossEntropy.from_torch(model.lm_head)`.
"""

from __future__ import annotations

from typing import Any

import torch

from ._core.stock import check_plain, why_not_plain
from .module import CrossEntropyLoss


def build(module: torch.nn.Module) -> CrossEntropyLoss:
    """A drop-in for `torch.nn.CrossEntropyLoss`.

    Raises:
        ValueError: `module` has weights of classes.
        TypeError: it has hooks.
    """
    assert isinstance(module, torch.nn.CrossEntropyLoss)
    ours = CrossEntropyLoss(module.weight, **_options(module))
    check_plain([module])
    return ours.train(module.training)


def restore(module: torch.nn.Module) -> torch.nn.CrossEntropyLoss:
    """The stock module that `build` replaced."""
    assert isinstance(module, CrossEntropyLoss)
    return torch.nn.CrossEntropyLoss(**_options(module)).train(module.training)


def applies(module: torch.nn.Module) -> str | None:
    """None, or why this very module is left alone: only of the stock class itself is it known what it computes."""
    if type(module) is not torch.nn.CrossEntropyLoss:
        return f"{type(module).__name__} may compute something else than torch.nn.CrossEntropyLoss"
    if module.weight is not None:
        return "it has weights of classes"
    return why_not_plain([module])


def replacements() -> list[dict[str, Any]]:
    """Keyword arguments of `kernel_pytorch.harness.technique.Replacement`, one entry per stock module."""
    return [{"stock": torch.nn.CrossEntropyLoss, "build": build, "restore": restore, "applies": applies}]


def _options(module: torch.nn.CrossEntropyLoss) -> dict[str, Any]:
    return {name: getattr(module, name) for name in ("ignore_index", "reduction", "label_smoothing")}
