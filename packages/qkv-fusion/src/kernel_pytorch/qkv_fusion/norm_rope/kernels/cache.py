"""Norm and rotation of queries and keys whose keys and values go into a KV cache, in one launch of Triton.

Programs are numbered through the tiles of q and then those of k. A program that has heads of k copies those of v too.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_pytorch.qkv_fusion._core.direct_calls import check_operands, check_shapes
from kernel_pytorch.qkv_fusion._core.launch import bind
from kernel_pytorch.qkv_fusion._core.plans import Planned
from kernel_pytorch.qkv_fusion._core.sizes import allocator, cdiv, exceeds_int32, next_power_of_2, reader, unmade
from kernel_pytorch.qkv_fusion.arguments import check_cache
from kernel_pytorch.qkv_fusion.kernels.heads import (
    as_heads,
    as_rows,
    load_block,
    locate,
    store_block,
    strides,
    tiling,
)

from .forward import check, load_heads, store_heads, turn_heads


@triton.jit
def _slot(
    batch, place, mask, lengths_ptr, table_ptr, capacity, pages, table_stride_b, table_stride_n, PAGE: tl.constexpr
):
    """Where the tokens of a tile are written, `[ROWS, 1]` each: the page, the place in it, and whether it exists.

    All in 64 bits: a cache may be larger than what is written.
    """
    position = tl.load(lengths_ptr + batch, mask=mask, other=0).to(tl.int64) + place
    room = mask & (position >= 0) & (position < capacity)
    page = batch.to(tl.int64)
    if PAGE > 0:
        entries = table_ptr + batch * table_stride_b + position // PAGE * table_stride_n
        page = tl.load(entries, mask=room, other=0).to(tl.int64)
        room = room & (page >= 0) & (page < pages)  # nothing is written outside of the cache
        position = position % PAGE
    return page, position, room


@triton.jit
def _write_heads(
    x_row, y_row, weight_ptr, cos_ptr, sin_ptr, batch, place, mask,
    cos_stride_b, cos_stride_s, sin_stride_b, sin_stride_s, wide: tl.constexpr,
    EPS: tl.constexpr, OFFSET: tl.constexpr, INTERLEAVED: tl.constexpr,
    PAIRS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, REST_BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate the heads at x_row and write them to y_row, `[ROWS, 1]` each."""
    first, second, rest, rstd = load_heads(
        x_row, mask, wide, EPS, False, INTERLEAVED, PAIRS, BLOCK, REST, REST_BLOCK, ROWS
    )
    first, second = turn_heads(
        first, second, rstd, weight_ptr, cos_ptr, sin_ptr, batch, place, mask,
        cos_stride_b, cos_stride_s, sin_stride_b, sin_stride_s, wide, OFFSET, INTERLEAVED, PAIRS, BLOCK,
    )  # fmt: skip
    store_heads(
        y_row, first, second, rest, rstd, weight_ptr, mask, wide, OFFSET,
        INTERLEAVED, PAIRS, BLOCK, REST, REST_BLOCK, ROWS,
    )  # fmt: skip


@triton.jit
def _norm_rope_cache_kernel(
    q_ptr, k_ptr, v_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, k_cache_ptr, v_cache_ptr, lengths_ptr, table_ptr,
    q_out_ptr, q_tiles, q_rows, k_rows, q_heads, k_heads, sequence, capacity, pages,
    q_stride_b, q_stride_s, q_stride_h, k_stride_b, k_stride_s, k_stride_h, v_stride_b, v_stride_s, v_stride_h,
    cos_stride_b, cos_stride_s, sin_stride_b, sin_stride_s,
    k_cache_stride_b, k_cache_stride_h, k_cache_stride_n, v_cache_stride_b, v_cache_stride_h, v_cache_stride_n,
    table_stride_b, table_stride_n, EPS: tl.constexpr, OFFSET: tl.constexpr, INTERLEAVED: tl.constexpr,
    PAGE: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, REST_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr, COLUMNS_BLOCK: tl.constexpr, ROWS: tl.constexpr, LONG_OFFSETS: tl.constexpr,
):  # fmt: skip
    """This program normalises and rotates ROWS heads of q, or of k, which it writes with those of v into the cache.

    q, k, v: (B, S, H, D). Caches: (B, K, N, D), or with PAGE above 0 pages (P, K, PAGE, D) that table (B, N / PAGE)
    names. Unit stride in D. lengths: (B,). Weights: (D). cos, sin: (B or 1, S, R/2). q_out: contiguous.
    """
    wide: tl.constexpr = tl.float64 if q_ptr.dtype.element_ty == tl.float64 else tl.float32
    tile = tl.program_id(0)
    if tile < q_tiles:
        row, head, batch, place = locate(tile, q_heads, sequence, ROWS, LONG_OFFSETS)
        x_row = q_ptr + batch * q_stride_b + place * q_stride_s + head * q_stride_h
        _write_heads(
            x_row, q_out_ptr + row * COLUMNS, q_weight_ptr, cos_ptr, sin_ptr, batch, place, row < q_rows,
            cos_stride_b, cos_stride_s, sin_stride_b, sin_stride_s, wide,
            EPS, OFFSET, INTERLEAVED, PAIRS, BLOCK, REST, REST_BLOCK, ROWS,
        )  # fmt: skip
    else:
        row, head, batch, place = locate(tile - q_tiles, k_heads, sequence, ROWS, LONG_OFFSETS)
        page, position, room = _slot(
            batch, place, row < k_rows, lengths_ptr, table_ptr, capacity, pages, table_stride_b, table_stride_n, PAGE
        )
        x_row = k_ptr + batch * k_stride_b + place * k_stride_s + head * k_stride_h
        v_row = v_ptr + batch * v_stride_b + place * v_stride_s + head * v_stride_h
        far_head = head.to(tl.int64)
        y_row = k_cache_ptr + page * k_cache_stride_b + far_head * k_cache_stride_h + position * k_cache_stride_n
        _write_heads(
            x_row, y_row, k_weight_ptr, cos_ptr, sin_ptr, batch, place, room,
            cos_stride_b, cos_stride_s, sin_stride_b, sin_stride_s, wide,
            EPS, OFFSET, INTERLEAVED, PAIRS, BLOCK, REST, REST_BLOCK, ROWS,
        )  # fmt: skip
        y_row = v_cache_ptr + page * v_cache_stride_b + far_head * v_cache_stride_h + position * v_cache_stride_n
        store_block(y_row, load_block(v_row, room, COLUMNS, COLUMNS_BLOCK, 0.0), room, COLUMNS, COLUMNS_BLOCK)


@Planned
def norm_rope_cache_(
    q: Tensor, k: Tensor, v: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor,
    k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, block_table: Tensor | None,
    eps: float, interleaved: bool, offset: float,
) -> Callable[..., Tensor]:  # fmt: skip
    """The launcher of the operator: `q_out`, contiguous."""
    check(q, k, q_weight, k_weight, cos, sin)
    check_caches(k, v, k_cache, v_cache, cache_seqlens, block_table)
    make = allocator(q)
    if k.numel() == 0:
        return lambda *arguments: make()
    views, tables = [as_heads(x) for x in (q, k, v)], [as_rows(cos), as_rows(sin)]
    constants = tiling(q.shape[-1], cos.shape[-1])
    rows = [view.shape[:-1].numel() for view in views[:2]]
    tiles = [cdiv(count, constants["ROWS"]) for count in rows]
    page = k_cache.shape[2]
    launch = bind(
        _norm_rope_cache_kernel, (sum(tiles),),
        tiles[0], *rows, q.shape[2], k.shape[2], q.shape[1],
        page if block_table is None else page * block_table.shape[1], k_cache.shape[0],
        *(stride for view in (*views, *tables, k_cache, v_cache) for stride in strides(view)),
        *((0, 0) if block_table is None else block_table.stride()),
        EPS=eps, OFFSET=offset, INTERLEAVED=interleaved, PAGE=0 if block_table is None else page,
        COLUMNS=q.shape[-1], COLUMNS_BLOCK=next_power_of_2(q.shape[-1]),
        LONG_OFFSETS=exceeds_int32(*views, *tables, unmade(q.shape, q.dtype)), **constants,
    )  # fmt: skip
    reads = [reader(q, as_heads), reader(k, as_heads), reader(v, as_heads)]
    read_cos, read_sin = reader(cos, as_rows), reader(sin, as_rows)

    def run(
        q: Tensor, k: Tensor, v: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor,
        k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, block_table: Tensor | None, *scalars: float,
    ) -> Tensor:  # fmt: skip
        q_out = make()
        launch(
            reads[0](q), reads[1](k), reads[2](v), q_weight.contiguous(), k_weight.contiguous(),
            read_cos(cos), read_sin(sin), k_cache, v_cache, cache_seqlens.contiguous(), block_table, q_out,
        )  # fmt: skip
        torch.autograd.graph.increment_version((k_cache, v_cache))
        return q_out

    return run


def check_caches(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, block_table: Tensor | None
) -> None:
    """Check what a direct call of the operator passes, and that columns of the caches are adjacent."""
    if k.dim() != 4:
        raise ValueError(f"k: shape is {tuple(k.shape)}; it must be (B, S, K, D)")
    check_operands(v=v, k_cache=k_cache, v_cache=v_cache)
    check_shapes(k.shape, v=v)
    if v.dtype != k.dtype:
        raise TypeError(f"v: dtype is {v.dtype}; it must be that of k, {k.dtype}")
    check_cache(k_cache, v_cache, cache_seqlens, block_table, k, k.shape[-1], k.dtype)
    if k_cache.shape[1] != k.shape[2]:
        raise ValueError(f"k_cache: shape is {tuple(k_cache.shape)}; it must have {k.shape[2]} heads, those of k")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.stride(-1) != 1 and cache.shape[-1] > 1:
            raise ValueError(f"{name}: strides are {cache.stride()}; columns must be adjacent")
