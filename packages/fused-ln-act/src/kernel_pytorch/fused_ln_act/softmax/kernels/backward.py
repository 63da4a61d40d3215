"""The backward pass in Triton: made of y and dy alone, a learned mask included. Kernels, then the launcher.

From y alone, everything in float32 (float64 for float64 input):

    p     = sum(dy * y)
    dz    = y * (dy - p)                      what is masked out has y = 0, and so dz = 0
    dx    = scale * dz
    dmask = dz, summed over what the mask was broadcast over

The y that was stored sums to one only as far as it was rounded, to 16 bits to some 1/500; a dy of which all elements
are large would show that in dz. So p is corrected once, to p + sum((dy - p) * y), as one step of Newton's does for
sum(dy * y) / sum(y). A longer row, whose dy is not at hand any more, gets p + p * (1 - sum(y)), which is the same but
for rounding.

One launch for dx; a row that fits in one block is read once (`_softmax_backward_kernel`), a longer one is walked twice
(`_softmax_backward_long_kernel`). An added mask that wants its gradient takes one more (`_mask_gradient_kernel`): it
makes dz again from y, dy and one number a row, and sums it in a fixed order, so dz itself is never stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_pytorch.fused_ln_act._core.direct_calls import check_operands, check_shapes
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
from kernel_pytorch.fused_ln_act.kernels.rows import LONG_BLOCK, as_rows

from .forward import check

BLOCK_LIMIT = 16384  # columns of y and dy that one program holds in registers


@triton.jit
def _softmax_backward_kernel(
    dy_ptr, y_ptr, dx_ptr, products_ptr, rows, columns, dy_stride, y_stride,
    SCALE: tl.constexpr, NEED_DX: tl.constexpr, NEED_PRODUCTS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LONG_OFFSETS: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """This program takes ROWS whole rows.

    dy, y: (T, N) with unit stride in N. dx: (T, N) contiguous. products: (T), sum(dy * y).
    """
    row_index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if LONG_OFFSETS:
        row_index = row_index.to(tl.int64)
    row = row_index[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (column < columns)
    wide = tl.float64 if y_ptr.dtype.element_ty == tl.float64 else tl.float32
    y = tl.load(y_ptr + row * y_stride + column, mask=mask, other=0.0, eviction_policy=POLICY).to(wide)
    dy = tl.load(dy_ptr + row * dy_stride + column, mask=mask, other=0.0, eviction_policy=POLICY).to(wide)
    product = tl.sum(dy * y, axis=1)
    product += tl.sum((dy - product[:, None]) * y, axis=1)  # see above
    if NEED_PRODUCTS:
        tl.store(products_ptr + row_index, product, mask=row_index < rows)
    if NEED_DX:
        dx = SCALE * (y * (dy - product[:, None]))
        tl.store(dx_ptr + row * columns + column, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _softmax_backward_long_kernel(
    dy_ptr, y_ptr, dx_ptr, products_ptr, rows, columns, dy_stride, y_stride,
    SCALE: tl.constexpr, NEED_DX: tl.constexpr, NEED_PRODUCTS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LONG_OFFSETS: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """This program takes one row, block by block: one walk for the sum, one for the result."""
    row = tl.program_id(0)
    if LONG_OFFSETS:
        row = row.to(tl.int64)
    wide = tl.float64 if y_ptr.dtype.element_ty == tl.float64 else tl.float32
    sums = tl.zeros([BLOCK], dtype=wide)
    totals = tl.zeros([BLOCK], dtype=wide)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < columns
        y = tl.load(y_ptr + row * y_stride + column, mask=mask, other=0.0, eviction_policy="evict_last").to(wide)
        dy = tl.load(dy_ptr + row * dy_stride + column, mask=mask, other=0.0, eviction_policy="evict_last").to(wide)
        sums += dy * y
        totals += y
    product = tl.sum(sums, axis=0)
    product += product * (1.0 - tl.sum(totals, axis=0))
    if NEED_PRODUCTS:
        tl.store(products_ptr + row, product)
    if NEED_DX:
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            mask = column < columns
            y = tl.load(y_ptr + row * y_stride + column, mask=mask, other=0.0, eviction_policy=POLICY).to(wide)
            dy = tl.load(dy_ptr + row * dy_stride + column, mask=mask, other=0.0, eviction_policy=POLICY).to(wide)
            dx = SCALE * (y * (dy - product))
            tl.store(dx_ptr + row * columns + column, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _mask_gradient_kernel(
    dy_ptr, y_ptr, products_ptr, dmask_ptr, outputs, terms, columns, size_0, size_1, size_2, dy_stride, y_stride,
    KEEP_0: tl.constexpr, KEEP_1: tl.constexpr, KEEP_2: tl.constexpr, KEEP_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LONG_OFFSETS: tl.constexpr,
):  # fmt: skip
    """This program sums dz for BLOCK elements of dmask, always in the same order.

    dy, y: (A, B, C, N), the leading three merged to rows. products: (A, B, C). dmask: those of the four dimensions that
    are kept, contiguous; `outputs` elements, each the sum of `terms`.
    """
    output = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    if LONG_OFFSETS:
        output = output.to(tl.int64)
    total = tl.zeros([ROWS, BLOCK], dtype=products_ptr.dtype.element_ty)
    for start in range(0, terms, ROWS):
        term = start + tl.arange(0, ROWS)[:, None]
        if LONG_OFFSETS:
            term = term.to(tl.int64)
        mask = (output < outputs) & (term < terms)
        # The last dimension first: an index is of the output where it is kept, else of the sum.
        kept, summed = output, term
        if KEEP_COLUMNS:
            column = kept % columns
            kept = kept // columns
        else:
            column = summed % columns
            summed = summed // columns
        if KEEP_2:
            row = kept % size_2
            kept = kept // size_2
        else:
            row = summed % size_2
            summed = summed // size_2
        if KEEP_1:
            row += kept % size_1 * size_2
            kept = kept // size_1
        else:
            row += summed % size_1 * size_2
            summed = summed // size_1
        row += (kept if KEEP_0 else summed) * (size_1 * size_2)
        y = tl.load(y_ptr + row * y_stride + column, mask=mask, other=0.0).to(total.dtype)
        dy = tl.load(dy_ptr + row * dy_stride + column, mask=mask, other=0.0).to(total.dtype)
        total += y * (dy - tl.load(products_ptr + row, mask=mask, other=0.0))
    output_out = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if LONG_OFFSETS:
        output_out = output_out.to(tl.int64)
    tl.store(dmask_ptr + output_out, tl.sum(total, axis=0).to(dmask_ptr.dtype.element_ty), mask=output_out < outputs)


@Planned
def softmax_backward(
    dy: Tensor, y: Tensor, mask: Tensor | None, scale: float, need_dx: bool, need_dmask: bool
) -> Callable[..., tuple[Tensor, Tensor]]:
    """The launcher of the operator: one launch, and one for dmask where it is needed.

    Args:
        dy: `(..., N)`, any strides.
        y: `(..., N)`, any strides, as the forward returned it.
        mask: of which only shape and dtype count; or None.
        need_dx: whether dx is computed.
        need_dmask: whether dmask is computed; not without a mask.

    Returns:
        dx like y and dmask like mask, contiguous; empty where not needed.
    """
    check(y, mask)
    check_operands(dy=dy)
    check_shapes(y.shape, dy=dy)
    need_dmask = need_dmask and mask is not None
    like_mask = y if mask is None else mask
    new_dx, new_dmask = allocator(y, needed=need_dx), allocator(like_mask, needed=need_dmask)
    if y.numel() == 0 or not (need_dx or need_dmask):
        return lambda *arguments: (new_dx(), new_dmask().zero_())
    dy_rows, y_rows = as_rows(dy), as_rows(y)
    rows, columns = y_rows.shape
    wide = torch.promote_types(y.dtype, torch.float32)
    new_products = allocator(y, (rows,), wide, needed=need_dmask)
    walked = [dy_rows, y_rows, *([unmade(y.shape, y.dtype)] if need_dx else [])]
    long_offsets = exceeds_int32(*walked)
    block = next_power_of_2(columns)
    kernel, rows_per_program = (_softmax_backward_kernel, max(1, 1024 // block))
    if block > BLOCK_LIMIT:
        kernel, block, rows_per_program = _softmax_backward_long_kernel, LONG_BLOCK, 1
    launch = bind(
        kernel, (cdiv(rows, rows_per_program),), rows, columns, dy_rows.stride(0), y_rows.stride(0),
        SCALE=scale, NEED_DX=need_dx, NEED_PRODUCTS=need_dmask, ROWS=rows_per_program, BLOCK=block,
        LONG_OFFSETS=long_offsets, POLICY=eviction_policy(y, bytes_of(*walked)),
        num_warps=warps(rows_per_program * block),
    )  # fmt: skip
    sum_up = _plan_mask_gradient(dy_rows, y_rows, y.shape, like_mask.shape, long_offsets) if need_dmask else None
    read_dy, read_y = reader(dy, as_rows), reader(y, as_rows)

    def run(dy: Tensor, y: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        dx, dmask, products = new_dx(), new_dmask(), new_products()
        dy, y = read_dy(dy), read_y(y)
        launch(dy, y, dx, products)
        if sum_up is not None:
            sum_up(dy, y, products, dmask)
        return dx, dmask

    return run


def _plan_mask_gradient(
    dy: Tensor, y: Tensor, shape: torch.Size, of_mask: torch.Size, long_offsets: bool
) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
    """What fills dmask, of shape `of_mask`, from dy, y and products.

    One launch, unless the mask is broadcast over every other of five dimensions, which PyTorch sums.
    """
    given = (1,) * (len(shape) - len(of_mask)) + tuple(of_mask)
    groups = _kept_and_summed(shape, given)
    if len(groups) > 3:
        compute = _plan_mask_gradient(dy, y, shape, shape, long_offsets)

        def sum_whole(dy: Tensor, y: Tensor, products: Tensor, dmask: Tensor) -> None:
            whole = products.new_empty(shape)
            compute(dy, y, products, whole)
            dmask.copy_(whole.sum_to_size(given).view(dmask.shape))

        return sum_whole
    groups = [(1, True)] * (3 - len(groups)) + groups
    sizes, keeps = zip(*groups, strict=True)
    outputs = of_mask.numel()
    terms = shape.numel() // outputs
    block = min(256, next_power_of_2(outputs))
    return bind(
        _mask_gradient_kernel, (cdiv(outputs, block),),
        outputs, terms, shape[-1], *sizes, dy.stride(0), y.stride(0),
        KEEP_0=keeps[0], KEEP_1=keeps[1], KEEP_2=keeps[2], KEEP_COLUMNS=given[-1] == shape[-1],
        ROWS=min(2048 // block, next_power_of_2(terms)), BLOCK=block, LONG_OFFSETS=long_offsets, num_warps=8,
    )  # fmt: skip


def _kept_and_summed(shape: torch.Size, mask_shape: tuple[int, ...]) -> list[tuple[int, bool]]:
    """Sizes of the leading dimensions and whether the mask has them, neighbours of one kind merged."""
    groups: list[tuple[int, bool]] = []
    for size, of_mask in list(zip(shape, mask_shape, strict=True))[:-1]:
        if size == 1:
            continue
        kept = of_mask == size
        if groups and groups[-1][1] == kept:
            groups[-1] = (groups[-1][0] * size, kept)
        else:
            groups.append((size, kept))
    return groups
