"""From the operators, which give every token's loss, to what users ask for."""

from __future__ import annotations

from torch import Tensor

from .operators import LEVELS
from .rules.cross_entropy import counted


def linear_loss(
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
    level: str,
) -> Tensor:
    """`linear_cross_entropy` of `levels/reference.py` by the operator."""
    weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
    target = target.expand(hidden.shape[:-1])
    scalars = ignore_index, label_smoothing, z_loss, softcap
    loss = LEVELS[level].linear_cross_entropy(hidden, weight, target, bias, *scalars, chunk)[0]
    return reduce(loss, target, weight.shape[0], ignore_index, reduction)


def logits_loss(
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: str,
    inplace: bool,
    level: str,
) -> Tensor:
    """`cross_entropy` of `levels/reference.py` by the operator."""
    target = target.expand(logits.shape[:-1])
    operators = LEVELS[level]
    run = operators.cross_entropy_in_place if inplace else operators.cross_entropy
    loss = run(logits, target, ignore_index, label_smoothing, z_loss, softcap)[0]
    return reduce(loss, target, logits.shape[-1], ignore_index, reduction)


def reduce(loss: Tensor, target: Tensor, words: int, ignore_index: int, reduction: str) -> Tensor:
    """What "mean", "sum" or "none" makes of the losses of tokens, zero where they do not count."""
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    return loss.sum() / counted(target, words, ignore_index).sum().clamp(min=1)
