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

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_pytorch.linear_cross_entropy._core.launch import Launch, bind
from kernel_pytorch.linear_cross_entropy._core.sizes import allocator, cdiv, reader, unmade
from kernel_pytorch.linear_cross_entropy._core.triton_matmul import halves, store_tile, tile_at
from kernel_pytorch.linear_cross_entropy.rules.cross_entropy import wide_dtype

from .chunks import WORDS, incoming, words_at_a_time
from .chunks import backward as backward_by_chunks
from .configurations import GRADIENT
from .matmul import Shape, add_bias, matrix_of, multiply
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


def plan(
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
) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """How gradients are computed for a geometry: one launch and up to two products for each chunk of the vocabulary.

    Args:
        dloss: `(...)`, any strides.
        normalizer: `(..., 2)`, as the forward returned it.
        hidden: `(..., H)`, any strides.
        weight: `(V, H)` in the dtype of hidden, any strides.
        target: `(...)`.
        bias: `(V,)` or None.
        chunk: words of a chunk; 0 for the default.
        need_dhidden: whether the first result is there.
        need_dweight: whether the second result is there.
        need_dbias: whether the third result is there; not without a bias.

    Returns:
        A function of the tensors that returns gradients of hidden, weight and bias, contiguous, in their dtypes; `(0,)`
        where not needed.
    """
    as_matrix, words, wide = matrix_of(hidden), weight.shape[0], normalizer.dtype
    matrix, need_dbias = as_matrix(hidden), need_dbias and bias is not None
    step = words_at_a_time(matrix.shape[0], words, hidden.dtype.itemsize, chunk)
    half = hidden.dtype.itemsize == 2 and not triton.knobs.runtime.interpret
    # Rows of a multiple of 128 words, so that every chunk can be stored in vectors, or by the copy engine.
    of_buffer = matrix.shape[0], cdiv(step, WORDS) * WORDS
    new_buffer, gradients = allocator(hidden, of_buffer), unmade(of_buffer, hidden.dtype)
    constants = {
        "LABEL_SMOOTHING": label_smoothing, "Z_LOSS": z_loss, "SOFTCAP": softcap, "HAS_BIAS": bias is not None,
        "NEED_DBIAS": need_dbias,
    }  # fmt: skip
    chunks = {
        first: _plan_chunk(matrix, weight[first : first + step], gradients, words, first, ignore_index, constants)
        for first in range(0, words, step)
    }
    needed, scaled = (need_dhidden, need_dweight, need_dbias), hidden.dtype == torch.float16
    read_normalizer, read_target, read_bias = (reader(t, Tensor.contiguous) for t in (normalizer, target, bias))

    def run(
        dloss: Tensor, normalizer: Tensor, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None,
        *scalars: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        dloss, scale = incoming(dloss, target, words, ignore_index, scaled)
        of_tokens = read_target(target), read_normalizer(normalizer), dloss.to(wide).contiguous()
        matrix, bias, buffer = as_matrix(hidden), read_bias(bias), new_buffer()

        def logits_gradient_of(first: int, last: int) -> tuple[Tensor, Tensor | None]:
            launch, new_shares = chunks[first]
            gradient, shares = buffer[:, : last - first], new_shares() if need_dbias else None
            own_bias = None if bias is None else bias[first:last]
            if gradient.numel() > 0:
                launch(matrix, weight[first:last], own_bias, *of_tokens, gradient, shares)
            return gradient, None if shares is None else shares.sum(0)

        dhidden, *others = backward_by_chunks(logits_gradient_of, half, scale, matrix, weight, bias, step, *needed)
        return dhidden.view(hidden.shape) if need_dhidden else dhidden, *others

    return run


def _plan_chunk(
    hidden: Tensor, weight: Tensor, gradients: Tensor, words: int, first: int, ignore_index: int,
    constants: dict[str, Any],
) -> tuple[Launch, Callable[[], Tensor]]:  # fmt: skip
    """The launch that writes the gradient of the logits of some words, and memory for shares of its sum over tokens."""
    tokens, (width, depth) = hidden.shape[0], weight.shape
    gradient = gradients[:, :width]
    shape = Shape(GRADIENT, tokens, width, hidden, weight, gradient)
    launch = bind(
        _gradient_kernel, (shape.programs,),
        tokens, width, depth, *hidden.stride(), *weight.stride(), gradient.stride(0), words, first, ignore_index,
        described=[*shape.operands(hidden, weight), None, None, None, None, shape.result(gradient), None],
        PARTS=shape.chosen.parts, **constants, **shape.constants,
    )  # fmt: skip
    return launch, allocator(hidden, (cdiv(tokens, shape.chosen.rows), width), wide_dtype(hidden.dtype))
