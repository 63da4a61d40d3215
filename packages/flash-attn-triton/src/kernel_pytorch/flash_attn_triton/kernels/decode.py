"""Decoding in Triton: few new tokens against a long cache. Kernels, then the launcher.

One query per sequence gives a GPU too few tiles of queries to be busy with, so the keys are split: each program attends
to one share of the keys of one sequence, for all query heads that read one KV head, so that the cache is read once. A
second kernel combines the shares by their logsumexp. The number of splits depends on shapes alone, which the host
knows; the lengths of the sequences stay on the GPU, and each program takes its share of what its own sequence has.

Dao et al., "Flash-Decoding for long-context inference", 2023, https://pytorch.org/blog/flash-decoding/. Pages: Kwon et
al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023,
https://arxiv.org/abs/2309.06180.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_pytorch.flash_attn_triton._core.device import program_count
from kernel_pytorch.flash_attn_triton._core.launch import bind
from kernel_pytorch.flash_attn_triton._core.plans import Planned
from kernel_pytorch.flash_attn_triton._core.sizes import cdiv, exceeds_int32, next_power_of_2
from kernel_pytorch.flash_attn_triton.arguments import check_cache, check_sinks, slopes_of

from .configurations import DECODE, configuration
from .geometry import Geometry, check_supported
from .tiles import LOG2E, factor_of, finite, scores_of, with_sink

PROGRAMS_PER_MULTIPROCESSOR = 4
KEYS_PER_SPLIT = 128
"""Minimum of keys per split: a program that reads fewer takes longer to start than to read."""
MOST_SPLITS = 128
CHUNK = 16
"""Splits that the second kernel reads at a time."""
_unit_depth = Geometry.unit_depth


@triton.jit
def _load_keys(base, offset, stride, seen, d, depth, WHOLE_HEAD: tl.constexpr):
    """Keys or values of a tile `(COLUMNS, DEPTH)`; zeros where a sequence has no key."""
    mask = seen[:, None]
    if not WHOLE_HEAD:
        mask = mask & (d[None, :] < depth)
    return tl.load(base + offset[:, None] * stride + d[None, :], mask=mask, other=0.0)


@triton.jit
def _share(length, queries, left, split, splits, HAS_LEFT: tl.constexpr, COLUMNS: tl.constexpr):
    """Which keys of a sequence a split attends to, whole tiles but for the last: `(start, end)`.

    The last query sees the last key, whatever `right` is. The first query sees the first key that is seen at all.
    """
    first = 0
    if HAS_LEFT:
        first = tl.maximum(length - queries - left, 0) // COLUMNS * COLUMNS
    each = tl.cdiv(tl.cdiv(length - first, COLUMNS), splits) * COLUMNS
    start = first + split * each
    return start, tl.minimum(start + each, length)


@triton.jit
def _attend(
    q, query, d, start, end, length, k_base, v_base, k_stride_b, k_stride_n, v_stride_b, v_stride_n,
    table, table_stride_n, pages, slope, queries, depth, left, right,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, PAGE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    WHOLE_HEAD: tl.constexpr, LONG_OFFSETS: tl.constexpr,
):  # fmt: skip
    """Attend to the keys from `start` to `end`: the output times `total`, the maximum, the sum of exponentials."""
    top = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    acc = tl.zeros([ROWS, DEPTH], dtype=tl.float32)
    for first in tl.range(start, end, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        seen = column < length
        place = column
        k_tile, v_tile = k_base, v_base
        if PAGE > 0:
            entries = table + column // PAGE * table_stride_n
            page = tl.minimum(tl.maximum(tl.load(entries, mask=seen, other=0), 0), pages - 1)
            place = column % PAGE
            if LONG_OFFSETS:
                page = page.to(tl.int64)
            k_tile = k_base + (page * k_stride_b)[:, None]
            v_tile = v_base + (page * v_stride_b)[:, None]
        if LONG_OFFSETS:
            place = place.to(tl.int64)
        k = _load_keys(k_tile, place, k_stride_n, seen, d, depth, WHOLE_HEAD)
        x, _ = scores_of(
            tl.dot(q, k.T, input_precision="ieee"), query[:, None] + (length - queries - first),
            tl.arange(0, COLUMNS)[None, :], query[:, None], column[None, :], queries, length, slope, k_base, 0, 0,
            SCALE, SOFTCAP, ALIBI, "none",
        )  # fmt: skip
        behind = column[None, :] - query[:, None] - (length - queries)
        sees = column[None, :] < length
        if HAS_LEFT:
            sees = sees & (behind >= -left)
        if HAS_RIGHT:
            sees = sees & (behind <= right)
        s = tl.where(sees, x * factor_of(SCALE, SOFTCAP, ALIBI, "none"), float("-inf"))
        new_top = tl.maximum(top, tl.max(s, axis=1))
        base = finite(new_top)
        p = tl.exp2(s - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(p, axis=1)
        v = _load_keys(v_tile, place, v_stride_n, seen, d, depth, WHOLE_HEAD)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        top = new_top
    return acc, top, total


@triton.jit
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, lengths_ptr, table_ptr, slopes_ptr, sinks_ptr, o_ptr, partial_ptr, lse_ptr,
    kv_heads, group, queries, capacity, pages, depth, left, right, tiles, splits, all_rows,
    q_stride_b, q_stride_h, q_stride_m, k_stride_b, k_stride_h, k_stride_n, v_stride_b, v_stride_h, v_stride_n,
    table_stride_b, table_stride_n, slopes_stride_b, slopes_stride_h,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr, HAS_SINKS: tl.constexpr, PAGE: tl.constexpr, SPLIT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WHOLE_HEAD: tl.constexpr,
    LONG_OFFSETS: tl.constexpr,
):  # fmt: skip
    """This program attends for ROWS rows of one KV head to one share of a sequence's keys.

    q: (B, H, Sq, D). k, v: (B, Hkv, S, D), or with PAGE above 0 pages (N, Hkv, PAGE, D) that table (B, S / PAGE) names.
    Unit stride in D. Rows of a KV head: all queries of its first query head, then of the next. o: (B, H, Sq, D),
    contiguous. With SPLIT partial (splits, B, H, Sq, D) and lse (splits, B, H, Sq), base 2, contiguous, instead.
    """
    split = tl.program_id(0) % splits
    tile = tl.program_id(0) // splits % tiles
    head_of_batch = tl.program_id(0) // (splits * tiles)
    if LONG_OFFSETS:
        head_of_batch = head_of_batch.to(tl.int64)
    batch = head_of_batch // kv_heads
    kv_head = head_of_batch % kv_heads
    row = tile * ROWS + tl.arange(0, ROWS)
    exists = row < group * queries
    query = row % queries
    head = kv_head * group + row // queries
    d = tl.arange(0, DEPTH)
    d_exists = exists[:, None] & (d[None, :] < depth)
    q_offset = batch * q_stride_b + head * q_stride_h + query * q_stride_m
    q = tl.load(q_ptr + q_offset[:, None] + d[None, :], mask=d_exists, other=0.0)
    slope = 0.0
    if ALIBI != "none":
        slopes = slopes_ptr + batch * slopes_stride_b + head * slopes_stride_h
        slope = tl.load(slopes, mask=exists, other=0.0).to(tl.float32)[:, None]

    k_base, v_base = k_ptr + kv_head * k_stride_h, v_ptr + kv_head * v_stride_h
    table = table_ptr
    if PAGE > 0:
        table += batch * table_stride_b
    else:
        k_base += batch * k_stride_b
        v_base += batch * v_stride_b
    length = tl.minimum(tl.maximum(tl.load(lengths_ptr + batch), 0), capacity)  # a wrong one reads nothing foreign
    start, end = _share(length, queries, left, split, splits, HAS_LEFT, COLUMNS)
    acc, top, total = _attend(
        q, query, d, start, end, length, k_base, v_base, k_stride_b, k_stride_n, v_stride_b, v_stride_n,
        table, table_stride_n, pages, slope, queries, depth, left, right,
        SCALE, SOFTCAP, ALIBI, HAS_LEFT, HAS_RIGHT, PAGE, ROWS, COLUMNS, DEPTH, WHOLE_HEAD, LONG_OFFSETS,
    )  # fmt: skip
    if HAS_SINKS and not SPLIT:
        sink = tl.load(sinks_ptr + head, mask=exists, other=0.0).to(tl.float32) * LOG2E
        acc, top, total = with_sink(acc, top, total, sink)
    nothing = total == 0.0
    total = tl.where(nothing, 1.0, total)
    acc /= total[:, None]
    of_all = head_of_batch * group * queries + row
    if SPLIT:
        of_all += split * all_rows
        tl.store(lse_ptr + of_all, tl.where(nothing, float("-inf"), top + tl.log2(total)), mask=exists)
        # Only lse is read from an empty split.
        tl.store(partial_ptr + of_all[:, None] * depth + d[None, :], acc, mask=d_exists & (start < end))
    else:
        tl.store(o_ptr + of_all[:, None] * depth + d[None, :], acc.to(o_ptr.dtype.element_ty), mask=d_exists)


@triton.jit
def _combine_kernel(
    partial_ptr, lse_ptr, sinks_ptr, o_ptr, heads, queries, depth, splits, all_rows,
    HAS_SINKS: tl.constexpr, SPLITS: tl.constexpr, DEPTH: tl.constexpr, LONG_OFFSETS: tl.constexpr,
):  # fmt: skip
    """This program makes one row of o from the shares of all splits: their mean, weighted by exp2(lse)."""
    row = tl.program_id(0)
    if LONG_OFFSETS:
        row = row.to(tl.int64)
    d = tl.arange(0, DEPTH)
    top = tl.full([1], float("-inf"), dtype=tl.float32)
    total = tl.zeros([1], dtype=tl.float32)
    acc = tl.zeros([1, DEPTH], dtype=tl.float32)
    for first in tl.range(0, splits, SPLITS):
        split = first + tl.arange(0, SPLITS)
        of_all = split * all_rows + row
        lse = tl.load(lse_ptr + of_all, mask=split < splits, other=float("-inf"))
        new_top = tl.maximum(top, tl.max(lse, axis=0))
        base = finite(new_top)
        weights = tl.exp2(lse - base)
        # An empty share was not written. NaN is no empty share: it makes its own weight NaN.
        written = (lse > float("-inf"))[:, None] & (d[None, :] < depth)
        partial = tl.load(partial_ptr + of_all[:, None] * depth + d[None, :], mask=written, other=0.0)
        shrink = tl.exp2(top - base)
        acc = acc * shrink[:, None] + tl.sum(weights[:, None] * partial, axis=0)[None, :]
        total = total * shrink + tl.sum(weights, axis=0)
        top = new_top
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + row // queries % heads).to(tl.float32) * LOG2E
        acc, top, total = with_sink(acc, top, total, sink)
    total = tl.where(total == 0.0, 1.0, total)
    o = (acc / total[:, None]).to(o_ptr.dtype.element_ty)
    tl.store(o_ptr + row * depth + d[None, :], o, mask=d[None, :] < depth)


def splits_of(programs: int, capacity: int, device: torch.device) -> int:
    """How many programs share the keys of a sequence.

    Args:
        programs: that there are without splits.
        capacity: keys that the cache of a sequence has room for.
        device: of the tensors.
    """
    wanted = cdiv(program_count(device, PROGRAMS_PER_MULTIPROCESSOR), programs)
    return max(1, min(wanted, cdiv(capacity, KEYS_PER_SPLIT), MOST_SPLITS))


def _plan(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, block_table: Tensor | None,
    alibi_slopes: Tensor | None, sinks: Tensor | None, scale: float, left: int, right: int, softcap: float,
) -> Callable[..., Tensor]:  # fmt: skip
    """The launcher of the operator: `o`."""
    check_cache(q, k_cache, v_cache, cache_seqlens, block_table)
    check_supported(q)
    batch, heads, queries, depth = q.shape
    slopes_of(alibi_slopes, q, batch, heads)
    check_sinks(sinks, q, heads)
    kv_heads, page = k_cache.shape[1:3]
    capacity = page if block_table is None else page * block_table.shape[1]
    if q.numel() == 0 or capacity == 0:
        return lambda q, *_: torch.zeros_like(q, memory_format=torch.contiguous_format)
    interpreted = triton.knobs.runtime.interpret
    architecture = None if interpreted else triton.runtime.driver.active.get_current_target().arch
    chosen = configuration(DECODE, architecture, depth, q.element_size(), False)
    group, padded_depth = heads // kv_heads, max(16, next_power_of_2(depth))
    rows = min(chosen.rows, max(16, next_power_of_2(group * queries)))
    tiles = cdiv(group * queries, rows)
    splits = splits_of(batch * kv_heads * tiles, capacity, q.device)
    # With pages the number of a page is loaded a stage before what lies in it.
    stages = chosen.stages + (block_table is not None and chosen.stages > 1)
    long_offsets = exceeds_int32(q, k_cache, v_cache)
    slopes_strides = (0, 0) if alibi_slopes is None else alibi_slopes.expand(batch, heads).stride()
    launch = bind(
        _decode_kernel, (splits * tiles * batch * kv_heads,),
        kv_heads, group, queries, capacity, k_cache.shape[0], depth,
        # No query is farther from a key than this, and sums of larger numbers overflow 32 bits.
        min(left, capacity + queries), min(right, capacity + queries), tiles, splits, batch * heads * queries,
        *_unit_depth(q).stride()[:3], *_unit_depth(k_cache).stride()[:3], *_unit_depth(v_cache).stride()[:3],
        *((0, 0) if block_table is None else block_table.stride()), *slopes_strides,
        SCALE=scale, SOFTCAP=softcap, ALIBI="none" if alibi_slopes is None else "past" if right == 0 else "both",
        HAS_LEFT=left >= 0, HAS_RIGHT=right >= 0,
        HAS_SINKS=sinks is not None, PAGE=0 if block_table is None else page, SPLIT=splits > 1,
        ROWS=rows, COLUMNS=chosen.columns, DEPTH=padded_depth, WHOLE_HEAD=depth == padded_depth,
        LONG_OFFSETS=long_offsets, num_warps=chosen.warps, num_stages=stages,
    )  # fmt: skip
    combine = bind(
        _combine_kernel, (batch * heads * queries,), heads, queries, depth, splits, batch * heads * queries,
        HAS_SINKS=sinks is not None, SPLITS=CHUNK, DEPTH=padded_depth, LONG_OFFSETS=long_offsets, num_warps=4,
    )  # fmt: skip

    def run(
        q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, table: Any, slopes: Any, sinks: Tensor | None, *scalars: Any
    ) -> Tensor:  # fmt: skip
        o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        partial = lse = None
        if splits > 1:
            partial = torch.empty((splits, *q.shape), dtype=torch.float32, device=q.device)
            lse = torch.empty((splits, *q.shape[:-1]), dtype=torch.float32, device=q.device)
        sinks = None if sinks is None else sinks.contiguous()
        launch(
            _unit_depth(q), _unit_depth(k), _unit_depth(v), lengths.contiguous(), table, slopes, sinks, o, partial, lse
        )
        if splits > 1:
            combine(partial, lse, sinks, o)
        return o

    return run


flash_decode = Planned(_plan)
