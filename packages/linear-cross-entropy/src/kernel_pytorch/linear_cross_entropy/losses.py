"""From the operators, which give every token's loss, to what users ask for."""

from __future__ import annotations

import torch
from torch import Tensor

from ._core.call_kinds import is_exporting, is_transformed
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
    needs = [tensor is not None and tensor.requires_grad for tensor in (hidden, weight, bias)]
    if any(needs) and chunk == 0 and has_one_loss(reduction, label_smoothing, softcap):
        divisor = None if reduction == "sum" else count_of(target, weight.shape[0], ignore_index)
        run = LEVELS[level].linear_cross_entropy_with_gradients
        return run(hidden, weight, target, bias, divisor, *scalars, *needs)[0]
    loss = LEVELS[level].linear_cross_entropy(hidden, weight, target, bias, *scalars, chunk)[0]
    return reduce(loss, target, weight.shape[0], ignore_index, reduction)


def has_one_loss(reduction: str, label_smoothing: float, softcap: float) -> bool:
    """Whether the gradients of a linear layer can be computed with its loss, before the incoming one is known.

    That takes one loss for all tokens. Transforms of torch.func have no rules for it, an exported program is for
    inference, and smoothed labels under a cap need the logits once more.
    """
    of_all = reduction != "none" and not (softcap > 0.0 and label_smoothing > 0.0)
    return of_all and torch.is_grad_enabled() and not is_transformed() and not is_exporting()


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
    return loss.sum() / count_of(target, words, ignore_index)


def count_of(target: Tensor, words: int, ignore_index: int) -> Tensor:
    """How many tokens a mean is over, `()`: those that count, and one if there are none."""
    return counted(target, words, ignore_index).sum().clamp(min=1)
