"""Triton: of a linear layer one kernel computes logits and reduces them, of logits one kernel reads them once."""

from __future__ import annotations

from torch import Tensor

from kernel_pytorch.linear_cross_entropy.losses import linear_loss, logits_loss


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: str,
    chunk: int,
) -> Tensor:
    """`linear_cross_entropy` of `reference.py`."""
    scalars = ignore_index, label_smoothing, z_loss, softcap
    return linear_loss(hidden, weight, target, bias, *scalars, reduction, chunk, "triton")


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: str,
    inplace: bool,
) -> Tensor:
    """`cross_entropy` of `reference.py`."""
    scalars = ignore_index, label_smoothing, z_loss, softcap
    return logits_loss(logits, target, *scalars, reduction, inplace, "triton")
