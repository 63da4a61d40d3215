"""What levels share that hold the logits of a part of the vocabulary at a time.

The vocabulary is what is walked, in both passes, not the tokens. The gradient of the weight of some words is then one
product over all tokens, complete when it is written and rounded once; only the gradient of the hidden states is added
up over the chunks, in float32. Walking the tokens, the gradient of the whole weight would be what is added up, in a
float32 copy twice its size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernel_pytorch.linear_cross_entropy.rules.cross_entropy import counted, wide_dtype

CHUNK_BYTES = 64 * 2**20  # of the logits of a chunk
FEWEST_WORDS = 512  # below, the products are too narrow; where this takes more bytes, hidden is much larger itself
WORDS = 128  # a chunk is a multiple of this: rows of tiles, aligned for the copy engine

LogitsGradient = Callable[[int, int], tuple[Tensor, "Tensor | None"]]
"""Words `first` to `last` -> gradient of their logits, `(T, last - first)`, and its sum over tokens where wanted."""


def words_at_a_time(tokens: int, words: int, itemsize: int, chunk: int) -> int:
    """How many words a chunk has: what the user said, else as many as fit in `CHUNK_BYTES`.

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
    if not left.is_cuda:  # where kernels are compiled and cannot be run: nobody reads what this is
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


def _add_product(total: Tensor, left: Tensor, right: Tensor, half: bool) -> Tensor:
    return total.addmm_(left, right) if total.dtype == left.dtype else total.add_(product(left, right, half))


def _store_product(place: Tensor, left: Tensor, right: Tensor, half: bool, scale: Tensor | None) -> None:
    if scale is None and place.dtype == left.dtype == right.dtype and (place.is_cuda or not half):
        torch.mm(left, right, out=place)
        return
    found = product(left, right, half)
    place.copy_(found if scale is None else found.mul_(scale))
