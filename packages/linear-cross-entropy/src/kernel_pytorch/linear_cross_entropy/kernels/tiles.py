# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""What the kernels make of logits: functions of tiles in registers, in float32 or float64, and the join of shares.

HALF says that the logits came from 16-bit numbers; then `tanh` is taken by instructions that are off by a few units in
the last place of its largest value, a third as many.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from kernel_pytorch.linear_cross_entropy._core.launch import bind
from kernel_pytorch.linear_cross_entropy._core.sizes import allocator, cdiv

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
JOINED_TOKENS, JOINED_SHARES = 16, 64  # of a tile of the join


@triton.jit
def tanh(x, HALF: tl.constexpr):
    """Hyperbolic tangent, also of small numbers.

    Below one by Lambert's continued fraction, which nine terms bring to 2e-16; beyond, `1 - exp(-2|x|)` loses nothing.
    With HALF below 1/8 by its series, to 4e-7 of itself.
    """
    if HALF and not INTERPRETED:  # which has no libdevice
        t = x * x
        small = x * (1.0 + t * (-0.3333333333333333 + t * 0.13333333333333333))
        large = 1.0 - libdevice.fast_dividef(2.0, 1.0 + tl.exp2(2.8853900817779268 * x))
        return tl.where(tl.abs(x) < 0.125, small, large)
    else:
        e = tl.exp(-2.0 * tl.abs(x))
        large = (1.0 - e) / (1.0 + e)
        t = tl.minimum(x * x, 1.0)
        numerator = 34459425.0 + t * (4729725.0 + t * (135135.0 + t * (990.0 + t)))
        denominator = 34459425.0 + t * (16216200.0 + t * (945945.0 + t * (13860.0 + t * 45.0)))
        return tl.where(tl.abs(x) < 1.0, x * (numerator / denominator), tl.where(x < 0, -large, large))


@triton.jit
def capped(logits, SOFTCAP: tl.constexpr, HALF: tl.constexpr):
    """`softcap * tanh(logits / softcap)`; as they are for a cap of zero."""
    if SOFTCAP > 0.0:
        return SOFTCAP * tanh(logits * (1.0 / SOFTCAP), HALF)
    else:
        return logits


@triton.jit
def add_exponentials(z, largest, total):
    """Update the largest logit of each row with a tile, and the sum of exponentials relative to it.

    The maximum passes over NaN; the sum keeps it.
    """
    new = tl.maximum(largest, tl.max(z, axis=1))
    base = tl.where(new == float("-inf"), 0.0, new)  # only -inf so far: a difference would be NaN
    total = total * tl.exp(largest - base) + tl.sum(tl.exp(z - base[:, None]), axis=1)
    return new, total


@triton.jit
def finite_or_zero(x):
    """A number as it is, and zero for infinity and NaN, whose differences would be no numbers."""
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit
def add_logits(z, mask, largest, new, seen, total):
    """Add a tile of logits to their sum, relative to the largest logit of each row.

    A direct sum of large logits would lose their differences. `largest` and `new` are the largest logits before and
    with this tile; `seen` is the number of logits added before.
    """
    base = finite_or_zero(new)
    total += seen * (finite_or_zero(largest) - base)
    return total + tl.sum(tl.where(mask, z - base[:, None], 0.0), axis=1)


@triton.jit
def load_targets(target_ptr, token, mask, words, ignore_index):
    """Targets of tokens, -1 for those that do not count: 32 bits are enough, and whatever was given is in bounds."""
    target = tl.load(target_ptr + token, mask=mask, other=-1).to(tl.int64)
    counts = (target != ignore_index) & (target >= 0) & (target < words)
    return tl.where(counts, target, -1).to(tl.int32)


@triton.jit
def logits_gradient(
    logits, word, target, largest, log_sum, dloss, words,
    LABEL_SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, SOFTCAP: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile of logits: `(softmax * (1 + 2 z_loss lse) - smoothed target) * dloss * cap'`.

    word: (1, B) counted as targets are. target, largest, log_sum, dloss: (R,); the target of a token that does not
    count is -1.
    """
    if SOFTCAP > 0.0:
        squashed = tanh(logits * (1.0 / SOFTCAP), HALF)
        gradient = tl.exp(SOFTCAP * squashed - largest[:, None] - log_sum[:, None])
    else:
        gradient = tl.exp(logits - largest[:, None] - log_sum[:, None])
    if Z_LOSS > 0.0:
        gradient = gradient * (1.0 + (2.0 * Z_LOSS) * (largest + log_sum))[:, None]
    if LABEL_SMOOTHING > 0.0:
        # `words` may be a constant: a scalar of 1 is one.
        gradient = gradient - tl.full((), LABEL_SMOOTHING, logits.dtype) / words
    gradient = tl.where(word == target[:, None], gradient - (1.0 - LABEL_SMOOTHING), gradient)
    if SOFTCAP > 0.0:
        gradient = gradient * (1.0 - squashed * squashed)
    # What a token that does not count computes may be NaN, times zero.
    return tl.where((target >= 0)[:, None], gradient * dloss[:, None], 0.0)


@triton.jit
def _join_kernel(
    largest_ptr, exponentials_ptr, sum_shares_ptr, picked_ptr, target_ptr, loss_ptr, normalizer_ptr, tokens, shares,
    words, words_of_share, ignore_index,
    LABEL_SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, TOKENS: tl.constexpr, SHARES: tl.constexpr,
):  # fmt: skip
    """This program joins the shares of TOKENS tokens, always in the same order, and makes their losses.

    largest, exponentials, sum_shares: (S, T), of parts of the vocabulary of `words_of_share` words: maxima, and sums of
    exponentials and of logits relative to them. picked: (T), the logit of the target where there is one. loss: (T).
    normalizer: (T, 2).
    """
    wide = loss_ptr.dtype.element_ty
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    exists = token < tokens
    largest = tl.full((TOKENS,), float("-inf"), wide)
    total = tl.zeros((TOKENS,), wide)
    logits = tl.zeros((TOKENS,), wide)
    for first in range(0, shares, SHARES):
        share = first + tl.arange(0, SHARES)[None, :]
        place = share.to(tl.int64) * tokens + token[:, None]
        mask = exists[:, None] & (share < shares)
        maxima = tl.load(largest_ptr + place, mask=mask, other=float("-inf"))
        sums = tl.load(exponentials_ptr + place, mask=mask, other=0.0)
        new = tl.maximum(largest, tl.max(maxima, axis=1))
        base = tl.where(new == float("-inf"), 0.0, new)
        total = total * tl.exp(largest - base) + tl.sum(sums * tl.exp(maxima - base[:, None]), axis=1)
        if LABEL_SMOOTHING > 0.0:
            seen = tl.minimum(first * words_of_share, words)
            size = tl.minimum(words - share * words_of_share, words_of_share)
            here = size * (finite_or_zero(maxima) - finite_or_zero(new)[:, None])
            here += tl.load(sum_shares_ptr + place, mask=mask, other=0.0)
            logits += seen * (finite_or_zero(largest) - finite_or_zero(new)) + tl.sum(tl.where(mask, here, 0.0), axis=1)
        largest = new
    log_sum = tl.log(tl.where(total == 0.0, 1.0, total))  # if all are -inf, the differences are NaN anyway
    target = load_targets(target_ptr, token, exists, words, ignore_index)
    picked = tl.load(picked_ptr + token, mask=exists & (target >= 0), other=0.0)
    loss = log_sum - (1.0 - LABEL_SMOOTHING) * (picked - largest)
    if LABEL_SMOOTHING > 0.0:
        loss -= LABEL_SMOOTHING * (logits / words)
    if Z_LOSS > 0.0:
        loss += Z_LOSS * ((largest + log_sum) * (largest + log_sum))
    tl.store(loss_ptr + token, tl.where(target >= 0, loss, 0.0), mask=exists)
    tl.store(normalizer_ptr + 2 * token, largest, mask=exists)
    tl.store(normalizer_ptr + 2 * token + 1, log_sum, mask=exists)


class Shares:
    """What the programs of a forward write, each for its part of the vocabulary, and the join of it."""

    def __init__(
        self, parts: int, words_of_part: int, target: Tensor, words: int, ignore_index: int, label_smoothing: float,
        z_loss: float, wide: torch.dtype,
    ) -> None:  # fmt: skip
        tokens = target.numel()
        self._new_part, self._new_token = allocator(target, (parts, tokens), wide), allocator(target, (tokens,), wide)
        self._new_loss = allocator(target, dtype=wide)
        self._new_normalizer = allocator(target, (*target.shape, 2), wide)
        self._smoothed = label_smoothing > 0.0
        self._join = bind(
            _join_kernel, (cdiv(tokens, JOINED_TOKENS),), tokens, parts, words, words_of_part, ignore_index,
            LABEL_SMOOTHING=label_smoothing, Z_LOSS=z_loss, TOKENS=JOINED_TOKENS, SHARES=JOINED_SHARES, num_warps=4,
        )  # fmt: skip

    def new(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """Memory for them.

        `(S, T)`, the largest logits; sums of exponentials relative to those; sums of logits relative to those, None
        where the labels are not smoothed; and `(T,)`, logits of the targets, nothing for tokens that do not count.
        """
        return self._new_part(), self._new_part(), self._new_part() if self._smoothed else None, self._new_token()

    def join(self, shares: tuple[Tensor, Tensor, Tensor | None, Tensor], target: Tensor) -> tuple[Tensor, Tensor]:
        """`(loss, normalizer)`, like the target and with two numbers for each: one launch."""
        loss, normalizer = self._new_loss(), self._new_normalizer()
        self._join(*shares, target, loss, normalizer)
        return loss, normalizer


def triton_dtype(dtype: torch.dtype) -> tl.dtype:
    """float32 or float64 as Triton names it."""
    return tl.float64 if dtype == torch.float64 else tl.float32
