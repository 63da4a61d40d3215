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
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_pytorch.rmsnorm._core.device import program_count, shared_memory
from kernel_pytorch.rmsnorm._core.direct_calls import check_count, check_operands, check_shapes
from kernel_pytorch.rmsnorm._core.launch import bind
from kernel_pytorch.rmsnorm._core.plans import Planned
from kernel_pytorch.rmsnorm._core.sizes import allocator, cdiv, exceeds_int32, next_power_of_2, reader, unmade, warps

from .forward import LONG_BLOCK, check, token_head_rows

BLOCK_LIMIT = 8192  # columns of h, dy, weight and dweight that one program holds in registers
# Bytes of h in a tile: two rows, within these bounds. Smaller ones leave the copies into shared memory too short,
# larger ones leave too few to be in flight at once.
SMALLEST_TILE, LARGEST_TILE = 2048, 16384
BYTES_PER_WARP = 2048
STAGES = 3  # tiles under way: one is computed, two are copied
LONG_PROGRAMS_PER_MULTIPROCESSOR = 4


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


@Planned
def rms_norm_backward(
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    eps: float,
    offset: float,
    need_dx: bool,
    need_dweight: bool,
) -> Callable[..., tuple[Tensor, Tensor]]:
    """The launcher of the operator: one or two kernels, and the addition of the shares where dweight has several.

    Args:
        dy: `(..., N)`, any strides.
        dh: `(..., N)`, the gradient that arrives at the residual stream, or None.
        h: `(..., N)`, what was normalised.
        rstd: `(...)`, as the forward returned it.
        eps: went into rstd.
        offset: added to the weight.
        need_dx: whether dx is computed.
        need_dweight: whether dweight is computed.

    Returns:
        dx `(..., N)` in `h.dtype` and dweight like weight; empty where not needed.
    """
    check(h, weight, "llama")
    check_operands(dy=dy, dh=dh, rstd=rstd)
    check_shapes(h.shape, dy=dy, dh=dh)
    check_count(h.shape[:-1].numel(), rstd=rstd)
    heads = weight.shape[0] if weight is not None and weight.dim() == 2 else 1
    need_dweight = need_dweight and weight is not None
    like = h if weight is None else weight
    new_dx, new_dweight = allocator(h, needed=need_dx), allocator(like, needed=need_dweight)
    if h.numel() == 0:
        return lambda *arguments: (new_dx(), new_dweight().zero_())
    as_rows = functools.partial(token_head_rows, heads=heads)
    views = [as_rows(t) for t in (dy, dy if dh is None else dh, h)]
    read_dy, read_dh, read_h = (reader(t, as_rows) for t in (dy, dy if dh is None else dh, h))
    flags = {"HAS_WEIGHT": weight is not None, "HAS_DH": dh is not None, "OFFSET": offset}
    flags["LONG_OFFSETS"] = exceeds_int32(*views, unmade(h.shape, h.dtype))
    of_kind = _plan_one_block if next_power_of_2(h.shape[-1]) <= BLOCK_LIMIT else _plan_long_rows
    compute, share_count = of_kind(views, h.device, need_dx, need_dweight, flags)
    new_shares = allocator(h, (share_count, *views[0].shape[1:]), rstd.dtype)
    elements = like.numel() if need_dweight else 0
    add = bind(_add_shares_kernel, (cdiv(elements, 16),), share_count, elements, ROWS=256, BLOCK=16, num_warps=8)

    def run(
        dy: Tensor, dh: Tensor | None, h: Tensor, weight: Tensor | None, rstd: Tensor, *scalars: Any
    ) -> tuple[Tensor, Tensor]:
        dx, dweight = new_dx(), new_dweight()
        shares = new_shares() if share_count > 0 else dweight
        weight = None if weight is None else weight.contiguous()
        compute(read_dy(dy), read_dh(dy if dh is None else dh), read_h(h), weight, rstd.contiguous(), dx, shares)
        if share_count > 0:
            add(shares, dweight)
        return dx, dweight

    return run


def _plan_one_block(
    views: list[Tensor], device: torch.device, need_dx: bool, need_dweight: bool, flags: dict[str, Any]
) -> tuple[Callable[..., None], int]:
    """The launch that computes dx and the shares of dweight, and how many there are; 0 where it writes dweight."""
    tokens, heads, columns = views[0].shape
    block = next_power_of_2(columns)
    row_bytes = block * views[2].element_size()
    rows = max(1, min(max(2 * row_bytes, SMALLEST_TILE), LARGEST_TILE) // row_bytes)
    tile_bytes = rows * row_bytes
    walkers = program_count(device, max(1, LARGEST_TILE // tile_bytes))
    programs = min(cdiv(tokens, rows), max(1, walkers // heads))
    launch = bind(
        _backward_kernel, (programs, heads),
        tokens, heads, columns, *(stride for view in views for stride in view.stride()[:2]),
        NEED_DX=need_dx, NEED_DWEIGHT=need_dweight, ROWS=rows, BLOCK=block,
        STAGES=stages(tile_bytes * (3 if flags["HAS_DH"] else 2), device),
        num_warps=min(16, tile_bytes // BYTES_PER_WARP), **flags,
    )  # fmt: skip
    return launch, programs if need_dweight and programs > 1 else 0


def _plan_long_rows(
    views: list[Tensor], device: torch.device, need_dx: bool, need_dweight: bool, flags: dict[str, Any]
) -> tuple[Callable[..., None], int]:
    """What computes dx and the shares of dweight, one launch for each, and how many shares there are."""
    dy, _, h = views
    tokens, heads, columns = h.shape
    shape = {"BLOCK": LONG_BLOCK, "num_warps": warps(LONG_BLOCK)}
    strides = [stride for view in views for stride in view.stride()[:2]]
    of_dx = bind(_backward_long_kernel, (tokens * heads,), heads, columns, *strides, **flags, **shape)
    blocks = cdiv(columns, LONG_BLOCK)
    walkers = program_count(device, LONG_PROGRAMS_PER_MULTIPROCESSOR)
    programs = min(tokens, max(1, walkers // (heads * blocks)))
    of_shares = bind(
        _weight_shares_kernel, (programs, blocks, heads), tokens, heads, columns, *dy.stride()[:2], *h.stride()[:2],
        ROWS=1, LONG_OFFSETS=flags["LONG_OFFSETS"], **shape,
    )  # fmt: skip

    def launch(
        dy: Tensor, dh: Tensor, h: Tensor, weight: Tensor | None, rstd: Tensor, dx: Tensor, shares: Tensor
    ) -> None:
        if need_dx:
            of_dx(dy, dh, h, weight, rstd, dx)
        if need_dweight:
            of_shares(dy, h, rstd, shares)

    return launch, programs if need_dweight else 0


def stages(bytes_in_tile: int, device: torch.device) -> int:
    """Number of tiles of h, dy and dh in flight: the one being computed, plus those that fit in shared memory."""
    # Beside the tiles it holds what the reduction exchanges.
    return min(STAGES, 1 + (shared_memory(device) - 4096) // bytes_in_tile)
