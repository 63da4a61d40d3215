# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Loss and gradients of a linear layer with cross entropy in one pass: Triton kernels, then the launcher.

Where a gradient will be wanted, the logits of some tokens are computed once. A matrix kernel stores the exponential of
each logit, relative to the largest logit of its part of a row: in 16 bits that costs as few digits as rounding the
softmax does, where a rounded logit would cost more the larger it is. When the sums of the rows are known, a second
kernel turns exponentials into the gradient of the logits, in place, and two plain products of it, which are cuBLAS',
are the gradients of hidden states and weight. Computing the logits again in the backward takes a fourth product.

The softmax of the target comes from its logit in float32: if the word is nearly certain, it is nearly cancelled by one,
and under a cap the exponential has the rounded derivative of the cap for a factor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_pytorch.linear_cross_entropy._core.launch import bind
from kernel_pytorch.linear_cross_entropy._core.sizes import allocator, cdiv, reader, unmade, warps
from kernel_pytorch.linear_cross_entropy._core.triton_matmul import halves, store_tile, tile_at
from kernel_pytorch.linear_cross_entropy.rules.cross_entropy import wide_dtype

from .chunks import WORDS, by_tokens, dloss_of_sum, incoming, tokens_at_a_time
from .configurations import GRADIENT
from .matmul import Shape, add_bias, matrix_of, multiply
from .tiles import Shares, load_targets, tanh, triton_dtype

TILE_ROWS, TILE_WORDS = 16, 256  # of the kernel that makes gradients of exponentials
SCALED = 4096  # elements that a program multiplies by the incoming gradient


@triton.jit
def _store_exponentials(
    tile, exponentials, bias_ptr, largest_ptr, sums_ptr, logit_sums_ptr, picked_ptr, row, column, tokens, words,
    row_stride, target,
    SOFTCAP: tl.constexpr, SMOOTHED: tl.constexpr, HAS_BIAS: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PARTS: tl.constexpr, DESCRIPTORS: tl.constexpr, LONG_OFFSETS: tl.constexpr,
):  # fmt: skip
    """The epilogue of a tile, part after part; each part has a separate largest logit and separate sums."""
    if PARTS > 1:
        left, right = halves(tile, ROWS, COLUMNS)
        _store_exponentials(left, exponentials, bias_ptr, largest_ptr, sums_ptr, logit_sums_ptr, picked_ptr, row,
                            column, tokens, words, row_stride, target, SOFTCAP, SMOOTHED, HAS_BIAS, HALF, ROWS,
                            COLUMNS // 2, PARTS // 2, DESCRIPTORS, LONG_OFFSETS)  # fmt: skip
        _store_exponentials(right, exponentials, bias_ptr, largest_ptr, sums_ptr, logit_sums_ptr, picked_ptr, row,
                            column + COLUMNS // 2, tokens, words, row_stride, target, SOFTCAP, SMOOTHED, HAS_BIAS,
                            HALF, ROWS, COLUMNS // 2, PARTS // 2, DESCRIPTORS, LONG_OFFSETS)  # fmt: skip
    else:
        z = add_bias(tile, bias_ptr, column, words, COLUMNS, HAS_BIAS)
        if SOFTCAP > 0.0:
            squashed = tanh(z * (1.0 / SOFTCAP), HALF)
            z = SOFTCAP * squashed
        token = row + tl.arange(0, ROWS)
        word = (column + tl.arange(0, COLUMNS))[None, :]
        picked = tl.sum(tl.where(word == target[:, None], z, 0.0), axis=1)
        tl.store(picked_ptr + token, picked, mask=(target >= column) & (target < column + COLUMNS))
        z = tl.where(word < words, z, float("-inf"))
        largest = tl.max(z, axis=1)
        base = tl.where(largest == float("-inf"), 0.0, largest)  # a difference of infinities would be no number
        z -= base[:, None]
        found = tl.exp(z)
        share = (column // COLUMNS).to(tl.int64) * tokens + token
        is_there = token < tl.where(column < words, tokens, 0)  # the last tile may have parts beyond the last word
        tl.store(largest_ptr + share, largest, mask=is_there)
        tl.store(sums_ptr + share, tl.sum(found, axis=1), mask=is_there)
        if SMOOTHED:
            tl.store(logit_sums_ptr + share, tl.sum(tl.where(word < words, z, 0.0), axis=1), mask=is_there)
        if SOFTCAP > 0.0:
            found *= 1.0 - squashed * squashed  # the derivative of the cap: the logit is not available later
        # Beyond the last word there is room up to the next row, and whole vectors are stored.
        store_tile(exponentials, found, row, column, tokens, row_stride, row_stride, ROWS, COLUMNS, DESCRIPTORS,
                   LONG_OFFSETS)  # fmt: skip


@triton.jit
def _exponentials_kernel(
    hidden, weight, bias_ptr, target_ptr, exponentials, largest_ptr, sums_ptr, logit_sums_ptr, picked_ptr,
    tokens, words, depth,
    hidden_row_stride, hidden_column_stride, weight_row_stride, weight_column_stride, row_stride, ignore_index,
    SOFTCAP: tl.constexpr, SMOOTHED: tl.constexpr, HAS_BIAS: tl.constexpr, PARTS: tl.constexpr,
    PRECISION: tl.constexpr, WIDE: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, GROUP: tl.constexpr, DESCRIPTORS: tl.constexpr, LONG_OFFSETS: tl.constexpr,
):  # fmt: skip
    """This program takes every num_programs-th tile of `hidden @ weight.T + bias` and stores its exponentials.

    hidden: (T, H), weight: (V, H), exponentials: (T, V) with unit stride in its rows, as descriptors or pointers. bias:
    (V). target, picked: (T). largest, sums, logit_sums: (parts of a row, T), of COLUMNS / PARTS words each.
    """
    tiles = tl.cdiv(tokens, ROWS) * tl.cdiv(words, COLUMNS)
    for index in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=False):
        row, column = tile_at(index, tokens, words, ROWS, COLUMNS, GROUP)
        tile = multiply(
            hidden, weight, row, column, tokens, words, depth, hidden_row_stride, hidden_column_stride,
            weight_row_stride, weight_column_stride, PRECISION, WIDE, ROWS, COLUMNS, DEPTH, DESCRIPTORS, LONG_OFFSETS,
        )  # fmt: skip
        token = row + tl.arange(0, ROWS)
        target = load_targets(target_ptr, token, token < tokens, words, ignore_index)
        _store_exponentials(tile, exponentials, bias_ptr, largest_ptr, sums_ptr, logit_sums_ptr, picked_ptr, row,
                            column, tokens, words, row_stride, target, SOFTCAP, SMOOTHED, HAS_BIAS, HALF, ROWS,
                            COLUMNS, PARTS, DESCRIPTORS, LONG_OFFSETS)  # fmt: skip


@triton.jit
def _from_exponentials_kernel(
    exponentials_ptr, largest_ptr, picked_ptr, target_ptr, normalizer_ptr, dloss_ptr, shares_ptr,
    tokens, words, row_stride, ignore_index,
    LABEL_SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, SOFTCAP: tl.constexpr, NEED_DBIAS: tl.constexpr,
    WIDE: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """This program turns ROWS rows of PARTS parts of exponentials into the gradient of the logits, in place.

    exponentials: (T, V), unit stride in its rows; largest: (parts of PART words, T), what they are relative to.
    picked, target, dloss: (T). normalizer: (T, 2). shares: (rows of tiles, V), the sum over the tokens of each.
    """
    token = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    exists = token < tokens
    target = load_targets(target_ptr, token, exists, words, ignore_index)
    counts = target >= 0
    largest = tl.load(normalizer_ptr + 2 * token, mask=exists, other=0.0)
    log_sum = tl.load(normalizer_ptr + 2 * token + 1, mask=exists, other=0.0)
    dloss = tl.load(dloss_ptr + token, mask=exists, other=0.0)
    picked = tl.load(picked_ptr + token, mask=counts, other=0.0)
    part = tl.program_id(0) * PARTS + tl.arange(0, PARTS)
    own = largest_ptr + part.to(tl.int64)[None, :] * tokens + token[:, None]
    maxima = tl.load(own, mask=exists[:, None] & (part * PART < words)[None, :], other=float("-inf"))
    # What makes softmaxes of exponentials, one number for each part of a row; and the softmax of the target.
    factor = tl.exp(maxima - largest[:, None] - log_sum[:, None])
    at_target = tl.exp(picked - largest - log_sum)
    if Z_LOSS > 0.0:
        growth = 1.0 + (2.0 * Z_LOSS) * (largest + log_sum)
        factor *= growth[:, None]
        at_target *= growth
    at_target -= 1.0 - LABEL_SMOOTHING
    word = part[:, None] * PART + tl.arange(0, PART)[None, :]
    place = exponentials_ptr + (token.to(tl.int64)[:, None, None] * row_stride + word[None, :, :])
    mask = exists[:, None, None] & (word < tl.cdiv(words, PART) * PART)[None, :, :]  # whole vectors, and stored ones
    gradient = tl.load(place, mask=mask, other=0.0).to(WIDE) * factor[:, :, None]
    if LABEL_SMOOTHING > 0.0:
        # `words` may be a constant: a scalar of 1 is one.
        smoothed = tl.full((), LABEL_SMOOTHING, WIDE) / words
        at_target -= smoothed
        gradient -= smoothed
    if SOFTCAP > 0.0:
        squashed = picked * (1.0 / SOFTCAP)
        at_target *= 1.0 - squashed * squashed  # the exponentials have this factor already
    gradient = tl.where(word[None, :, :] == target[:, None, None], at_target[:, None, None], gradient)
    # What a token that does not count computes may be NaN, times zero.
    gradient = tl.where(counts[:, None, None], gradient * dloss[:, None, None], 0.0)
    tl.store(place, gradient.to(exponentials_ptr.dtype.element_ty), mask=mask)
    if NEED_DBIAS:
        share = shares_ptr + tl.program_id(1).to(tl.int64) * words
        tl.store(share + word, tl.sum(gradient, axis=0), mask=word < words)


@triton.jit
def _scale_kernel(gradient_ptr, factor_ptr, result_ptr, elements, IN_PLACE: tl.constexpr, BLOCK: tl.constexpr):
    """This program multiplies BLOCK elements by a number and rounds them once."""
    factor = tl.load(factor_ptr)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if IN_PLACE:
        elements = tl.where(factor == 1.0, 0, elements)  # as after `loss.backward()`: nothing is read or written then
    mask = place < elements
    found = tl.load(gradient_ptr + place, mask=mask, other=0.0).to(factor_ptr.dtype.element_ty) * factor
    tl.store(result_ptr + place, found.to(result_ptr.dtype.element_ty), mask=mask)


def plan(
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
) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]:
    """How loss and gradients are computed for a geometry: three launches and two products for some tokens at a time.

    Args:
        hidden: `(..., H)`, any strides.
        weight: `(V, H)` in the dtype of hidden, any strides.
        target: `(...)`.
        bias: `(V,)` or None.
        divisor: what the sum of losses is divided by, `()`; None for one.
        label_smoothing: as in `reference.py`; zero if there is a cap.
        need_dhidden: whether there is a gradient of hidden.
        need_dweight: whether there is a gradient of weight.
        need_dbias: whether there is a gradient of bias; not without a bias.

    Returns:
        A function of the tensors that returns the loss and gradients of hidden, weight and bias, see `by_tokens`.
    """
    as_matrix, words = matrix_of(hidden), weight.shape[0]
    matrix, rows, needs = as_matrix(hidden), target.reshape(-1), (need_dhidden, need_dweight, need_dbias)
    tokens, half = matrix.shape[0], hidden.dtype.itemsize == 2 and not triton.knobs.runtime.interpret
    step = tokens_at_a_time(tokens, words)
    scalars = ignore_index, label_smoothing, z_loss, softcap
    of_buffer = step, cdiv(words, WORDS) * WORDS  # rows that products and the copy engine find aligned
    new_buffer, buffer = allocator(hidden, of_buffer), unmade(of_buffer, hidden.dtype)
    chunks = {
        count: _Chunk(matrix[:count], weight, rows[:count], bias, buffer[:count], *scalars, need_dbias)
        for count in {step, tokens - (tokens - 1) // step * step}
    }
    scaled = hidden.dtype == torch.float16
    read_target, read_bias = reader(rows, Tensor.contiguous), reader(bias, Tensor.contiguous)

    def run(
        hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, divisor: Tensor | None, *others: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        matrix, target, own_bias = as_matrix(hidden), read_target(target.reshape(-1)), read_bias(bias)
        dloss, scale = incoming(dloss_of_sum(divisor, hidden), target, words, ignore_index, scaled)
        buffer = new_buffer()

        def compute(first: int, last: int) -> tuple[Tensor, Tensor, Tensor | None]:
            of_tokens = matrix[first:last], weight, own_bias, target[first:last], dloss[first:last]
            return chunks[last - first](*of_tokens, buffer[: last - first])

        return by_tokens(compute, half, scale, matrix, weight, divisor, step, *needs)

    return run


def plan_scale(gradient: Tensor, factor: Tensor, like: Tensor, in_place: bool) -> Callable[..., Tensor]:
    """How a gradient is multiplied by a number: one launch.

    Args:
        gradient: any strides.
        factor: `()`, wide.
        like: the result has its dtype.
        in_place: the result is the gradient, which is contiguous.

    Returns:
        A function of the tensors that returns the product, contiguous.
    """
    elements, new = gradient.numel(), allocator(gradient, dtype=like.dtype)
    read = reader(gradient, Tensor.contiguous)
    launch = bind(
        _scale_kernel, (cdiv(elements, SCALED),), elements, IN_PLACE=in_place, BLOCK=SCALED, num_warps=warps(SCALED)
    )

    def run(gradient: Tensor, factor: Tensor, *others: Any) -> Tensor:
        result = gradient if in_place else new()
        launch(read(gradient), factor, result)
        return result

    return run


class _Chunk:
    """Launches for a given number of tokens; keeps no tensors."""

    def __init__(
        self, hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, exponentials: Tensor,
        ignore_index: int, label_smoothing: float, z_loss: float, softcap: float, need_dbias: bool,
    ) -> None:  # fmt: skip
        tokens, (words, depth), wide = hidden.shape[0], weight.shape, wide_dtype(hidden.dtype)
        shape, stride = Shape(GRADIENT, tokens, words, hidden, weight, exponentials), exponentials.stride(0)
        part = shape.chosen.columns // shape.chosen.parts
        self.shares = Shares(cdiv(words, part), part, target, words, ignore_index, label_smoothing, z_loss, wide)
        self.store = bind(
            _exponentials_kernel, (shape.programs,),
            tokens, words, depth, *hidden.stride(), *weight.stride(), stride, ignore_index,
            described=[*shape.operands(hidden, weight), None, None, shape.result(exponentials), *[None] * 4],
            SOFTCAP=softcap, SMOOTHED=label_smoothing > 0.0, HAS_BIAS=bias is not None, PARTS=shape.chosen.parts,
            **shape.constants,
        )  # fmt: skip
        tiles = cdiv(tokens, TILE_ROWS)
        self.finish = bind(
            _from_exponentials_kernel, (cdiv(words, TILE_WORDS), tiles), tokens, words, stride, ignore_index,
            LABEL_SMOOTHING=label_smoothing, Z_LOSS=z_loss, SOFTCAP=softcap, NEED_DBIAS=need_dbias,
            WIDE=triton_dtype(wide), ROWS=TILE_ROWS, PARTS=TILE_WORDS // part, PART=part,
            num_warps=warps(TILE_ROWS * TILE_WORDS),
        )  # fmt: skip
        self.new_sums = allocator(hidden, (tiles, words), wide) if need_dbias else None

    def __call__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, dloss: Tensor, exponentials: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return losses, the gradient of their logits (it overwrites the exponentials), and its sum over tokens."""
        shares = self.shares.new()
        self.store(hidden, weight, bias, target, exponentials, *shares)
        loss, normalizer = self.shares.join(shares, target)
        largest, *_, picked = shares
        sums = None if self.new_sums is None else self.new_sums()
        self.finish(exponentials, largest, picked, target, normalizer, dloss, sums)
        return loss, exponentials[:, : weight.shape[0]], None if sums is None else sums.sum(0)
