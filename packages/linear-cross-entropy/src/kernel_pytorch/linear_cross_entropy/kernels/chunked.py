"""Level "native": PyTorch's matrix products, a part of the logits at a time. Tokens are rows, T of them.

`gradients_linear` computes loss and gradients together, some tokens at a time. `forward_linear` and `backward_linear`
are for losses of single tokens, and for those who say how much is computed at a time: the forward keeps two numbers a
token, its largest logit and the logarithm of the sum of exponentials relative to that, and the backward computes the
logits again, a part of the vocabulary at a time (see `chunks.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernel_pytorch.linear_cross_entropy.rules.cross_entropy import counted, wide_dtype

from .chunks import (
    ALIGNED_WORDS,
    CHUNK_BYTES,
    by_tokens,
    dloss_of_sum,
    incoming,
    multiplies_half,
    operand,
    parts_of_words,
    product,
    store_or_add,
    tokens_at_a_time,
    tokens_that_fit,
    words_at_a_time,
)
from .chunks import backward as backward_by_chunks


def forward_linear(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """`(loss, normalizer)`, `(T,)` and `(T, 2)`: one walk over the vocabulary."""
    tokens, words = hidden.shape[0], weight.shape[0]
    wide = wide_dtype(hidden.dtype)
    step = words_at_a_time(tokens, words, wide.itemsize, chunk)
    half = multiplies_half(hidden)
    data = operand(hidden, half)
    largest = hidden.new_full((tokens,), float("-inf"), dtype=wide)
    base, picked, total, logits_sum = (hidden.new_zeros((tokens,), dtype=wide) for _ in range(4))
    for first in range(0, words, step):
        z = capped_(_logits(data, weight, bias, first, step, half), softcap)[0]
        place = target - first
        inside = (place >= 0) & (place < z.shape[1])
        found = z.gather(1, column(place, z.shape[1]))[:, 0]
        picked = torch.where(inside, found, picked)
        new = torch.maximum(largest, z.amax(1))
        old, base = base, new.masked_fill(new == float("-inf"), 0.0)  # a difference of infinities would be no number
        z = z.sub_(base[:, None])
        if label_smoothing > 0.0:
            logits_sum += first * (old - base) + z.sum(1)
        total = total * (largest - base).exp() + z.exp_().sum(1)
        largest = new
    log_sum = total.log()
    loss = log_sum - (1.0 - label_smoothing) * (picked - largest)
    if label_smoothing > 0.0:
        loss -= label_smoothing * (logits_sum / words)
    if z_loss > 0.0:
        loss += z_loss * (largest + log_sum).square()
    return loss.masked_fill_(~counted(target, words, ignore_index), 0.0), torch.stack((largest, log_sum), 1)


def backward_linear(
    dloss: Tensor,
    normalizer: Tensor,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    chunk: int,
    need_dhidden: bool,
    need_dweight: bool,
    need_dbias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of hidden, weight and bias; what is not needed is `(0,)`."""
    words = weight.shape[0]
    step = words_at_a_time(hidden.shape[0], words, normalizer.dtype.itemsize, chunk)
    half = multiplies_half(hidden)
    data = operand(hidden, half)
    counts = counted(target, words, ignore_index)
    dloss, scale = incoming(dloss, target, words, ignore_index, half and hidden.dtype == torch.float16)

    def logits_gradient(first: int, last: int) -> tuple[Tensor, Tensor | None]:
        logits = _logits(data, weight, bias, first, last - first, half)
        rows = target - first, normalizer, dloss, counts
        gradient = logits_gradient_(logits, *rows, words, label_smoothing, z_loss, softcap)
        over_tokens = gradient.sum(0) if need_dbias else None
        return gradient.to(hidden.dtype) if half else gradient, over_tokens

    needed = need_dhidden, need_dweight, need_dbias
    return backward_by_chunks(logits_gradient, half, scale, hidden, weight, bias, step, *needed)


def gradients_linear(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    divisor: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    need_dhidden: bool,
    need_dweight: bool,
    need_dbias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss, and gradients of hidden, weight and bias, see `by_tokens`: three products."""
    words = weight.shape[0]
    wide, half = wide_dtype(hidden.dtype), multiplies_half(hidden)
    of_row = ALIGNED_WORDS * -(-words // ALIGNED_WORDS)
    counts = counted(target, words, ignore_index)
    dloss, scale = incoming(
        dloss_of_sum(divisor, hidden), target, words, ignore_index, half and hidden.dtype == torch.float16
    )
    step = tokens_at_a_time(hidden.shape[0], words) if hidden.is_cuda else tokens_that_fit(of_row * wide.itemsize)

    def compute(first: int, last: int) -> tuple[Tensor, Tensor, Tensor | None]:
        logits = hidden.new_empty((last - first, of_row), dtype=wide)[:, :words]
        data = operand(hidden[first:last], half)
        for part in parts_of_words(weight, half):
            store_or_add(logits[:, part], data, operand(weight[part], half).t(), half, True)
        if bias is not None:
            logits.add_(bias)
        of_tokens = target[first:last], dloss[first:last], counts[first:last]
        loss, gradient = loss_and_gradient_(logits, *of_tokens, label_smoothing, z_loss, softcap)
        over_tokens = gradient.sum(0) if need_dbias else None
        if half:
            gradient = hidden.new_empty((last - first, of_row))[:, :words].copy_(gradient)
        return loss, gradient, over_tokens

    needs = need_dhidden, need_dweight, need_dbias
    return by_tokens(compute, half, scale, hidden, weight, divisor, step, *needs)


def forward_logits(
    logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, z_loss: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """`(loss, normalizer)`, `(T,)` and `(T, 2)`, of logits `(T, V)`, some rows at a time."""
    words, wide = logits.shape[1], wide_dtype(logits.dtype)
    loss, normalizer = (logits.new_empty((logits.shape[0], *more), dtype=wide) for more in ((), (2,)))
    for rows in _row_chunks(logits):
        z = capped_(logits[rows].to(wide, copy=softcap > 0.0), softcap)[0]
        largest = z.amax(1)
        z = z - largest[:, None]
        log_sum = z.logsumexp(1)
        loss[rows] = log_sum - (1.0 - label_smoothing) * z.gather(1, column(target[rows], words))[:, 0]
        if label_smoothing > 0.0:
            loss[rows] -= label_smoothing * z.mean(1)
        normalizer[rows] = torch.stack((largest, log_sum), 1)
    if z_loss > 0.0:
        loss += z_loss * normalizer.sum(1).square()
    return loss.masked_fill_(~counted(target, words, ignore_index), 0.0), normalizer


def backward_logits(
    dloss: Tensor,
    logits: Tensor,
    target: Tensor,
    normalizer: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    result: Tensor,
) -> None:
    """Write the gradient of logits `(T, V)` into `result`, which may be the logits themselves, some rows at a time."""
    words = logits.shape[1]
    counts = counted(target, words, ignore_index)
    dloss, _ = incoming(dloss, target, words, ignore_index, False)
    for rows in _row_chunks(logits):
        result[rows] = logits_gradient_(
            logits[rows].to(normalizer.dtype, copy=True), target[rows], normalizer[rows], dloss[rows], counts[rows],
            words, label_smoothing, z_loss, softcap,
        )  # fmt: skip


def logits_gradient_(
    logits: Tensor,
    target: Tensor,
    normalizer: Tensor,
    dloss: Tensor,
    counts: Tensor,
    words: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
) -> Tensor:
    """The gradient of logits `(T, B)`, wide, written over them; targets count from their first column."""
    z, squashed = capped_(logits, softcap)
    softmax = z.sub_(normalizer[:, :1]).sub_(normalizer[:, 1:]).exp_()
    scalars = words, label_smoothing, z_loss
    return _gradient_of_softmax_(softmax, squashed, target, normalizer, dloss, counts, *scalars)


def loss_and_gradient_(
    logits: Tensor,
    target: Tensor,
    dloss: Tensor,
    counts: Tensor,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Losses `(T,)` of logits `(T, V)`, wide, and the gradient of these, written over them."""
    words = logits.shape[1]
    z, squashed = capped_(logits, softcap)
    largest = z.amax(1, keepdim=True)
    z = z.sub_(largest)
    picked = z.gather(1, column(target, words))[:, 0]
    average = z.mean(1) if label_smoothing > 0.0 else None
    total = z.exp_().sum(1, keepdim=True)
    log_sum = total.log()
    loss = log_sum[:, 0] - (1.0 - label_smoothing) * picked
    if average is not None:
        loss -= label_smoothing * average
    normalizer = torch.cat((largest, log_sum), 1)
    if z_loss > 0.0:
        loss += z_loss * normalizer.sum(1).square()
    scalars = words, label_smoothing, z_loss
    gradient = _gradient_of_softmax_(z.div_(total), squashed, target, normalizer, dloss, counts, *scalars)
    return loss.masked_fill_(~counts, 0.0), gradient


def _gradient_of_softmax_(
    softmax: Tensor,
    squashed: Tensor | None,
    target: Tensor,
    normalizer: Tensor,
    dloss: Tensor,
    counts: Tensor,
    words: int,
    label_smoothing: float,
    z_loss: float,
) -> Tensor:
    gradient = softmax
    if z_loss > 0.0:
        gradient.mul_(1.0 + 2.0 * z_loss * normalizer.sum(1, keepdim=True))
    if label_smoothing > 0.0:
        gradient.sub_(label_smoothing / words)
    inside = (target >= 0) & (target < gradient.shape[1])
    place = column(target, gradient.shape[1])
    found = gradient.gather(1, place)
    gradient.scatter_(1, place, torch.where(inside[:, None], found - (1.0 - label_smoothing), found))
    gradient.mul_(dloss[:, None])
    if squashed is not None:
        gradient.mul_(squashed.square_().neg_().add_(1.0))
    # What a token that does not count computes may be NaN, times zero.
    return gradient.masked_fill_(~counts[:, None], 0.0)


def capped_(logits: Tensor, softcap: float) -> tuple[Tensor, Tensor | None]:
    """Capped logits, and `tanh(logits / softcap)`, written over them; as they are, and None, without a cap."""
    if softcap <= 0.0:
        return logits, None
    squashed = logits.div_(softcap).tanh_()
    return softcap * squashed, squashed


def _logits(data: Tensor, weight: Tensor, bias: Tensor | None, first: int, step: int, half: bool) -> Tensor:
    logits = product(data, weight[first : first + step].t(), half)
    if bias is not None:
        logits.add_(bias[first : first + step])
    return logits


def column(target: Tensor, width: int) -> Tensor:
    """Index of the target word among `width` columns, `(..., 1)`, for `gather`; any column if the word is not there."""
    return target.to(torch.int64).clamp(0, width - 1)[..., None]


def _row_chunks(logits: Tensor) -> list[slice]:
    step = max(1, CHUNK_BYTES // (wide_dtype(logits.dtype).itemsize * logits.shape[1]))
    return [slice(first, first + step) for first in range(0, logits.shape[0], step)]
