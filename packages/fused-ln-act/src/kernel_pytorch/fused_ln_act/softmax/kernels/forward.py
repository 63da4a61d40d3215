"""The forward pass in Triton: scale and mask included, the mask read where it lies. Kernels, then the launcher.

The scores are seen as `(T, N)`: T rows of N columns. One launch. A row that fits in one block is read once and stays in
registers (`_softmax_forward_kernel`). A longer one is walked twice (`_softmax_forward_long_kernel`), the second time
mostly out of the L2 cache; the first walk keeps the maximum so far and the sum of the exponentials relative to it, and
scales the sum down whenever the maximum grows. Block sizes depend on N alone, so the result of a row never depends on
how many rows there are.

A mask is read where it lies: its leading dimensions are merged until three are left, each with its stride, which is 0
where it is broadcast (`MaskView`).

Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018, https://arxiv.org/abs/1805.02867.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_pytorch.fused_ln_act._core.direct_calls import check_memory, check_operands
from kernel_pytorch.fused_ln_act._core.launch import bind
from kernel_pytorch.fused_ln_act._core.plans import Planned
from kernel_pytorch.fused_ln_act._core.sizes import (
    allocator,
    bytes_of,
    cdiv,
    eviction_policy,
    exceeds_int32,
    next_power_of_2,
    reader,
    unmade,
    warps,
)
from kernel_pytorch.fused_ln_act.kernels.rows import LONG_BLOCK, as_rows, divide
from kernel_pytorch.fused_ln_act.softmax.levels.reference import score_dtype

BLOCK_LIMIT = 16384  # columns that one program holds in registers; a longer row is walked in blocks


class MaskView(NamedTuple):
    """A mask over rows that are counted by three numbers, the last of which changes fastest.

    Attributes:
        data: the mask, bool seen as uint8; None for no mask.
        sizes: of the second and the third number.
        strides: of the three numbers and of the columns.
    """

    data: Tensor | None
    sizes: tuple[int, int]
    strides: tuple[int, int, int, int]


@triton.jit
def scores(
    x_row, mask_row, column, valid, exists, mask_column_stride, SCALE: tl.constexpr, HAS_MASK: tl.constexpr,
    BOOLEAN: tl.constexpr, WIDE: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """`SCALE * x + mask` where it is valid to load, -inf where no such column exists; a row too many gets numbers."""
    z = tl.load(x_row + column, mask=valid, other=0.0, eviction_policy=POLICY).to(WIDE) * SCALE
    if HAS_MASK:
        mask = tl.load(mask_row + column * mask_column_stride, mask=valid, other=0)
        if BOOLEAN:
            z = tl.where(mask != 0, z, float("-inf"))
        else:
            z += mask.to(WIDE)
    return tl.where(exists, z, float("-inf"))


@triton.jit
def from_top(top):
    """What is subtracted from the scores: their maximum, or zero where there is none, since -inf minus -inf is NaN."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def reciprocal(total, HAS_MASK: tl.constexpr):
    """`1 / total`; of a row that is masked out altogether anything finite, so that it gives zeros."""
    if HAS_MASK:
        total = tl.where(total == 0.0, 1.0, total)
    return divide(tl.full(total.shape, 1.0, total.dtype), total)


@triton.jit
def _softmax_forward_kernel(
    x_ptr, mask_ptr, y_ptr, rows, columns, x_stride,
    mask_size_1, mask_size_2, mask_stride_0, mask_stride_1, mask_stride_2, mask_column_stride,
    HAS_MASK: tl.constexpr, BOOLEAN: tl.constexpr, SCALE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LONG_OFFSETS: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """This program takes ROWS whole rows.

    x: (T, N) with unit stride in N. mask: see `MaskView`. y: (T, N) contiguous.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    if LONG_OFFSETS:
        row = row.to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    exists = column < columns
    valid = (row < rows) & exists
    wide = tl.float64 if y_ptr.dtype.element_ty == tl.float64 else tl.float32
    mask_row = mask_ptr
    if HAS_MASK:
        mask_row += row // (mask_size_1 * mask_size_2) * mask_stride_0
        mask_row += row // mask_size_2 % mask_size_1 * mask_stride_1 + row % mask_size_2 * mask_stride_2
    z = scores(
        x_ptr + row * x_stride, mask_row, column, valid, exists, mask_column_stride, SCALE, HAS_MASK, BOOLEAN, wide,
        POLICY,
    )  # fmt: skip
    e = tl.exp(z - from_top(tl.max(z, axis=1))[:, None])
    y = e * reciprocal(tl.sum(e, axis=1), HAS_MASK)[:, None]
    tl.store(y_ptr + row * columns + column, y.to(y_ptr.dtype.element_ty), mask=valid)


@triton.jit
def _softmax_forward_long_kernel(
    x_ptr, mask_ptr, y_ptr, rows, columns, x_stride,
    mask_size_1, mask_size_2, mask_stride_0, mask_stride_1, mask_stride_2, mask_column_stride,
    HAS_MASK: tl.constexpr, BOOLEAN: tl.constexpr, SCALE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LONG_OFFSETS: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """This program takes one row, block by block: one walk for maximum and sum, one for the result."""
    row = tl.program_id(0)
    if LONG_OFFSETS:
        row = row.to(tl.int64)
    x_row = x_ptr + row * x_stride
    wide = tl.float64 if y_ptr.dtype.element_ty == tl.float64 else tl.float32
    mask_row = mask_ptr
    if HAS_MASK:
        mask_row += row // (mask_size_1 * mask_size_2) * mask_stride_0
        mask_row += row // mask_size_2 % mask_size_1 * mask_stride_1 + row % mask_size_2 * mask_stride_2

    # Each lane keeps a separate maximum and sum: the loop has no reduction, and one exponential, since either the
    # maximum grows and the sum shrinks, or not.
    tops = tl.full([BLOCK], float("-inf"), dtype=wide)
    sums = tl.zeros([BLOCK], dtype=wide)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        valid = column < columns
        z = scores(
            x_row, mask_row, column, valid, valid, mask_column_stride, SCALE, HAS_MASK, BOOLEAN, wide, "evict_last"
        )
        e = tl.exp(-tl.abs(z - from_top(tops)))
        grows = z > tops
        sums = tl.where(grows, sums * e + 1.0, sums + e)
        tops = tl.where(grows, z, tops)
    top = from_top(tl.max(tops, axis=0))
    factor = reciprocal(tl.sum(sums * tl.exp(tops - top), axis=0, keep_dims=True), HAS_MASK)

    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        valid = column < columns
        z = scores(x_row, mask_row, column, valid, valid, mask_column_stride, SCALE, HAS_MASK, BOOLEAN, wide, POLICY)
        y = tl.exp(z - top) * factor
        tl.store(y_ptr + row * columns + column, y.to(y_ptr.dtype.element_ty), mask=valid)


@Planned
def softmax(x: Tensor, mask: Tensor | None, scale: float) -> Callable[..., Tensor]:
    """The launcher of the operator: one launch.

    Args:
        x: `(..., N)`, any strides.
        mask: broadcasts to the shape of x; a float dtype, added, or bool, False for what is masked out; or None.
        scale: of x.

    Returns:
        `(..., N)`, contiguous, in the dtype of x, promoted with that of a mask that is added.
    """
    check(x, mask)
    dtype = score_dtype(x, mask)
    new_y = allocator(x, dtype=dtype)
    if x.numel() == 0:
        return lambda *arguments: new_y()
    x_rows, view = as_rows(x), mask_view(mask, x.shape)
    rows, columns = x_rows.shape
    walked = (x_rows, unmade(x.shape, dtype))
    block = next_power_of_2(columns)
    kernel, rows_per_program = (_softmax_forward_kernel, max(1, 1024 // block))
    if block > BLOCK_LIMIT:
        kernel, block, rows_per_program = _softmax_forward_long_kernel, LONG_BLOCK, 1
    launch = bind(
        kernel, (cdiv(rows, rows_per_program),), rows, columns, x_rows.stride(0), *view.sizes, *view.strides,
        HAS_MASK=mask is not None, BOOLEAN=mask is not None and mask.dtype == torch.bool, SCALE=scale,
        ROWS=rows_per_program, BLOCK=block,
        LONG_OFFSETS=exceeds_int32(*walked) or (view.data is not None and exceeds_int32(view.data)),
        POLICY=eviction_policy(x, bytes_of(*walked)), num_warps=warps(rows_per_program * block),
    )  # fmt: skip
    read_x, read_mask = reader(x, as_rows), reader_of_mask(mask, x.shape)

    def run(x: Tensor, mask: Tensor | None, *scalars: Any) -> Tensor:
        y = new_y()
        launch(read_x(x), read_mask(mask), y)
        return y

    return run


def check(x: Tensor, mask: Tensor | None) -> None:
    """Check the arguments: direct operator calls pass no other check, and a wrong shape would read foreign memory."""
    check_operands(x=x)
    if mask is None:
        return
    if mask.dtype != torch.bool and (not mask.is_floating_point() or mask.dtype.itemsize < 2):
        raise TypeError(f"mask: dtype is {mask.dtype}; allowed are bool, float16, bfloat16, float32, float64")
    check_memory("mask", mask)
    ends = zip(reversed(mask.shape), reversed(x.shape), strict=False)
    if mask.dim() > x.dim() or any(size not in (1, of_x) for size, of_x in ends):
        raise ValueError(f"mask: shape is {tuple(mask.shape)}; it must broadcast to that of x, {tuple(x.shape)}")


def mask_view(mask: Tensor | None, shape: torch.Size) -> MaskView:
    """See a mask over `shape` as `MaskView`; copied only where it is broadcast over every other of five dimensions."""
    if mask is None:
        return MaskView(None, (1, 1), (0, 0, 0, 0))
    if mask.dtype == torch.bool:
        mask = mask.view(torch.uint8)
    mask = mask.expand(shape)
    merged = _merge(mask)
    if len(merged) > 3:
        mask = mask.contiguous()
        merged = _merge(mask)
    (_, stride_0), (size_1, stride_1), (size_2, stride_2) = [(1, 0)] * (3 - len(merged)) + merged
    return MaskView(mask, (size_1, size_2), (stride_0, stride_1, stride_2, mask.stride(-1)))


def reader_of_mask(mask: Tensor | None, shape: torch.Size) -> Callable[[Any], Any]:
    """What gives a kernel the memory of the mask that `mask_view` sees; a bool has to be called uint8."""

    def data(mask: Tensor) -> Tensor:
        found = mask_view(mask, shape).data
        assert found is not None
        return found

    if mask is None or mask.dtype != torch.bool or data(mask).data_ptr() != mask.data_ptr():
        return reader(mask, data)
    return lambda mask: mask.view(torch.uint8)


def _merge(x: Tensor) -> list[tuple[int, int]]:
    """Sizes and strides of the leading dimensions, neighbours merged where one stride serves both."""
    merged: list[tuple[int, int]] = []
    for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == stride * size:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return merged
