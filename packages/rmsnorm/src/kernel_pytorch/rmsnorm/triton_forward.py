"""The forward pass in Triton: a row stays in registers, residual add included. Kernels, then the launcher.

The input is seen as `(T, H, N)`: T tokens, H rows of weights, N columns; H is 1 except for `head_rms_norm`. One launch.
A row that fits in one block is read once and stays in registers (`_forward_kernel`); a longer one is walked twice
(`_forward_long_kernel`), the second time mostly out of the L2 cache. Block sizes depend on N alone, so the result of a
row never depends on how many rows there are.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .integers import cdiv, next_power_of_2
from .ops import result_dtype

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

    x, residual: (T, H, N) with unit stride in N. weight: (H, N). y, h: (T, H, N) contiguous. rstd: (T * H).
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
    wide = tl.float64 if rstd_ptr.dtype.element_ty == tl.float64 else tl.float32
    h_dtype = h_ptr.dtype.element_ty
    h = x.to(wide)
    if HAS_RESIDUAL:
        residual_offsets = token * residual_stride_t + head * residual_stride_h + column
        residual = tl.load(residual_ptr + residual_offsets, mask=mask, other=0.0, eviction_policy=POLICY)
        stored = (h + residual.to(wide)).to(h_dtype)
        tl.store(h_ptr + row * columns + column, stored, mask=mask)
        h = stored.to(wide)
    rstd = tl.rsqrt(tl.sum(h * h, axis=1, keep_dims=True) / columns + EPS)
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
    wide = tl.float64 if rstd_ptr.dtype.element_ty == tl.float64 else tl.float32
    h_dtype = h_ptr.dtype.element_ty

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


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float, casting: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the forward kernel.

    Args:
        x: `(..., N)`, any strides.
        residual: `(..., N)` or None.
        weight: `(N,)`, `(H, N)` with x `(..., H, N)`, or None.
        eps: added to the mean square.
        offset: added to the weight.
        casting: "llama", "gemma" or "none".

    Returns:
        `y` `(..., N)`; `h`, which is `x + residual`, or `x` itself without a residual; `rstd` `(...)`, float32 (float64
        for float64 input). All that is new is contiguous.
    """
    columns = x.shape[-1]
    heads = weight.shape[0] if weight is not None and weight.dim() == 2 else 1
    h = (
        x
        if residual is None
        else torch.empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype), device=x.device)
    )
    y = torch.empty(x.shape, dtype=result_dtype(h.dtype, weight, casting), device=x.device)
    rstd = torch.empty(x.shape[:-1], dtype=torch.promote_types(h.dtype, torch.float32), device=x.device)
    rows = rstd.numel()
    if rows == 0:
        return y, h, rstd
    x_rows = token_head_rows(x, heads)
    residual_rows = x_rows if residual is None else token_head_rows(residual, heads)

    block = next_power_of_2(columns)
    kernel, rows_per_program = (_forward_kernel, max(1, 1024 // block))
    if block > BLOCK_LIMIT:
        kernel, block, rows_per_program = _forward_long_kernel, LONG_BLOCK, 1
    with on_device(x):
        kernel[(cdiv(rows, rows_per_program),)](
            x_rows, residual_rows, weight if weight is None else weight.contiguous(), y, h, rstd,
            rows, heads, columns, *x_rows.stride()[:2], *residual_rows.stride()[:2],
            HAS_RESIDUAL=residual is not None, HAS_WEIGHT=weight is not None, HAS_HEADS=heads > 1,
            EPS=eps, OFFSET=offset, CASTING=casting,
            ROWS=rows_per_program, BLOCK=block, LONG_OFFSETS=exceeds_int32(x_rows, residual_rows, y),
            POLICY=eviction_policy(x, x_rows.numel() * x.element_size() + y.numel() * y.element_size()),
            num_warps=warps(rows_per_program * block),
        )  # fmt: skip
    return y, h, rstd


def token_head_rows(x: Tensor, heads: int) -> Tensor:
    """View `x` as `(T, H, N)` with unit stride in N; copies only what has no such view."""
    rows = x.reshape(-1, heads, x.shape[-1])
    return rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()


def on_device(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be that of `x`."""
    if x.device.type != "cuda" or x.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)


def exceeds_int32(*tensors: Tensor) -> bool:
    """Whether an offset into one of these may pass 2^31 - 1 (masked lanes of the last block included)."""
    return any(
        sum((size - 1) * abs(stride) for size, stride in zip(t.shape, t.stride(), strict=True)) >= 2**31 - 2**17
        for t in tensors
    )


def eviction_policy(x: Tensor, traffic: int) -> str:
    """How to read `x`, which nobody reads again soon, in a kernel that moves `traffic` bytes through the L2 cache.

    Where everything fits, x makes room for y, which the next kernel reads. Where nothing can stay, reads that are held
    longer get the last 2 to 4 % of the bandwidth (H200; NVIDIA does not say why).
    """
    return "evict_last" if traffic > cache_size(x.device) else "evict_first"


@functools.lru_cache
def cache_size(device: torch.device) -> int:
    """Bytes of the L2 cache; without a GPU those of an H100."""
    if device.type != "cuda":
        return 50 * 2**20
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def warps(elements: int) -> int:
    """16 elements a thread: two 128-bit loads of a 16-bit dtype in flight."""
    return min(16, max(1, elements // 512))
