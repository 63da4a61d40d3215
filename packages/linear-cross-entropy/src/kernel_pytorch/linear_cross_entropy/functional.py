"""The public functions: arguments by keyword, checked before any kernel starts."""

from __future__ import annotations

import os
from typing import Any, Literal

import torch
from torch import Tensor

from ._core.arguments import check_flag, check_tensor
from ._core.call_kinds import can_bypass_dispatcher
from ._core.direct_calls import check_memory
from ._core.operation import Operation, Prepared
from .arguments import check_chunk, check_layer, check_like_hidden, check_scalars, check_target, check_words
from .levels import LADDER

Reduction = Literal["mean", "sum", "none"]
CHECK_VARIABLE = "KERNEL_PYTORCH_CHECK"
"""Set to 1, targets on a GPU are looked at too, for which it has to be waited."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: Reduction = "mean",
    chunk: int | None = None,
    level: str | None = None,
) -> Tensor:
    """Cross entropy of a linear layer, `cross_entropy(hidden @ weight.T + bias, target)`, without its logits in memory.

    Differentiable in hidden, weight and bias. Levels "native" and "triton" compute the gradients together with the
    loss, some tokens at a time, if a gradient is wanted; the backward multiplies them by the incoming one. With
    reduction "none" or a `chunk`, with both label smoothing and a soft cap, under transforms of `torch.func` and in
    exported programs the backward computes the logits again, a part of the vocabulary at a time. Second derivatives, at
    every level but "compile", hold all logits. Under autocast hidden, weight and bias are cast as
    `torch.nn.functional.linear` casts them.

    Args:
        hidden: `(..., H)`, float16, bfloat16, float32 or float64, any strides: what goes into the language-model head.
        weight: `(V, H)` in the dtype of hidden, as `torch.nn.Linear` has it: one row for each of V words.
        target: `(...)`, int64 or int32, from 0 to V - 1, or `ignore_index`.
        bias: `(V,)` in the dtype of hidden; None for none.
        ignore_index: the target of tokens that have no loss and no gradient.
        label_smoothing: share of the probability that all words get, from 0 to 1.
        z_loss: factor of the squared logarithm of the sum of exponentials, which is added to the loss of each token; it
            is a part of what is returned.
        softcap: bound of the logits, `softcap * tanh(logits / softcap)`; None for none.
        reduction: "mean" over the tokens that are not ignored, "sum", or "none" for the loss of each token.
        chunk: recompute the logits in the backward, this many words at a time (level "native" in the forward too): a
            fourth matrix product, and the least memory. None: gradients are computed with the loss where they can be;
            elsewhere a chunk has at most 64 MiB of logits, or 512 words if those are more.
        level: None for the default of this device, or "reference", "native", "torchscript", "compile", "triton".

    Returns:
        `()`, or `(...)` for "none", with zeros for ignored tokens; float32 (float64 for float64). If all tokens are
        ignored "mean" gives zero, and zero gradients, where `torch.nn.functional.cross_entropy` gives NaN.

    Raises:
        TypeError: a tensor has a dtype that is not allowed, or another than hidden; a number is no number.
        ValueError: shapes, devices, numbers, reduction or level do not fit; the message names the argument.
        IndexError: a target is neither a word nor `ignore_index`. On a CPU this is always looked at, on a GPU only if
            the environment variable KERNEL_PYTORCH_CHECK is 1, since it has to be waited for; otherwise such a token is
            ignored. No level reads or writes outside its tensors for it.
        RuntimeError: the level asked for cannot run on this device or dtype; the message says why.

    Source: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", 2024,
    https://arxiv.org/abs/2411.09009.
    """
    run = LINEAR_CROSS_ENTROPY if _has_unread(target) else LINEAR_CROSS_ENTROPY.uncached
    scalars = ignore_index, label_smoothing, z_loss, softcap
    return run(hidden, weight, target, bias, *scalars, reduction, chunk, level)


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: Reduction = "mean",
    inplace: bool = False,
    level: str | None = None,
) -> Tensor:
    """Cross entropy of logits that are there, computed in float32.

    Differentiable in logits, any number of times except at level "compile" (once). Level "triton" saves two numbers
    a token beside the logits.

    `target`, `ignore_index`, `label_smoothing`, `z_loss`, `softcap` and `reduction` are as in
    `linear_cross_entropy`; `TypeError`, `ValueError`, `IndexError` and `RuntimeError` are raised as by
    `linear_cross_entropy`.

    Args:
        logits: `(..., V)`, float16, bfloat16, float32 or float64, any strides. The words are the last dimension, where
            `torch.nn.functional.cross_entropy` has them in the second.
        inplace: whether the backward of levels "native", "triton" and "cuda" writes the gradient of the logits over the
            logits, which saves the size of the logits; a leaf's values become its gradient. Autograd raises its error
            that the logits were modified if another backward needs them, or if the same graph runs backward twice.
            Ignored at the other levels, for tensor subclasses, for logits whose elements share memory (expanded ones),
            for second derivatives and under torch.compile, which decides itself what memory to use again.
        level: as in `linear_cross_entropy`, or "cuda", which the package kernel-pytorch-cuda-ops brings; on a CPU that
            is the default in bfloat16.

    Returns:
        As `linear_cross_entropy`.

    Source: as `linear_cross_entropy`; one pass by Milakov and Gimelshein, "Online normalizer calculation for softmax",
    2018, https://arxiv.org/abs/1805.02867.
    """
    run = CROSS_ENTROPY if _has_unread(target) else CROSS_ENTROPY.uncached
    scalars = ignore_index, label_smoothing, z_loss, softcap
    return run(logits, target, *scalars, reduction, inplace, level)


def _linear_cross_entropy(level: str | None, *given: Any) -> Prepared:
    hidden, weight, target, bias, ignore_index, label_smoothing, z_loss, softcap, reduction, chunk = given
    check_layer(hidden, weight, bias)
    check_scalars(ignore_index, label_smoothing, z_loss, softcap, reduction)
    check_chunk(chunk)
    hidden, weight, bias = _as_autocast(hidden, weight, bias)
    check_like_hidden(hidden, weight, bias)
    target = _checked_target(target, hidden, "hidden", weight.shape[0], ignore_index)
    if level is None and hidden.is_meta:
        level = "reference"  # operators of ours read memory, and there is none
    scalars = ignore_index, float(label_smoothing), float(z_loss), float(softcap or 0.0)
    given = hidden, weight, target, bias, *scalars, reduction, chunk or 0
    return Prepared(level, given, state=_autocast_dtype, deciding=(hidden, weight, bias))


def _cross_entropy(level: str | None, *given: Any) -> Prepared:
    logits, target, ignore_index, label_smoothing, z_loss, softcap, reduction, inplace = given
    check_tensor("logits", logits)
    check_flag("inplace", inplace)
    check_scalars(ignore_index, label_smoothing, z_loss, softcap, reduction)
    target = _checked_target(target, logits, "logits", logits.shape[-1], ignore_index)
    scalars = ignore_index, float(label_smoothing), float(z_loss), float(softcap or 0.0)
    return Prepared(level, (logits, target, *scalars, reduction, inplace), deciding=(logits,))


def _has_unread(target: Tensor) -> bool:
    """Whether the values of targets are not looked at. Else each call has to be checked: the next has other values."""
    return isinstance(target, Tensor) and target.is_cuda and not is_checked(target)


def _autocast_dtype() -> torch.dtype:
    """What autocast casts to, which no tensor shows."""
    return torch.get_autocast_dtype("cuda")


def _checked_target(target: Tensor, rows: Tensor, name: str, words: int, ignore_index: int) -> Tensor:
    """The target, checked as far as that costs nothing, or as the user has asked."""
    check_target(target, rows, name)
    if not is_checked(target):
        return target
    if torch.compiler.is_compiling() or not can_bypass_dispatcher(target):
        return torch.ops.kernel_pytorch.check_target(target, words, ignore_index)
    check_memory("target", target)
    check_words(target, words, ignore_index)
    return target


def is_checked(target: Tensor) -> bool:
    """Whether the values of targets are looked at: on a CPU always, elsewhere if that was asked for."""
    return target.device.type == "cpu" or os.environ.get(CHECK_VARIABLE) == "1"


def _as_autocast(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """What autocast makes of the operands of a product: float64 stays as it is."""
    device = hidden.device.type
    # What has no autocast, "meta" for example, must not be asked whether it is on.
    if device == "meta" or hidden.dtype == torch.float64 or not torch.is_autocast_enabled(device):
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(device)
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


LINEAR_CROSS_ENTROPY = Operation(LADDER, "linear_cross_entropy", prepare=_linear_cross_entropy)
CROSS_ENTROPY = Operation(LADDER, "cross_entropy", prepare=_cross_entropy)
