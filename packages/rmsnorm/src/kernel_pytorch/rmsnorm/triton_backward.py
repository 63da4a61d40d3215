"""The backward pass in Triton: gradients summed up in a fixed order. Kernels, then the launcher.

With `g = dy * (offset + weight)` and `x_hat = h * rstd`, everything in float32 (float64 for float64 input):

    dx      = rstd * (g - x_hat * mean(g * x_hat)) + dh
    dweight = sum over rows of dy * x_hat

A fixed number of programs walk the rows, each keeping its share of dweight in registers while the next tiles are on
their way into shared memory (`_backward_kernel`); a second kernel adds the shares in a fixed order
(`_add_shares_kernel`), so the result is bitwise reproducible. Rows longer than a block take one kernel for dx
(`_backward_long_kernel`) and one for the shares of dweight (`_weight_shares_kernel`).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .integers import cdiv, next_power_of_2
from .triton_forward import LONG_BLOCK, exceeds_int32, on_device, token_head_rows, warps

BLOCK_LIMIT = 8192  # columns of h, dy, weight and dweight that one program holds in registers
# Bytes of h in a tile: two rows, within these bounds. Smaller ones leave the copies into shared memory too short,
# larger ones leave too few to be in flight at once.
SMALLEST_TILE, LARGEST_TILE = 2048, 16384
BYTES_PER_WARP = 2048
STAGES = 3  # tiles under way: one is computed, two are copied
# KiB that one program can have, by compute capability; 99 elsewhere (CUDA C++ Programming Guide, technical
# specifications).
SHARED_MEMORY = {80: 163, 87: 163, 90: 227, 100: 227, 103: 227, 110: 227}
LONG_PROGRAMS_PER_MULTIPROCESSOR = 4
# The interpreter runs programs one after the other. Fewer would make chains of sums as long as no GPU has them.
INTERPRETER_PROGRAMS = 16


@triton.jit
def _backward_kernel(
    dy_ptr, dh_ptr, h_ptr, weight_ptr, rstd_ptr, dx_ptr, shares_ptr,
    tokens, heads, columns, dy_stride_t, dy_stride_h, dh_stride_t, dh_stride_h, h_stride_t, h_stride_h,
    HAS_WEIGHT: tl.constexpr, HAS_DH: tl.constexpr, NEED_DX: tl.constexpr, NEED_DWEIGHT: tl.constexpr,
    OFFSET: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, LONG_OFFSETS: tl.constexpr,
):  # fmt: skip
    """This program takes every P-th tile of ROWS tokens of one head, and sums its share of dweight.

    dy, dh, h: (T, H, N) with unit stride in N. weight: (H, N). rstd: (T, H). dx: (T, H, N) contiguous.
    shares: (P, H, N), of which a single one is dweight itself.
    """
    program = tl.program_id(0)
    head = tl.program_id(1)
    wide = rstd_ptr.dtype.element_ty
    column = tl.arange(0, BLOCK)[None, :]
    column_mask = column < columns
    if HAS_WEIGHT:
        scale = OFFSET + tl.load(weight_ptr + head * columns + column, mask=column_mask, other=0.0).to(wide)
    share = tl.zeros([ROWS, BLOCK], dtype=wide)

    for tile in tl.range(program, tl.cdiv(tokens, ROWS), tl.num_programs(0), num_stages=STAGES):
        token = tile * ROWS + tl.arange(0, ROWS)
        if LONG_OFFSETS:
            token = token.to(tl.int64)
        # Before the axis of columns is added: a thread would load it once for every column that it holds.
        rstd = tl.load(rstd_ptr + token * heads + head, mask=token < tokens, other=0.0)[:, None]
        token = token[:, None]
        mask = (token < tokens) & column_mask
        h = tl.load(h_ptr + token * h_stride_t + head * h_stride_h + column, mask=mask, other=0.0).to(wide)
        dy = tl.load(dy_ptr + token * dy_stride_t + head * dy_stride_h + column, mask=mask, other=0.0).to(wide)
        x_hat = h * rstd
        if NEED_DWEIGHT:
            share += dy * x_hat
        if NEED_DX:
            g = dy
            if HAS_WEIGHT:
                g = dy * scale
            dx = rstd * (g - x_hat * (tl.sum(g * x_hat, axis=1, keep_dims=True) / columns))
            if HAS_DH:
                dh_offsets = token * dh_stride_t + head * dh_stride_h + column
                dx += tl.load(dh_ptr + dh_offsets, mask=mask, other=0.0).to(wide)
            dx_offsets = (token * heads + head) * columns + column
            tl.store(dx_ptr + dx_offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)

    if NEED_DWEIGHT:
        share_row = shares_ptr + (program * heads + head) * columns
        total = tl.sum(share, axis=0).to(shares_ptr.dtype.element_ty)
        tl.store(share_row + tl.arange(0, BLOCK), total, mask=tl.arange(0, BLOCK) < columns)


@triton.jit
def _backward_long_kernel(
    dy_ptr, dh_ptr, h_ptr, weight_ptr, rstd_ptr, dx_ptr,
    heads, columns, dy_stride_t, dy_stride_h, dh_stride_t, dh_stride_h, h_stride_t, h_stride_h,
    HAS_WEIGHT: tl.constexpr, HAS_DH: tl.constexpr, OFFSET: tl.constexpr, BLOCK: tl.constexpr,
    LONG_OFFSETS: tl.constexpr,
):  # fmt: skip
    """This program computes dx of one row, block by block: one walk for mean(g * x_hat), one for the result."""
    row = tl.program_id(0)
    if LONG_OFFSETS:
        row = row.to(tl.int64)
    token = row // heads
    head = row % heads
    dy_row = dy_ptr + token * dy_stride_t + head * dy_stride_h
    h_row = h_ptr + token * h_stride_t + head * h_stride_h
    dh_row = dh_ptr + token * dh_stride_t + head * dh_stride_h
    rstd = tl.load(rstd_ptr + row)
    wide = rstd_ptr.dtype.element_ty

    products = tl.zeros([BLOCK], dtype=wide)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < columns
        g = tl.load(dy_row + column, mask=mask, other=0.0).to(wide)
        if HAS_WEIGHT:
            g *= OFFSET + tl.load(weight_ptr + head * columns + column, mask=mask, other=0.0).to(wide)
        products += g * (tl.load(h_row + column, mask=mask, other=0.0).to(wide) * rstd)
    mean = tl.sum(products, axis=0) / columns

    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < columns
        g = tl.load(dy_row + column, mask=mask, other=0.0).to(wide)
        if HAS_WEIGHT:
            g *= OFFSET + tl.load(weight_ptr + head * columns + column, mask=mask, other=0.0).to(wide)
        x_hat = tl.load(h_row + column, mask=mask, other=0.0).to(wide) * rstd
        dx = rstd * (g - x_hat * mean)
        if HAS_DH:
            dx += tl.load(dh_row + column, mask=mask, other=0.0).to(wide)
        tl.store(dx_ptr + row * columns + column, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _weight_shares_kernel(
    dy_ptr, h_ptr, rstd_ptr, shares_ptr,
    tokens, heads, columns, dy_stride_t, dy_stride_h, h_stride_t, h_stride_h,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LONG_OFFSETS: tl.constexpr,
):  # fmt: skip
    """This program sums dy * x_hat over every P-th tile of ROWS tokens, for one head and one block of columns."""
    program = tl.program_id(0)
    head = tl.program_id(2)
    wide = rstd_ptr.dtype.element_ty
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    share = tl.zeros([ROWS, BLOCK], dtype=wide)
    for tile in range(program, tl.cdiv(tokens, ROWS), tl.num_programs(0)):
        token = tile * ROWS + tl.arange(0, ROWS)
        if LONG_OFFSETS:
            token = token.to(tl.int64)
        rstd = tl.load(rstd_ptr + token * heads + head, mask=token < tokens, other=0.0)[:, None]
        token = token[:, None]
        mask = (token < tokens) & (column < columns)
        h = tl.load(h_ptr + token * h_stride_t + head * h_stride_h + column, mask=mask, other=0.0).to(wide)
        dy = tl.load(dy_ptr + token * dy_stride_t + head * dy_stride_h + column, mask=mask, other=0.0).to(wide)
        share += dy * (h * rstd)
    column_out = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    share_row = shares_ptr + (program * heads + head) * columns
    tl.store(share_row + column_out, tl.sum(share, axis=0), mask=column_out < columns)


@triton.jit
def _add_shares_kernel(shares_ptr, dweight_ptr, programs, elements, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """This program adds the shares of BLOCK elements of dweight, always in the same order."""
    element = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros([ROWS, BLOCK], dtype=shares_ptr.dtype.element_ty)
    for start in range(0, programs, ROWS):
        program = start + tl.arange(0, ROWS)[:, None]
        mask = (program < programs) & (element < elements)
        total += tl.load(shares_ptr + program * elements + element, mask=mask, other=0.0)
    element_out = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dweight = tl.sum(total, axis=0).to(dweight_ptr.dtype.element_ty)
    tl.store(dweight_ptr + element_out, dweight, mask=element_out < elements)


def backward(
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    offset: float,
    need_dx: bool,
    need_dweight: bool,
) -> tuple[Tensor, Tensor]:
    """Launch the backward kernels: one or two, and the addition of the shares where there are several of dweight.

    Args:
        dy: `(..., N)`, any strides.
        dh: `(..., N)`, the gradient that arrives at the residual stream, or None.
        h: `(..., N)`, what was normalised.
        weight: as in the forward.
        rstd: `(...)`, as the forward returned it.
        offset: added to the weight.
        need_dx: whether dx is computed.
        need_dweight: whether dweight is computed.

    Returns:
        dx `(..., N)` in `h.dtype` and dweight like weight; empty where not needed.
    """
    heads = weight.shape[0] if weight is not None and weight.dim() == 2 else 1
    need_dweight = need_dweight and weight is not None
    like_dweight = rstd if weight is None else weight
    dx = torch.empty(h.shape if need_dx else (0,), dtype=h.dtype, device=h.device)
    dweight = torch.empty(like_dweight.shape if need_dweight else (0,), dtype=like_dweight.dtype, device=h.device)
    if h.numel() == 0:
        return dx, dweight.zero_()
    weight = None if weight is None else weight.contiguous()
    views = [token_head_rows(t, heads) for t in (dy, dy if dh is None else dh, h)]
    launch = _launch_one_block if next_power_of_2(h.shape[-1]) <= BLOCK_LIMIT else _launch_long_rows
    flags = {"HAS_WEIGHT": weight is not None, "HAS_DH": dh is not None, "OFFSET": offset}
    flags["LONG_OFFSETS"] = exceeds_int32(*views) or exceeds_int32(dx)
    with on_device(h):
        shares = launch(views, weight, rstd, dx, dweight, need_dx, need_dweight, flags)
        if need_dweight and shares is not dweight:
            _add_shares_kernel[(cdiv(dweight.numel(), 16),)](
                shares, dweight, shares.shape[0], dweight.numel(), ROWS=256, BLOCK=16, num_warps=8
            )
    return dx, dweight


def _launch_one_block(
    views: list[Tensor],
    weight: Tensor | None,
    rstd: Tensor,
    dx: Tensor,
    dweight: Tensor,
    need_dx: bool,
    need_dweight: bool,
    flags: dict[str, Any],
) -> Tensor:
    """Compute dx and return the shares of dweight, `(P, H, N)`, or dweight itself if it is one: one launch."""
    tokens, heads, columns = views[0].shape
    block = next_power_of_2(columns)
    row_bytes = block * views[2].element_size()
    rows = max(1, min(max(2 * row_bytes, SMALLEST_TILE), LARGEST_TILE) // row_bytes)
    tile_bytes = rows * row_bytes
    walkers = program_count(dx.device, max(1, LARGEST_TILE // tile_bytes))
    programs = min(cdiv(tokens, rows), max(1, walkers // heads))
    shares = dweight
    if need_dweight and programs > 1:
        shares = torch.empty((programs, heads, columns), dtype=rstd.dtype, device=dx.device)
    _backward_kernel[(programs, heads)](
        *views, weight, rstd, dx, shares,
        tokens, heads, columns, *(stride for view in views for stride in view.stride()[:2]),
        NEED_DX=need_dx, NEED_DWEIGHT=need_dweight, ROWS=rows, BLOCK=block,
        STAGES=stages(tile_bytes * (3 if flags["HAS_DH"] else 2), dx.device),
        num_warps=min(16, tile_bytes // BYTES_PER_WARP), **flags,
    )  # fmt: skip
    return shares


def _launch_long_rows(
    views: list[Tensor],
    weight: Tensor | None,
    rstd: Tensor,
    dx: Tensor,
    dweight: Tensor,
    need_dx: bool,
    need_dweight: bool,
    flags: dict[str, Any],
) -> Tensor:
    """Compute dx and return the shares of dweight, `(P, H, N)`: one launch for each."""
    dy, _, h = views
    tokens, heads, columns = h.shape
    shape = {"BLOCK": LONG_BLOCK, "num_warps": warps(LONG_BLOCK)}
    if need_dx:
        _backward_long_kernel[(tokens * heads,)](
            *views, weight, rstd, dx,
            heads, columns, *(stride for view in views for stride in view.stride()[:2]), **flags, **shape,
        )  # fmt: skip
    if not need_dweight:
        return dweight
    blocks = cdiv(columns, LONG_BLOCK)
    walkers = program_count(dx.device, LONG_PROGRAMS_PER_MULTIPROCESSOR)
    programs = min(tokens, max(1, walkers // (heads * blocks)))
    shares = torch.empty((programs, heads, columns), dtype=rstd.dtype, device=dx.device)
    _weight_shares_kernel[(programs, blocks, heads)](
        dy, h, rstd, shares, tokens, heads, columns, *dy.stride()[:2], *h.stride()[:2],
        ROWS=1, LONG_OFFSETS=flags["LONG_OFFSETS"], **shape,
    )  # fmt: skip
    return shares


def program_count(device: torch.device, per_multiprocessor: int) -> int:
    """How many programs share the rows. It decides the order of the sum, so it depends on device and shape alone."""
    if device.type != "cuda":
        return INTERPRETER_PROGRAMS
    return per_multiprocessor * torch.cuda.get_device_properties(device).multi_processor_count


def stages(bytes_in_tile: int, device: torch.device) -> int:
    """How many tiles of h, dy and dh are under way at once: one, and what there is shared memory for."""
    # Beside the tiles it holds what the reduction exchanges.
    return min(STAGES, 1 + (shared_memory(device) - 4096) // bytes_in_tile)


@functools.lru_cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program can have on `device`, which is the current one."""
    if triton.knobs.runtime.interpret:
        return 227 * 1024
    architecture = triton.runtime.driver.active.get_current_target().arch
    return SHARED_MEMORY.get(architecture, 99) * 1024
