# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""The forward of a linear layer with cross entropy in Triton: the kernel, then the launcher.

Programs stay on their multiprocessor and walk tiles of logits, `(tokens, words)`. A tile is reduced in registers, while
it is there, to three or four numbers a token, its share of the sum of exponentials among them, and is never written. A
second, small kernel joins the shares of each token in a fixed order. For 4,096 tokens and 128,256 words that is 33 MB
of shares instead of 2.1 GB of logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kernel_pytorch.linear_cross_entropy._core.launch import bind
from kernel_pytorch.linear_cross_entropy._core.sizes import cdiv, reader
from kernel_pytorch.linear_cross_entropy._core.triton_matmul import halves, tile_at
from kernel_pytorch.linear_cross_entropy.rules.cross_entropy import wide_dtype

from .configurations import FORWARD
from .matmul import Shape, add_bias, matrix_of, multiply
from .tiles import Shares, add_exponentials, add_logits, capped, load_targets


@triton.jit
def _reduce(
    tile, largest, exponentials, total, picked, bias_ptr, first, column, words, target,
    SOFTCAP: tl.constexpr, SMOOTHED: tl.constexpr, HAS_BIAS: tl.constexpr, HALF: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Take a tile of products into what there is of each token so far, part after part; `first` is its first word."""
    if PARTS > 1:
        left, right = halves(tile, ROWS, COLUMNS)
        largest, exponentials, total, picked = _reduce(
            left, largest, exponentials, total, picked, bias_ptr, first, column, words, target, SOFTCAP, SMOOTHED,
            HAS_BIAS, HALF, ROWS, COLUMNS // 2, PARTS // 2,
        )  # fmt: skip
        largest, exponentials, total, picked = _reduce(
            right, largest, exponentials, total, picked, bias_ptr, first, column + COLUMNS // 2, words, target,
            SOFTCAP, SMOOTHED, HAS_BIAS, HALF, ROWS, COLUMNS // 2, PARTS // 2,
        )  # fmt: skip
        return largest, exponentials, total, picked
    else:
        z = capped(add_bias(tile, bias_ptr, column, words, COLUMNS, HAS_BIAS), SOFTCAP, HALF)
        word = (column + tl.arange(0, COLUMNS))[None, :]
        picked += tl.sum(tl.where(word == target[:, None], z, 0.0), axis=1)
        z = tl.where(word < words, z, float("-inf"))
        new, exponentials = add_exponentials(z, largest, exponentials)
        if SMOOTHED:
            total = add_logits(z, word < words, largest, new, tl.minimum(column, words) - first, total)
        return new, exponentials, total, picked


@triton.jit
def _forward_kernel(
    hidden, weight, bias_ptr, target_ptr, largest_ptr, exponentials_ptr, sum_shares_ptr, picked_ptr,
    tokens, words, depth,
    hidden_row_stride, hidden_column_stride, weight_row_stride, weight_column_stride, ignore_index,
    SOFTCAP: tl.constexpr, SMOOTHED: tl.constexpr, HAS_BIAS: tl.constexpr, PARTS: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, GROUP: tl.constexpr, DESCRIPTORS: tl.constexpr, LONG_OFFSETS: tl.constexpr,
):  # fmt: skip
    """This program reduces every num_programs-th tile of `hidden @ weight.T + bias`.

    hidden: (T, H), weight: (V, H), as descriptors or pointers. bias: (V). target, picked: (T). largest,
    exponentials, sum_shares: (tiles in a row, T).
    """
    tiles = tl.cdiv(tokens, ROWS) * tl.cdiv(words, COLUMNS)
    for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=False):
        row, column = tile_at(index, tokens, words, ROWS, COLUMNS, GROUP)
        tile = multiply(
            hidden, weight, row, column, tokens, words, depth, hidden_row_stride, hidden_column_stride,
            weight_row_stride, weight_column_stride, PRECISION, WIDE, ROWS, COLUMNS, DEPTH, DESCRIPTORS, LONG_OFFSETS,
        )  # fmt: skip
        token = row + tl.arange(0, ROWS)
        exists = token < tokens
        target = load_targets(target_ptr, token, exists, words, ignore_index)
        zeros = tl.zeros((ROWS,), WIDE)
        largest, exponentials, total, picked = _reduce(
            tile, zeros - float("inf"), zeros, zeros, zeros, bias_ptr, column, column, words, target, SOFTCAP,
            SMOOTHED, HAS_BIAS, HALF, ROWS, COLUMNS, PARTS,
        )  # fmt: skip
        share = (column // COLUMNS).to(tl.int64) * tokens + token
        tl.store(largest_ptr + share, largest, mask=exists)
        tl.store(exponentials_ptr + share, exponentials, mask=exists)
        if SMOOTHED:
            tl.store(sum_shares_ptr + share, total, mask=exists)
        # The tile that holds the word of a token alone writes its logit.
        tl.store(picked_ptr + token, picked, mask=(target >= column) & (target < column + COLUMNS))


def plan(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
) -> Callable[..., tuple[Tensor, Tensor]]:
    """How the forward is launched for a geometry: one kernel for tiles of logits, and one to join what they leave.

    Args:
        hidden: `(..., H)`, any strides.
        weight: `(V, H)` in the dtype of hidden, any strides.
        target: `(...)`.
        bias: `(V,)` or None.

    Returns:
        A function of the tensors that returns `(loss, normalizer)`, `(...)` and `(..., 2)`, wide.
    """
    as_matrix = matrix_of(hidden)
    matrix, (words, depth), smoothed = as_matrix(hidden), weight.shape, label_smoothing > 0.0
    shape = Shape(FORWARD, matrix.shape[0], words, matrix, weight)
    width = shape.chosen.columns
    parts = Shares(
        cdiv(words, width), width, target, words, ignore_index, label_smoothing, z_loss, wide_dtype(hidden.dtype)
    )
    launch = bind(
        _forward_kernel, (shape.programs,),
        matrix.shape[0], words, depth, *matrix.stride(), *weight.stride(), ignore_index,
        described=[*shape.operands(matrix, weight), *[None] * 6],
        SOFTCAP=softcap, SMOOTHED=smoothed, HAS_BIAS=bias is not None, PARTS=shape.chosen.parts, **shape.constants,
    )  # fmt: skip
    read_hidden, read_target = reader(hidden, as_matrix), reader(target, Tensor.contiguous)
    read_bias = reader(bias, Tensor.contiguous)

    def run(
        hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, *scalars: Any
    ) -> tuple[Tensor, Tensor]:
        target, shares = read_target(target), parts.new()
        launch(read_hidden(hidden), weight, read_bias(bias), target, *shares)
        return parts.join(shares, target)

    return run
