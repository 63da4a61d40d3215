# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Attention of one new token per sequence in one kernel: rotary, the new slot of the cache, and all keys that it sees.

A program attends, for the query heads of one KV head of one sequence, to one share of the old keys. Share 0 also takes
the new key, straight from registers, and writes it and its value into the cache. The last program of a KV head merges
the shares. Which slot a key has is its position modulo the slots, so a cache of a windowed layer is a ring.

Dao et al., "Flash-Decoding for long-context inference", 2023, https://pytorch.org/blog/flash-decoding/.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .linear import tanh

LOG2E = tl.constexpr(1.4426950408889634)
NOTHING = tl.constexpr(-1.0e30)
"""Score of a key that is not seen: finite, so that a share without keys merges with weight 0."""


@triton.jit
def rotated(
    x_ptr, d, exists, cos_ptr, sin_ptr, position, norm_ptr, D: tl.constexpr, ROTARY: tl.constexpr,
    HAS_NORM: tl.constexpr, OFFSET: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    """Heads `x_ptr (HEADS, 1)` + d: normalised, then rotated in halves. float32 `(HEADS, DEPTH)`."""
    half: tl.constexpr = ROTARY // 2
    in_depth = d < D
    seen = exists & in_depth[None, :]
    x = tl.load(x_ptr + d[None, :], seen, 0.0).to(tl.float32)
    turns = d < ROTARY
    other = tl.where(turns, tl.where(d < half, d + half, d - half), d)  # never beyond the head
    partner = tl.load(x_ptr + other[None, :], seen, 0.0).to(tl.float32)
    if HAS_NORM:
        r = tl.rsqrt(tl.sum(x * x, 1) / D + EPS)[:, None]
        x = x * r * (tl.load(norm_ptr + d, in_depth, 0.0).to(tl.float32) + OFFSET)[None, :]
        partner = partner * r * (tl.load(norm_ptr + other, in_depth, 0.0).to(tl.float32) + OFFSET)[None, :]
    pair = tl.where(d < half, d, d - half)
    c = tl.load(cos_ptr + position * half + pair, turns, 1.0)
    s = tl.load(sin_ptr + position * half + pair, turns, 0.0)
    s = tl.where(d < half, -s, s)
    return x * c[None, :] + partner * s[None, :]


@triton.jit
def slots_of(position, capacity, table_ptr, stride, pages, RING: tl.constexpr, PAGE: tl.constexpr):
    """First element of the slot of each key, in a KV head's part of a cache; pages are looked up, and exist."""
    slot = position % capacity if RING else position
    if PAGE > 0:
        page = tl.minimum(tl.maximum(tl.load(table_ptr + slot // PAGE), 0), pages - 1)
        return page.to(tl.int64) * stride, slot % PAGE
    else:
        return 0, slot


@triton.jit
def load_tile(
    k_base, v_base, first, high, d, capacity, table_ptr, page_stride, pages,
    D: tl.constexpr, COLUMNS: tl.constexpr, RING: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """Keys and values of COLUMNS positions, zeros from `high` on."""
    j = first + tl.arange(0, COLUMNS)
    page, slot = slots_of(tl.where(j < high, j, 0), capacity, table_ptr, page_stride, pages, RING, PAGE)
    offset = (page + slot * D)[:, None] + d[None, :]
    seen = (j < high)[:, None] & (d < D)[None, :]
    return tl.load(k_base + offset, seen, 0.0), tl.load(v_base + offset, seen, 0.0)


@triton.jit
def attend_tile(
    q, k, v, first, high, top, total, acc,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, FACTOR: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The running maximum, sum and output after a further tile of keys."""
    s = tl.dot(q, k.T, input_precision="ieee")
    if SOFTCAP > 0.0:
        s = SOFTCAP * tanh(s * SCALE / SOFTCAP)
    s = tl.where((first + tl.arange(0, COLUMNS) < high)[None, :], s * FACTOR, NOTHING)
    new_top = tl.maximum(top, tl.max(s, 1))
    p = tl.exp2(s - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return new_top, total * shrink + tl.sum(p, 1), acc


@triton.jit
def attend_to_new_key(q, k, v, SCALE: tl.constexpr, SOFTCAP: tl.constexpr, FACTOR: tl.constexpr):
    """The maximum, sum and output of attention to the new key `(1, DEPTH)` alone."""
    s = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1)
    if SOFTCAP > 0.0:
        s = SOFTCAP * tanh(s * SCALE / SOFTCAP)
    acc = tl.zeros([q.shape[0], q.shape[1]], tl.float32) + v.to(tl.float32)[None, :]
    return s * FACTOR, tl.full([q.shape[0]], 1.0, tl.float32), acc


@triton.jit
def merge_shares(
    o_base, partial_ptr, top_ptr, sum_ptr, sinks_ptr, place, d, active,
    G: tl.constexpr, D: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Write the heads of one KV head, each merged from all shares. Nothing is stored before all loads are under way."""
    PART: tl.constexpr = SPLITS if SPLITS < 32 else 32  # shares at a time: registers
    g = tl.arange(0, GROUP)
    at = (place + tl.arange(0, SPLITS))[:, None] * G + g[None, :]
    tops = tl.load(top_ptr + at, (g < G)[None, :], 0.0, cache_modifier=".cg")
    sums = tl.load(sum_ptr + at, (g < G)[None, :], 0.0, cache_modifier=".cg")
    most = tl.max(tops, 0)
    rest = tl.zeros([GROUP], tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + g, g < G, 0.0).to(tl.float32) * LOG2E
        most = tl.maximum(most, sink)
        rest = tl.exp2(sink - most)
    total = tl.sum(sums * tl.exp2(tops - most[None, :]), 0) + rest
    y = tl.zeros([GROUP, DEPTH], tl.float32)
    for head in tl.static_range(G):
        top = tl.max(tl.where(g == head, most, float("-inf")), 0)
        of_head = tl.zeros([DEPTH], tl.float32)
        for first in tl.static_range(0, SPLITS, PART):
            share = (place + first + tl.arange(0, PART)) * G + head
            weight = tl.exp2(tl.load(top_ptr + share, cache_modifier=".cg") - top)
            parts = tl.load(partial_ptr + share[:, None] * DEPTH + d[None, :], cache_modifier=".cg")
            of_head += tl.sum(parts * weight[:, None], 0)
        y = tl.where(g[:, None] == head, of_head[None, :], y)
    y = y / tl.where(active, total, float("inf"))[:, None]  # an inactive row is 0
    tl.store(o_base + g[:, None] * D + d[None, :], y.to(o_base.dtype.element_ty), (g < G)[:, None] & (d < D)[None, :])


@triton.jit
def attention_kernel(
    qkv_ptr, k_ptr, v_ptr, lengths_ptr, cos_ptr, sin_ptr, o_ptr, q_norm_ptr, k_norm_ptr, sinks_ptr, table_ptr,
    partial_ptr, top_ptr, sum_ptr, counter_ptr, capacity, table_stride, page_stride, pages, seen_before,
    positions,
    H: tl.constexpr, HK: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr, SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPTH: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, PAGE: tl.constexpr, HAS_NORM: tl.constexpr, OFFSET: tl.constexpr,
    EPS: tl.constexpr, HAS_SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One step: qkv (B, (H + 2 HK) D); k, v (B, HK, capacity, D) or pages (pages, HK, PAGE, D); o (B, H D).

    See `launch.attend`.

    seen_before: how many keys before the new one the window shows. positions: rows of cos and sin.
    """
    b, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    G: tl.constexpr = H // HK
    g = tl.arange(0, HEADS)
    d = tl.arange(0, DEPTH)
    is_head = (g < G)[:, None]
    position = tl.load(lengths_ptr + b)
    active = (position >= 0) & (position < positions)
    if not WINDOW:
        active = active & (position < capacity)
    start = 0
    if WINDOW:
        start = tl.maximum(position - seen_before, 0)
    share = tl.cdiv(tl.cdiv(position - start, COLUMNS), SPLITS) * COLUMNS
    low = start + split * share
    high = tl.where(active, tl.minimum(low + share, position), low)
    heads = qkv_ptr + b * (H + 2 * HK) * D
    at = tl.where(active, position, 0)
    k_base, v_base, table = k_ptr, v_ptr, table_ptr
    if PAGE > 0:
        table = table_ptr + b * table_stride
        k_base, v_base = k_ptr + kv_head * PAGE * D, v_ptr + kv_head * PAGE * D
    else:
        k_base = k_ptr + (b * HK + kv_head).to(tl.int64) * capacity * D
        v_base = v_ptr + (b * HK + kv_head).to(tl.int64) * capacity * D
    # No kernel of a step writes a length or an old key: the first tile of keys is on its way before the wait.
    k, v = load_tile(k_base, v_base, low, high, d, capacity, table, page_stride, pages, D, COLUMNS, WINDOW, PAGE)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    q = rotated(heads + (kv_head * G + g)[:, None] * D, d, is_head, cos_ptr, sin_ptr, at, q_norm_ptr, D, ROTARY,
                HAS_NORM, OFFSET, EPS).to(k_ptr.dtype.element_ty)  # fmt: skip
    # Every program loads the new key, so that its loads are under way with those of q.
    one = tl.arange(0, 1)
    new_k = rotated(heads + (H + kv_head) * D + one[:, None], d, (one < 1)[:, None], cos_ptr, sin_ptr, at, k_norm_ptr,
                    D, ROTARY, HAS_NORM, OFFSET, EPS).to(k_ptr.dtype.element_ty)  # fmt: skip
    new_v = tl.load(heads + (H + HK + kv_head) * D + d, d < D, 0.0)
    factor: tl.constexpr = LOG2E if SOFTCAP > 0.0 else SCALE * LOG2E
    top = tl.full([HEADS], NOTHING, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, DEPTH], tl.float32)
    if (split == 0) & active:
        page, slot = slots_of(at, capacity, table, page_stride, pages, WINDOW, PAGE)
        tl.store(k_base + page + slot * D + d[None, :], new_k, (d < D)[None, :])
        tl.store(v_base + page + slot * D + d, new_v, d < D)
        top, total, acc = attend_to_new_key(q, new_k, new_v, SCALE, SOFTCAP, factor)
    if low < high:
        top, total, acc = attend_tile(q, k, v, low, high, top, total, acc, SCALE, SOFTCAP, factor, COLUMNS)
    for first in tl.range(low + COLUMNS, high, COLUMNS):
        k, v = load_tile(k_base, v_base, first, high, d, capacity, table, page_stride, pages, D, COLUMNS, WINDOW, PAGE)
        top, total, acc = attend_tile(q, k, v, first, high, top, total, acc, SCALE, SOFTCAP, factor, COLUMNS)
    place = (b * HK + kv_head) * SPLITS
    is_last = True
    if SPLITS > 1:
        tl.store(top_ptr + (place + split) * G + g, top, g < G)
        tl.store(sum_ptr + (place + split) * G + g, total, g < G)
        tl.store(partial_ptr + ((place + split) * G + g)[:, None] * DEPTH + d[None, :], acc, is_head)
        tl.debug_barrier()
        is_last = tl.atomic_add(counter_ptr + b * HK + kv_head, 1, sem="acq_rel") == SPLITS - 1
        tl.debug_barrier()
    o_base = o_ptr + (b * H + kv_head * G) * D
    if is_last:
        if SPLITS > 1:
            tl.store(counter_ptr + b * HK + kv_head, 0)
            sinks = sinks_ptr + kv_head * G if HAS_SINKS else sinks_ptr
            merge_shares(
                o_base, partial_ptr, top_ptr, sum_ptr, sinks, place, d, active, G, D, DEPTH, GROUP, SPLITS, HAS_SINKS
            )  # fmt: skip
        else:
            if HAS_SINKS:
                sink = tl.load(sinks_ptr + kv_head * G + g, g < G, 0.0).to(tl.float32) * LOG2E
                most = tl.maximum(top, sink)
                shrink = tl.exp2(top - most)
                total = total * shrink + tl.exp2(sink - most)
                acc = acc * shrink[:, None]
            y = acc / tl.where(active, total, float("inf"))[:, None]
            tl.store(o_base + g[:, None] * D + d[None, :], y.to(o_ptr.dtype.element_ty), is_head & (d < D)[None, :])
