# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disable-error-code="assignment,var-annotated"
"""Products of 3 to 16 rows with a weight in bfloat16, in Gluon for Hopper (compute capability 9.0).

It computes what `rows_kernel` does, with more of the weight under way: the copy engine (TMA) brings blocks of it into a
ring of STAGES blocks in shared memory, which is filled before the wait of programmatic dependent launch, where Triton's
pipeliner begins after it. A program takes tile after tile, so the next tile's blocks are under way while it writes one;
all of x that it multiplies, times the norm's weight, stays in its shared memory.
"""

from __future__ import annotations

import functools
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .linear import finish

AHEAD = gl.constexpr(8)
"""Blocks of x that are loaded before they are stored: 128 registers for 16 rows."""

# Triton 3.7 renamed the one, and 3.8 the other.
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
_fetch = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@functools.cache
def blocks_of(columns: int, block: int) -> Any:
    """How blocks of the weight lie in shared memory."""
    return gl.NVMMASharedLayout.get_default_for([columns, block], gl.bfloat16)


@gluon.jit
def _ask_for(
    item, last, ring, arrived, w_desc, N,
    STEPS: gl.constexpr, STAGES: gl.constexpr, SPLITS: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Have block `item` of this program's walk copied into its place of the ring; nothing from block `last` on."""
    COLUMNS: gl.constexpr = w_desc.block_type.shape[0]
    BLOCK: gl.constexpr = w_desc.block_type.shape[1]
    place = gl.program_id(0) + item // STEPS * gl.num_programs(0)
    n = place // SPLITS * COLUMNS
    k = (place % SPLITS * STEPS + item % STEPS) * BLOCK
    slot = item % STAGES
    full = arrived.index(slot)
    mbarrier.expect(full, PARTS * w_desc.block_type.nbytes, pred=item < last)
    for part in gl.static_range(PARTS):
        _fetch(w_desc, [part * N + n, k], full, ring.index(slot * PARTS + part), pred=item < last)


@gluon.jit
def _keep_rows(
    xs, x_ptr, norm_weight_ptr, M, split,
    K: gl.constexpr, ROWS: gl.constexpr, BLOCK: gl.constexpr, STEPS: gl.constexpr, WARPS: gl.constexpr,
    NORM: gl.constexpr, OFFSET: gl.constexpr,
):  # fmt: skip
    """Put a share of x, times the norm's weight, into shared memory `(STEPS, ROWS, BLOCK)`; its squares per row.

    A barrier follows each store, so what is to be stored is loaded ahead: it is there after one latency of L2.
    """
    LANES: gl.constexpr = min(32, BLOCK // 8)
    LOADS: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LOADS))[:, None]
    column = gl.arange(0, BLOCK, gl.SliceLayout(0, LOADS))[None, :]
    squares = gl.zeros([ROWS, BLOCK], gl.float32, LOADS)
    for first in gl.static_range(0, STEPS, AHEAD):
        loaded = ()
        for step in gl.static_range(first, min(first + AHEAD, STEPS)):
            k = (split * STEPS + step) * BLOCK + column
            x = gl.load(x_ptr + row * K + k, (row < M) & (k < K), 0.0)
            scale = gl.load(norm_weight_ptr + k, k < K, 0.0) if NORM != "none" else x
            loaded += ((x, scale),)
        for step in gl.static_range(first, min(first + AHEAD, STEPS)):
            x, scale = loaded[step - first]
            if NORM != "none":
                f = x.to(gl.float32)
                squares += f * f
                x = (f * (scale.to(gl.float32) + OFFSET)).to(x.dtype)
            xs.index(step).store(x)
    return gl.sum(squares, 1)


@gluon.jit
def _sum_shares(
    total, up, squares, partial_ptr, square_ptr, counter_ptr, place, c, r,
    SPLITS: gl.constexpr, GATED: gl.constexpr, NORM: gl.constexpr,
):  # fmt: skip
    """As `sum_shares` of `rows_kernel`, in the layouts of these sums."""
    COLUMNS: gl.constexpr = total.shape[0]
    ROWS: gl.constexpr = total.shape[1]
    SIZE: gl.constexpr = COLUMNS * ROWS * (1 if GATED == "none" else 2)
    SUMS: gl.constexpr = total.type.layout
    OF_ROWS: gl.constexpr = squares.type.layout
    share = c[:, None] * ROWS + r[None, :]
    tile = place // SPLITS
    gl.store(partial_ptr + place * SIZE + share, total)
    if GATED != "none":
        gl.store(partial_ptr + place * SIZE + COLUMNS * ROWS + share, up)
    if NORM != "none":
        gl.store(square_ptr + place * ROWS + r, squares)
    _barrier()
    is_last = gl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") == SPLITS - 1
    _barrier()
    if is_last:
        gl.store(counter_ptr + tile, 0)
        total = gl.zeros([COLUMNS, ROWS], gl.float32, SUMS)
        up = gl.zeros([COLUMNS, ROWS], gl.float32, SUMS)
        squares = gl.zeros([ROWS], gl.float32, OF_ROWS)
        for i in gl.static_range(SPLITS):
            base = partial_ptr + (tile * SPLITS + i) * SIZE
            total += gl.load(base + share, cache_modifier=".cg")
            if GATED != "none":
                up += gl.load(base + COLUMNS * ROWS + share, cache_modifier=".cg")
            if NORM != "none":
                squares += gl.load(square_ptr + (tile * SPLITS + i) * ROWS + r, cache_modifier=".cg")
    return is_last, total, up, squares


@gluon.jit
def ring_kernel(
    x_ptr, w_desc, y_ptr, norm_weight_ptr, bias_ptr, residual_ptr, partial_ptr, square_ptr, counter_ptr, M, N,
    K: gl.constexpr, ROWS: gl.constexpr, WARPS: gl.constexpr, STAGES: gl.constexpr, SPLITS: gl.constexpr,
    NORM: gl.constexpr, OFFSET: gl.constexpr, EPS: gl.constexpr, GATED: gl.constexpr, SOFTCAP: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Up to ROWS rows: x (M, K), w (N, K) or (2 N, K); y (M, N). Tiles are COLUMNS of y, in SPLITS shares of K.

    A program's tiles all have the same share: SPLITS divides the number of programs.
    """
    COLUMNS: gl.constexpr = w_desc.block_type.shape[0]
    BLOCK: gl.constexpr = w_desc.block_type.shape[1]
    PARTS: gl.constexpr = 1 if GATED == "none" else 2
    STEPS: gl.constexpr = (K + SPLITS * BLOCK - 1) // (SPLITS * BLOCK)
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 16])
    OF_ROWS: gl.constexpr = gl.SliceLayout(0, SUMS)
    OF_X: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, BLOCK], w_desc.dtype)
    ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES * PARTS, COLUMNS, BLOCK], w_desc.layout)
    xs = gl.allocate_shared_memory(w_desc.dtype, [STEPS, ROWS, BLOCK], OF_X)
    arrived = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    places, programs, first = gl.cdiv(N, COLUMNS) * SPLITS, gl.num_programs(0), gl.program_id(0)
    last = gl.cdiv(places - first, programs) * STEPS
    for stage in gl.static_range(STAGES):
        mbarrier.init(arrived.index(stage), count=1)
    fence_async_shared()
    for item in gl.static_range(STAGES):
        _ask_for(item, last, ring, arrived, w_desc, N, STEPS, STAGES, SPLITS, PARTS)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    squares = _keep_rows(xs, x_ptr, norm_weight_ptr, M, first % SPLITS,
                         K, ROWS, BLOCK, STEPS, WARPS, NORM, OFFSET)  # fmt: skip
    squares = gl.convert_layout(squares, OF_ROWS)
    fence_async_shared()
    _barrier()
    c, r = gl.arange(0, COLUMNS, gl.SliceLayout(1, SUMS)), gl.arange(0, ROWS, OF_ROWS)
    item = 0
    for place in range(first, places, programs):
        total = gl.zeros([COLUMNS, ROWS], gl.float32, SUMS)
        up = gl.zeros([COLUMNS, ROWS], gl.float32, SUMS)
        for step in range(STEPS):
            slot = item % STAGES
            mbarrier.wait(arrived.index(slot), item // STAGES & 1)
            x = xs.index(step).permute((1, 0))
            total = warpgroup_mma(ring.index(slot * PARTS), x, total, is_async=True)
            if GATED == "none":
                total = warpgroup_mma_wait(0, deps=[total])
            else:
                up = warpgroup_mma(ring.index(slot * PARTS + 1), x, up, is_async=True)
                total, up = warpgroup_mma_wait(0, deps=[total, up])
            _barrier()  # all warps have read the block, whose place the next one gets
            _ask_for(item + STAGES, last, ring, arrived, w_desc, N, STEPS, STAGES, SPLITS, PARTS)
            item += 1
        tile, all_squares, is_last = place // SPLITS, squares, True
        if SPLITS > 1:
            is_last, total, up, all_squares = _sum_shares(
                total, up, squares, partial_ptr, square_ptr, counter_ptr, place, c, r, SPLITS, GATED, NORM
            )
        if is_last:
            if NORM != "none":
                scale = gl.rsqrt(all_squares / K + EPS)[None, :]
                total *= scale
                up *= scale
            n = tile * COLUMNS + c
            finish(total, up, y_ptr, bias_ptr, residual_ptr, r[None, :] * N + n[:, None], n[:, None],
                   (n < N)[:, None] & (r < M)[None, :], N, GATED, SOFTCAP, HAS_BIAS, HAS_RESIDUAL)  # fmt: skip
