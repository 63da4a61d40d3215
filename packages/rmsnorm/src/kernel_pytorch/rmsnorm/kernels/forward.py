"""The forward pass in Triton: a row stays in registers, residual add included. Kernels, then the launcher.

The input is seen as `(T, H, N)`: T tokens, H rows of weights, N columns; H is 1 except for `head_rms_norm`. One launch.
A row that fits in one block is read once and stays in registers (`_forward_kernel`); a longer one is walked twice
(`_forward_long_kernel`), the second time mostly out of the L2 cache. Block sizes depend on N alone, so the result of a
row never depends on how many rows there are.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_pytorch.rmsnorm._core.direct_calls import check_operands, check_shapes
from kernel_pytorch.rmsnorm._core.launch import bind
from kernel_pytorch.rmsnorm._core.plans import Plan, Planned
from kernel_pytorch.rmsnorm._core.sizes import (
    allocator,
    cdiv,
    eviction_policy,
    exceeds_int32,
    next_power_of_2,
    reader,
    unmade,
    warps,
)
from kernel_pytorch.rmsnorm.rules.rms_norm import result_dtype

BLOCK_LIMIT = 16384  # columns that one program holds in registers; a longer row is walked in blocks
LONG_BLOCK = 4096


@triton.jit
def _normalize(
    h, rstd, weight, HAS_WEIGHT: tl.constexpr, OFFSET: tl.constexpr, CASTING: tl.constexpr,
    X_DTYPE: tl.constexpr, Y_DTYPE: tl.constexpr,
):  # fmt: skip
    """Scale a tile and round where `casting` says; `h` and `rstd` are wide, the result is ready to be stored."""
    if CASTING == "gemma":
        product = h * rstd
        if HAS_WEIGHT:
            product = product * (OFFSET + weight.to(h.dtype))
        return product.to(X_DTYPE)
    else:
        # The product of two 16-bit floats is exact in float32: rounding it once equals a product in X_DTYPE.
        if CASTING == "none":
            rstd = rstd.to(X_DTYPE).to(h.dtype)
        product = (h * rstd).to(X_DTYPE)
        if HAS_WEIGHT:
            wide = tl.float64 if Y_DTYPE == tl.float64 else tl.float32
            scale = weight.to(wide)
            if OFFSET != 0.0:
                scale = (OFFSET + scale).to(weight.dtype).to(wide)
            return (product.to(wide) * scale).to(Y_DTYPE)
        else:
            return product


@triton.jit
def _forward_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, h_ptr, rstd_ptr,
    rows, heads, columns, x_stride_t, x_stride_h, residual_stride_t, residual_stride_h,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_HEADS: tl.constexpr,
    EPS: tl.constexpr, OFFSET: tl.constexpr, CASTING: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LONG_OFFSETS: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """This program normalises ROWS whole rows.

    x, residual: (T, H, N) with unit stride in N. weight: (H, N). y, h: (T, H, N) contiguous. rstd: (T * H), None
    where no gradient needs it.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    if LONG_OFFSETS:
        row = row.to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < rows) & (column < columns)
    head = row % heads if HAS_HEADS else row * 0
    token = row // heads if HAS_HEADS else row

    x_offsets = token * x_stride_t + head * x_stride_h + column
    x = tl.load(x_ptr + x_offsets, mask=mask, other=0.0, eviction_policy=POLICY)
    h_dtype = h_ptr.dtype.element_ty
    wide = tl.float64 if h_dtype == tl.float64 else tl.float32
    h = x.to(wide)
    if HAS_RESIDUAL:
        residual_offsets = token * residual_stride_t + head * residual_stride_h + column
        residual = tl.load(residual_ptr + residual_offsets, mask=mask, other=0.0, eviction_policy=POLICY)
        stored = (h + residual.to(wide)).to(h_dtype)
        tl.store(h_ptr + row * columns + column, stored, mask=mask)
        h = stored.to(wide)
    rstd = tl.rsqrt(tl.sum(h * h, axis=1, keep_dims=True) / columns + EPS)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + row, rstd, mask=row < rows)

    weight = 0.0
    if HAS_WEIGHT:
        if HAS_HEADS:
            weight = tl.load(weight_ptr + head * columns + column, mask=mask, other=0.0)
        else:
            weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0)
    y = _normalize(h, rstd, weight, HAS_WEIGHT, OFFSET, CASTING, h_dtype, y_ptr.dtype.element_ty)
    tl.store(y_ptr + row * columns + column, y, mask=mask)


@triton.jit
def _forward_long_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, h_ptr, rstd_ptr,
    rows, heads, columns, x_stride_t, x_stride_h, residual_stride_t, residual_stride_h,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_HEADS: tl.constexpr,
    EPS: tl.constexpr, OFFSET: tl.constexpr, CASTING: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LONG_OFFSETS: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """This program normalises one row, block by block: one walk for the statistic, one for the result."""
    row = tl.program_id(0)
    if LONG_OFFSETS:
        row = row.to(tl.int64)
    head = row % heads
    x_row = x_ptr + (row // heads) * x_stride_t + head * x_stride_h
    residual_row = residual_ptr + (row // heads) * residual_stride_t + head * residual_stride_h
    h_dtype = h_ptr.dtype.element_ty
    wide = tl.float64 if h_dtype == tl.float64 else tl.float32

    squares = tl.zeros([BLOCK], dtype=wide)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < columns
        h = tl.load(x_row + column, mask=mask, other=0.0, eviction_policy="evict_last").to(wide)
        if HAS_RESIDUAL:
            residual = tl.load(residual_row + column, mask=mask, other=0.0, eviction_policy="evict_last")
            stored = (h + residual.to(wide)).to(h_dtype)
            tl.store(h_ptr + row * columns + column, stored, mask=mask)
            h = stored.to(wide)
        squares += h * h
    rstd = tl.rsqrt(tl.sum(squares, axis=0) / columns + EPS)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + row, rstd)

    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < columns
        # The sum is made again rather than read back: another thread of this program may have stored it.
        h = tl.load(x_row + column, mask=mask, other=0.0, eviction_policy=POLICY).to(wide)
        if HAS_RESIDUAL:
            residual = tl.load(residual_row + column, mask=mask, other=0.0, eviction_policy=POLICY)
            h = (h + residual.to(wide)).to(h_dtype).to(wide)
        weight = 0.0
        if HAS_WEIGHT:
            weight = tl.load(weight_ptr + head * columns + column, mask=mask, other=0.0)
        y = _normalize(h, rstd, weight, HAS_WEIGHT, OFFSET, CASTING, h_dtype, y_ptr.dtype.element_ty)
        tl.store(y_ptr + row * columns + column, y, mask=mask)


@Planned
def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str) -> Plan:
    """Plan the operator, which computes `(y, rstd)`."""
    check(x, weight, casting)
    return plan(x, None, weight, eps, offset, casting)


@Planned
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str) -> Plan:
    """The launcher of the operator: `(y, h, rstd)`."""
    check(x, weight, casting)
    check_operands(residual=residual)
    check_shapes(x.shape, residual=residual)
    return plan(x, residual, weight, eps, offset, casting)


def check(x: Tensor, weight: Tensor | None, casting: str) -> None:
    """Check the arguments: direct operator calls pass no other check, and a wrong shape would read foreign memory."""
    if casting not in ("llama", "gemma", "none"):
        raise ValueError(f"casting: given {casting!r}; allowed are 'llama', 'gemma', 'none'")
    check_operands(x=x, weight=weight)
    if weight is not None and (weight.dim() not in (1, 2) or weight.shape != x.shape[-weight.dim() :]):
        raise ValueError(f"weight: shape is {tuple(weight.shape)}; it must be the end of that of x, {tuple(x.shape)}")


def plan(x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float, casting: str) -> Plan:
    """How the forward kernel is launched for tensors of this geometry.

    Args:
        x: `(..., N)`, any strides.
        residual: `(..., N)` or None.
        weight: `(N,)`, `(H, N)` with x `(..., H, N)`, or None.
        eps: added to the mean square.
        offset: added to the weight.
        casting: "llama", "gemma" or "none".

    Returns:
        The plan for `(x, residual, weight)`, or without a residual `(x, weight)`. `run` returns `y` `(..., N)`; with a
        residual `h`, which is `x + residual`; `rstd` `(...)`, float32 (float64 for float64 input). All contiguous.
    """
    columns, shape = x.shape[-1], x.shape
    heads = weight.shape[0] if weight is not None and weight.dim() == 2 else 1
    h_dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    y_dtype = result_dtype(h_dtype, weight, casting)
    new_y, new_h = allocator(x, dtype=y_dtype), allocator(x, dtype=h_dtype)
    new_rstd = allocator(x, shape[:-1], torch.promote_types(h_dtype, torch.float32))
    rows = shape[:-1].numel()
    if rows == 0:
        return Plan(lambda *_: (new_y(), new_rstd()) if residual is None else (new_y(), new_h(), new_rstd()))
    as_rows = functools.partial(token_head_rows, heads=heads)
    x_rows = as_rows(x)
    residual_rows = x_rows if residual is None else as_rows(residual)
    block = next_power_of_2(columns)
    kernel, rows_per_program = (_forward_kernel, max(1, 1024 // block))
    if block > BLOCK_LIMIT:
        kernel, block, rows_per_program = _forward_long_kernel, LONG_BLOCK, 1
    like_y = unmade(shape, y_dtype)
    launch = bind(
        kernel, (cdiv(rows, rows_per_program),),
        rows, heads, columns, *x_rows.stride()[:2], *residual_rows.stride()[:2],
        HAS_RESIDUAL=residual is not None, HAS_WEIGHT=weight is not None, HAS_HEADS=heads > 1,
        EPS=eps, OFFSET=offset, CASTING=casting,
        ROWS=rows_per_program, BLOCK=block, LONG_OFFSETS=exceeds_int32(x_rows, residual_rows, like_y),
        POLICY=eviction_policy(x, x_rows.numel() * x.element_size() + like_y.numel() * like_y.element_size()),
        num_warps=warps(rows_per_program * block),
    )  # fmt: skip
    launch_alone = launch.twin()
    read_x, read_weight = reader(x, as_rows), reader(weight, Tensor.contiguous)
    if residual is None:

        def run(x: Tensor, weight: Tensor | None, *scalars: Any) -> tuple[Tensor, Tensor]:
            x, y, rstd = read_x(x), new_y(), new_rstd()
            launch(x, x, read_weight(weight), y, x, rstd)
            return y, rstd

        def alone(x: Tensor, weight: Tensor | None, *scalars: Any) -> Tensor:
            x, y = read_x(x), new_y()
            launch_alone(x, x, read_weight(weight), y, x, None)
            return y

        return Plan(run, alone)
    read_residual = reader(residual, as_rows)

    def run_added(x: Tensor, residual: Tensor, weight: Tensor | None, *scalars: Any) -> tuple[Tensor, Tensor, Tensor]:
        y, h, rstd = new_y(), new_h(), new_rstd()
        launch(read_x(x), read_residual(residual), read_weight(weight), y, h, rstd)
        return y, h, rstd

    def alone_added(x: Tensor, residual: Tensor, weight: Tensor | None, *scalars: Any) -> tuple[Tensor, Tensor]:
        y, h = new_y(), new_h()
        launch_alone(read_x(x), read_residual(residual), read_weight(weight), y, h, None)
        return y, h

    return Plan(run_added, alone_added)


def token_head_rows(x: Tensor, heads: int) -> Tensor:
    """View `x` as `(T, H, N)` with unit stride in N; copies only what has no such view."""
    rows = x.reshape(-1, heads, x.shape[-1])
    return rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()
