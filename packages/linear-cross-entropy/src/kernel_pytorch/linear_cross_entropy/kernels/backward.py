# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""The backward of a linear layer with cross entropy: the Triton kernel, then the launcher.

The logits of some words are computed again, tile by tile, and what is written of each is its gradient: the softmax is
one exponential away, since the forward has kept the sum. Those gradients, 16 bits wide where the inputs are, are the
operands of two plain products, which are cuBLAS'. Chunk by chunk over the vocabulary, so that never more than one is
held (see `chunks.py`).

Two kernels with both products inside would write no gradients of logits at all. But the gradient of the hidden states
of 128 tokens is 2 MB in float32 for H = 4096, eight times the registers of a multiprocessor: it would have to be added
up in memory, by atomics, whose order is another in every run, or the logits computed once for each part of H. What that
would save is little: 2 bytes a logit, written once and read twice, take 4 % of the time of its 6 H operations.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_pytorch.linear_cross_entropy._core.device import on_device
from kernel_pytorch.linear_cross_entropy._core.launch import cdiv

from .chunks import WORDS, incoming, words_at_a_time
from .chunks import backward as backward_by_chunks
from .configurations import GRADIENT
from .matmul import Shape, add_bias, halves, multiply, store_tile, tile_at
from .tiles import load_targets, logits_gradient


@triton.jit
def _finish(
    tile, bias_ptr, gradient, shares_ptr, row, column, tokens, width, gradient_stride, target, largest, log_sum, dloss,
    words, first,
    LABEL_SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, SOFTCAP: tl.constexpr, HAS_BIAS: tl.constexpr,
    NEED_DBIAS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE_ROWS: tl.constexpr,
    PARTS: tl.constexpr, DESCRIPTORS: tl.constexpr, LONG_OFFSETS: tl.constexpr,
):  # fmt: skip
    """The epilogue of a tile, part after part."""
    if PARTS > 1:
        left, right = halves(tile, ROWS, COLUMNS)
        _finish(left, bias_ptr, gradient, shares_ptr, row, column, tokens, width, gradient_stride, target, largest,
                log_sum, dloss, words, first, LABEL_SMOOTHING, Z_LOSS, SOFTCAP, HAS_BIAS, NEED_DBIAS, HALF, ROWS,
                COLUMNS // 2, TILE_ROWS, PARTS // 2, DESCRIPTORS, LONG_OFFSETS)  # fmt: skip
        _finish(right, bias_ptr, gradient, shares_ptr, row, column + COLUMNS // 2, tokens, width, gradient_stride,
                target, largest, log_sum, dloss, words, first, LABEL_SMOOTHING, Z_LOSS, SOFTCAP, HAS_BIAS, NEED_DBIAS,
                HALF, ROWS, COLUMNS // 2, TILE_ROWS, PARTS // 2, DESCRIPTORS, LONG_OFFSETS)  # fmt: skip
    else:
        logits = add_bias(tile, bias_ptr, column, width, COLUMNS, HAS_BIAS)
        word = first + column + tl.arange(0, COLUMNS)[None, :]
        found = logits_gradient(logits, word, target, largest, log_sum, dloss, words, LABEL_SMOOTHING, Z_LOSS, SOFTCAP,
                                HALF)  # fmt: skip
        # Beyond the last word there is room up to the next row, and whole vectors are stored.
        store_tile(gradient, found, row, column, tokens, gradient_stride, gradient_stride, ROWS, COLUMNS, DESCRIPTORS,
                   LONG_OFFSETS)  # fmt: skip
        if NEED_DBIAS:
            # Rows beyond the last have no incoming gradient, so they add nothing.
            place = column + tl.arange(0, COLUMNS)
            share = shares_ptr + (row // TILE_ROWS) * width
            tl.store(share + place, tl.sum(found, axis=0), mask=place < width)


@triton.jit
def _gradient_kernel(
    hidden, weight, bias_ptr, target_ptr, normalizer_ptr, dloss_ptr, gradient, shares_ptr, tokens, width, depth,
    hidden_row_stride, hidden_column_stride, weight_row_stride, weight_column_stride, gradient_stride,
    words, first, ignore_index,
    LABEL_SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, SOFTCAP: tl.constexpr, HAS_BIAS: tl.constexpr,
    NEED_DBIAS: tl.constexpr, PARTS: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, GROUP: tl.constexpr, DESCRIPTORS: tl.constexpr, LONG_OFFSETS: tl.constexpr,
):  # fmt: skip
    """This program computes every num_programs-th tile of the gradient of the logits of `width` words from `first` on.

    hidden: (T, H), weight: (width, H), gradient: (T, width) with unit stride in its rows, as descriptors or pointers.
    bias: (width). target, dloss: (T). normalizer: (T, 2). shares: (rows of tiles, width), the sum over the tokens of
    each.
    """
    tiles = tl.cdiv(tokens, ROWS) * tl.cdiv(width, COLUMNS)
    for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=False):
        row, column = tile_at(index, tokens, width, ROWS, COLUMNS, GROUP)
        tile = multiply(
            hidden, weight, row, column, tokens, width, depth, hidden_row_stride, hidden_column_stride,
            weight_row_stride, weight_column_stride, PRECISION, WIDE, ROWS, COLUMNS, DEPTH, DESCRIPTORS, LONG_OFFSETS,
        )  # fmt: skip
        token = row + tl.arange(0, ROWS)
        exists = token < tokens
        target = load_targets(target_ptr, token, exists, words, ignore_index)
        largest = tl.load(normalizer_ptr + 2 * token, mask=exists, other=0.0)
        log_sum = tl.load(normalizer_ptr + 2 * token + 1, mask=exists, other=0.0)
        dloss = tl.load(dloss_ptr + token, mask=exists, other=0.0)
        _finish(tile, bias_ptr, gradient, shares_ptr, row, column, tokens, width, gradient_stride, target, largest,
                log_sum, dloss, words, first, LABEL_SMOOTHING, Z_LOSS, SOFTCAP, HAS_BIAS, NEED_DBIAS, HALF, ROWS,
                COLUMNS, ROWS, PARTS, DESCRIPTORS, LONG_OFFSETS)  # fmt: skip


def _launch(
    gradient: Tensor,
    dloss: Tensor,
    normalizer: Tensor,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    words: int,
    first: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    need_dbias: bool,
) -> Tensor | None:
    """Write the gradient of the logits of one chunk, `(T, width)`, from its part of weight and bias.

    Returns:
        Its sum over the tokens, `(width,)`, where that is needed.
    """
    tokens, width = gradient.shape
    shape = Shape(GRADIENT, tokens, width, hidden, weight, gradient)
    shares = None
    if need_dbias:
        down = cdiv(tokens, shape.chosen.rows)
        shares = torch.empty((down, width), dtype=normalizer.dtype, device=hidden.device)
    if tokens > 0:
        _gradient_kernel[(shape.programs,)](
            shape.operand(hidden, shape.chosen.rows), shape.operand(weight, shape.chosen.columns), bias,
            target, normalizer, dloss, shape.result(gradient), shares,
            tokens, width, hidden.shape[1], *hidden.stride(), *weight.stride(), gradient.stride(0),
            words, first, ignore_index,
            LABEL_SMOOTHING=label_smoothing, Z_LOSS=z_loss, SOFTCAP=softcap, HAS_BIAS=bias is not None,
            NEED_DBIAS=need_dbias, PARTS=shape.chosen.parts, **shape.constants,
        )  # fmt: skip
    return None if shares is None else shares.sum(0)


def backward(
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
    """Compute gradients of hidden, weight and bias: one launch and up to two products for each chunk of the vocabulary.

    Args:
        dloss: `(T,)`, any strides.
        normalizer: `(T, 2)`, as the forward returned it.
        hidden: `(T, H)`, any strides.
        weight: `(V, H)` in the dtype of hidden, any strides.
        target: `(T,)`.
        bias: `(V,)` or None.
        ignore_index: as in `reference.py`.
        label_smoothing: as in `reference.py`.
        z_loss: as in `reference.py`.
        softcap: as in `reference.py`.
        chunk: words of a chunk; 0 for the default.
        need_dhidden: whether the first result is there.
        need_dweight: whether the second result is there.
        need_dbias: whether the third result is there.

    Returns:
        Contiguous, in the dtypes of hidden, weight and bias; `(0,)` where not needed.
    """
    tokens, words = hidden.shape[0], weight.shape[0]
    step = words_at_a_time(tokens, words, hidden.dtype.itemsize, chunk)
    dloss, scale = incoming(dloss, target, words, ignore_index, hidden.dtype == torch.float16)
    dloss, normalizer, target = dloss.to(normalizer.dtype).contiguous(), normalizer.contiguous(), target.contiguous()
    bias = None if bias is None else bias.contiguous()
    half = hidden.dtype.itemsize == 2 and not triton.knobs.runtime.interpret
    # Rows of a multiple of 128 words, so that every chunk can be stored in vectors, or by the copy engine.
    buffer = torch.empty((tokens, cdiv(step, WORDS) * WORDS), dtype=hidden.dtype, device=hidden.device)

    def logits_gradient_of(first: int, last: int) -> tuple[Tensor, Tensor | None]:
        gradient, own_bias = buffer[:, : last - first], None if bias is None else bias[first:last]
        scalars = words, first, ignore_index, label_smoothing, z_loss, softcap
        sums = _launch(gradient, dloss, normalizer, hidden, weight[first:last], target, own_bias, *scalars, need_dbias)
        return gradient, sums

    needed = need_dhidden, need_dweight, need_dbias
    with on_device(hidden):
        return backward_by_chunks(logits_gradient_of, half, scale, hidden, weight, bias, step, *needed)
