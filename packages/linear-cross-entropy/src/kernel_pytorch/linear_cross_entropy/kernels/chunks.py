"""What levels share that hold a part of the logits at a time.

Where gradients are computed together with the loss (`by_tokens`), tokens are walked: the gradient of a logit needs the
sum over its row. The gradient of the hidden states of some tokens is then complete when it is written; that of the
weight is added up over the chunks of tokens.

In a backward that computes logits again (`backward`), the vocabulary is walked. The gradient of the weight of some
words is then one product over all tokens, rounded once; that of the hidden states is added up, in float32. Nothing is
held between the passes, and the incoming gradient of each token is known.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernel_pytorch.linear_cross_entropy.rules.cross_entropy import counted, wide_dtype
from kernel_pytorch.linear_cross_entropy.rules.linear_cross_entropy import dtype_of_gradient

CHUNK_BYTES = 64 * 2**20  # of the logits of a chunk
FEWEST_WORDS = 512  # below, the products are too narrow; where this takes more bytes, hidden is much larger itself
WORDS = 128  # a chunk is a multiple of this: rows of tiles, aligned for the copy engine
# A bfloat16 gradient of the weight is rounded once for each chunk of tokens: as often as its error budget allows, and
# in products long enough that reading and writing it takes a small part of their time. In 16 bits the logits of a chunk
# are 512 MiB: a launch of each kernel and a product of the last few words are little beside those.
FEWEST_TOKENS, MOST_CHUNKS, MOST_LOGITS = 2048, 8, 2**28
ALIGNED_WORDS = 8  # 16 bytes of logits: cuBLAS has its fast kernels for sizes and strides of multiples of this

LogitsGradient = Callable[[int, int], tuple[Tensor, "Tensor | None"]]
"""Words `first` to `last` -> gradient of their logits, `(T, last - first)`, and its sum over tokens where wanted."""


def words_at_a_time(tokens: int, words: int, itemsize: int, chunk: int) -> int:
    """Number of words in a chunk: `chunk` if the user gave it, else the most that fit in `CHUNK_BYTES`.

    Args:
        tokens: how many there are.
        words: in the vocabulary.
        itemsize: bytes of a logit.
        chunk: as the user gave it; 0 for None.
    """
    if chunk > 0:
        return min(chunk, words)
    fitting = CHUNK_BYTES // (itemsize * max(1, tokens))
    return min(words, max(FEWEST_WORDS, fitting // WORDS * WORDS))


def tokens_at_a_time(tokens: int, words: int) -> int:
    """Number of tokens in a chunk on a GPU, about the same in all chunks.

    A chunk has at most the largest of `MOST_LOGITS` logits, `FEWEST_TOKENS` tokens and an eighth of all tokens.
    """
    fitting = max(FEWEST_TOKENS, MOST_LOGITS // words)
    chunks = max(1, min(MOST_CHUNKS, -(-tokens // fitting)))
    return max(1, min(tokens, -(-tokens // (chunks * WORDS)) * WORDS))


def tokens_that_fit(row: int) -> int:
    """Number of tokens in a chunk on a CPU: rows of `row` bytes of logits that fit in `CHUNK_BYTES`, at least 32."""
    return max(32, CHUNK_BYTES // row)


def multiplies_half(matrix: Tensor) -> bool:
    """Whether products of this matrix are made of 16-bit numbers and added in float32, as tensor cores do."""
    return matrix.device.type == "cuda" and matrix.dtype.itemsize == 2


def operand(matrix: Tensor, half: bool) -> Tensor:
    """What `product` takes: 16-bit numbers as they are with `half`, elsewhere widened before they are multiplied."""
    return matrix if half else matrix.to(wide_dtype(matrix.dtype))


def product(left: Tensor, right: Tensor, half: bool) -> Tensor:
    """`left @ right` of operands, added up and returned in float32 (float64 for float64)."""
    if not half:
        return torch.mm(operand(left, half), operand(right, half))
    if not left.is_cuda:  # where kernels are compiled but cannot run: the values are never read
        return left.new_empty((left.shape[0], right.shape[1]), dtype=torch.float32)
    return torch.mm(left, right, out_dtype=torch.float32)


def incoming(
    dloss: Tensor, target: Tensor, words: int, ignore_index: int, scaled: bool
) -> tuple[Tensor, Tensor | None]:
    """What comes in for each token, zero where it does not count; and what it was divided by, where `scaled`.

    Divided by a power of two it is at most one, so that float16 can hold the gradients of the logits whatever the loss
    is averaged over.
    """
    dloss = torch.where(counted(target, words, ignore_index), dloss, 0.0)
    if not scaled or dloss.numel() == 0:
        return dloss, None
    scale = power_of_two_above(dloss.abs().amax())
    return dloss / scale, scale


def dloss_of_sum(divisor: Tensor | None, like: Tensor) -> Tensor:
    """What comes in for each token where losses are added up and divided, `()`, wide."""
    wide = wide_dtype(like.dtype)
    return like.new_ones((), dtype=wide) if divisor is None else divisor.to(wide).reciprocal()


def power_of_two_above(largest: Tensor) -> Tensor:
    """The power of two above a positive number, at most twice as large; one for zero. It stays on its device."""
    exponent = torch.frexp(largest).exponent
    return torch.where(largest > 0, torch.ldexp(torch.ones_like(largest), exponent), 1.0)


def backward(
    logits_gradient: LogitsGradient,
    half: bool,
    scale: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    step: int,
    need_dhidden: bool,
    need_dweight: bool,
    need_dbias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of hidden, weight and bias from those of the logits, chunk by chunk.

    Args:
        logits_gradient: computes a chunk.
        half: whether it is multiplied in 16 bits, as hidden and weight are.
        scale: what the gradients of the logits were divided by, `()`; None for one.
        hidden: `(T, H)`.
        weight: `(V, H)`.
        bias: `(V,)` or None.
        step: words in a chunk.
        need_dhidden: whether the first result is there.
        need_dweight: whether the second result is there.
        need_dbias: whether the third result is there.

    Returns:
        Contiguous, each in the dtype of what it is the gradient of; `(0,)` where not needed.
    """
    like_bias = weight if bias is None else bias
    dweight = weight.new_empty(weight.shape if need_dweight else (0,))
    dbias = like_bias.new_empty(weight.shape[:1] if need_dbias else (0,))
    total = hidden.new_zeros(hidden.shape if need_dhidden else (0,), dtype=wide_dtype(hidden.dtype))
    data = operand(hidden, half) if need_dweight else hidden
    for first in range(0, weight.shape[0], step):
        last = min(first + step, weight.shape[0])
        gradient, over_tokens = logits_gradient(first, last)
        if need_dhidden:
            total = _add_product(total, gradient, operand(weight[first:last], half), half)
        if need_dweight:
            _store_product(dweight[first:last], gradient.t(), data, half, scale)
        if need_dbias and over_tokens is not None:
            dbias[first:last] = over_tokens if scale is None else over_tokens * scale
    if need_dhidden and scale is not None:
        total.mul_(scale)
    return total.to(hidden.dtype), dweight, dbias


LossAndGradient = Callable[[int, int], tuple[Tensor, Tensor, "Tensor | None"]]
"""Tokens `first` to `last` -> their losses, the gradient of their logits, `(last - first, V)`, its sum over them."""


def by_tokens(
    compute: LossAndGradient,
    half: bool,
    scale: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    divisor: Tensor | None,
    step: int,
    need_dhidden: bool,
    need_dweight: bool,
    need_dbias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss, and gradients of hidden, weight and bias, some tokens at a time.

    Args:
        compute: computes a chunk.
        half: as in `backward`; so is the rest.
        divisor: what the sum of losses is divided by, `()`; None for one.
        step: tokens in a chunk.

    Returns:
        The loss, `()`, and gradients: contiguous, in `dtype_of_gradient` of what they belong to, that of the bias wide;
        `(0,)` where not needed.
    """
    wide, kept = wide_dtype(hidden.dtype), dtype_of_gradient(hidden.dtype)
    tokens, added = hidden.shape[0], kept if half else wide
    dhidden = hidden.new_empty(hidden.shape if need_dhidden else (0,), dtype=added)
    dweight = weight.new_empty(weight.shape if need_dweight else (0,), dtype=added)
    dbias = weight.new_zeros((weight.shape[0] if need_dbias else 0,), dtype=wide)
    losses = [hidden.new_zeros((0,), dtype=wide)]
    for first in range(0, tokens, step):
        last = min(first + step, tokens)
        loss, gradient, over_tokens = compute(first, last)
        losses.append(loss)
        for part in parts_of_words(weight, half):
            if need_dhidden:
                store_or_add(dhidden[first:last], gradient[:, part], weight[part], half, part.start == 0)
            if need_dweight:
                store_or_add(dweight[part], gradient[:, part].t(), hidden[first:last], half, first == 0)
        if over_tokens is not None:
            dbias += over_tokens
    if tokens == 0:
        dweight.zero_()
    for found in () if scale is None else (dhidden, dweight, dbias):
        found.mul_(scale)
    total = torch.cat(losses).sum()
    return total if divisor is None else total / divisor, dhidden.to(kept), dweight.to(kept), dbias


def parts_of_words(weight: Tensor, half: bool) -> list[slice]:
    """Parts of the vocabulary to multiply one after the other.

    Products in 16 bits: a multiple of `ALIGNED_WORDS`, then the last few words. A weight that is widened before the
    product: parts whose widened copies take at most `CHUNK_BYTES`. Otherwise: the whole vocabulary.
    """
    words, depth = weight.shape
    step = words
    if half:
        step = words // ALIGNED_WORDS * ALIGNED_WORDS or words
    elif weight.dtype != wide_dtype(weight.dtype):
        step = max(1, CHUNK_BYTES // (4 * max(1, depth)))
    return [slice(first, min(first + step, words)) for first in range(0, words, step)]


def store_or_add(total: Tensor, left: Tensor, right: Tensor, half: bool, is_first: bool) -> None:
    """`total = left @ right`, or `+=`."""
    if half and not total.is_cuda:  # where kernels are compiled and cannot be run
        return
    left, right = operand(left, half), operand(right, half)
    if total.dtype != left.dtype and is_first:
        torch.mm(left, right, out_dtype=total.dtype, out=total)
    elif total.dtype != left.dtype:
        total.add_(product(left, right, half))
    elif is_first:
        torch.mm(left, right, out=total)
    else:
        total.addmm_(left, right)


def _add_product(total: Tensor, left: Tensor, right: Tensor, half: bool) -> Tensor:
    return total.addmm_(left, right) if total.dtype == left.dtype else total.add_(product(left, right, half))


def _store_product(place: Tensor, left: Tensor, right: Tensor, half: bool, scale: Tensor | None) -> None:
    if scale is None and place.dtype == left.dtype == right.dtype and (place.is_cuda or not half):
        torch.mm(left, right, out=place)
        return
    found = product(left, right, half)
    place.copy_(found if scale is None else found.mul_(scale))
