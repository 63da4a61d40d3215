"""The forward pass in Triton. Kernel, then the launcher.

A program takes a tile of queries of one head and walks the keys that they see. It keeps the maximum of the scores so
far, the sum of the exponentials relative to it, and the output so far in float32; whenever the maximum grows, the sum
and the output are scaled down (Milakov and Gimelshein, 2018, https://arxiv.org/abs/1805.02867). The scores never leave
registers. Causal masks and windows are computed only on the tiles that they cross, and tiles that no query sees are not
visited. Where it is causal, programs with most to do begin first.

Dao, "FlashAttention-2", 2023, https://arxiv.org/abs/2307.08691, section 3.1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kernel_pytorch.flash_attn_triton._core.launch import bind
from kernel_pytorch.flash_attn_triton._core.plans import Planned
from kernel_pytorch.flash_attn_triton._core.sizes import cdiv, reader

from . import gluon_launch
from .configurations import FORWARD
from .geometry import Geometry
from .tiles import (
    LN2,
    LOG2E,
    factor_of,
    finite,
    first_row_of,
    kept,
    keys_seen,
    limits,
    load_rows,
    scores_of,
    sequence,
    visible,
    weights_of,
    with_sink,
)


@triton.jit
def _attend(
    acc, top, total, q, row, place, first_key, last_key, d, start, end, k_base, v_base, k_stride, v_stride,
    bias_base, bias_stride_m, bias_stride_n, slope, seed, matrix, rows, columns, depth,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT_P: tl.constexpr, ALIBI: tl.constexpr, BIAS: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, MASKED: tl.constexpr,
    COLUMNS: tl.constexpr, WHOLE_HEAD: tl.constexpr, LONG_OFFSETS: tl.constexpr,
):  # fmt: skip
    """Attend to the keys from `start` to `end` as well."""
    for first in tl.range(start, end, COLUMNS):
        key = tl.arange(0, COLUMNS)
        column = first + key
        if LONG_OFFSETS:
            column = column.to(tl.int64)
        k = load_rows(k_base, column, k_stride, columns, d, depth, MASKED, WHOLE_HEAD)
        x, _ = scores_of(
            tl.dot(q, k.T, input_precision="ieee"), (place - first)[:, None], key[None, :],
            row[:, None], column[None, :], rows, columns, slope, bias_base, bias_stride_m, bias_stride_n,
            SCALE, SOFTCAP, ALIBI, BIAS,
        )  # fmt: skip
        x = visible(x, key[None, :], (first_key - first)[:, None], (last_key - first)[:, None], FIRST, LAST)
        factor: tl.constexpr = factor_of(SCALE, SOFTCAP, ALIBI, BIAS)
        new_top = tl.maximum(top, tl.max(x, axis=1) * factor)
        base = finite(new_top)
        p = weights_of(x, base[:, None], factor)
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(p, axis=1)
        if DROPOUT_P > 0.0:
            p *= kept(seed, matrix, row[:, None], column[None, :], rows, columns, DROPOUT_P)
        v = load_rows(v_base, column, v_stride, columns, d, depth, MASKED, WHOLE_HEAD)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        top = new_top
    return acc, top, total


NOTHING = float("-inf")
"""lse of a query that sees no key."""


@triton.jit
def _store(
    acc, top, total, o_ptr, lse_ptr, normalizer_ptr, rest_ptr, target, exists, lse_target, row_exists,
    KEEP_REST: tl.constexpr,
):  # fmt: skip
    """Divide by the sums, and store: the output, lse, and for a backward maxima, sums, and what rounding took off."""
    if KEEP_REST:
        tl.store(normalizer_ptr + 2 * lse_target, top, mask=row_exists)
        tl.store(normalizer_ptr + 2 * lse_target + 1, total, mask=row_exists)
    nothing = total == 0.0
    total = tl.where(nothing, 1.0, total)
    lse = tl.where(nothing, float("-inf"), (top + tl.log2(total)) * LN2)
    tl.store(lse_ptr + lse_target, lse, mask=row_exists)
    acc /= total[:, None]
    o = acc.to(o_ptr.dtype.element_ty)
    tl.store(o_ptr + target, o, mask=exists)
    if KEEP_REST and o_ptr.dtype.element_ty != tl.float32:
        tl.store(rest_ptr + target, (acc - o.to(tl.float32)).to(o_ptr.dtype.element_ty), mask=exists)


@triton.jit
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, slopes_ptr, sinks_ptr, seed_ptr, cu_q_ptr, cu_k_ptr, o_ptr, lse_ptr,
    normalizer_ptr, rest_ptr, heads, group, rows, columns, depth, left, right, lse_rows, all_columns,
    q_stride_b, q_stride_h, q_stride_m, k_stride_b, k_stride_h, k_stride_n, v_stride_b, v_stride_h, v_stride_n,
    o_stride_b, o_stride_h, o_stride_m, bias_stride_b, bias_stride_h, bias_stride_m, bias_stride_n,
    slopes_stride_b, slopes_stride_h,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT_P: tl.constexpr, ALIBI: tl.constexpr, BIAS: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_SINKS: tl.constexpr, KEEP_REST: tl.constexpr,
    NARROW: tl.constexpr, VARLEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WHOLE_HEAD: tl.constexpr,
    LONG_OFFSETS: tl.constexpr,
):  # fmt: skip
    """This program attends for ROWS queries of one head.

    q, o: (B, H, Sq, D). k, v: (B, Hkv, Sk, D). Unit stride in D. lse: (B, H, Sq), contiguous, and normalizer
    (B, H, Sq, 2): maximum and sum. bias: (B, H, Sq, Sk), any strides. slopes: (B, H). With VARLEN
    sequence b has the rows from cu_q[b] to cu_q[b + 1], and strides of b are 0.
    """
    tiles = tl.cdiv(rows, ROWS)
    tile = tl.program_id(0) % tiles
    if HAS_RIGHT:
        tile = tiles - 1 - tile
    head_of_batch = tl.program_id(0) // tiles
    if LONG_OFFSETS:
        head_of_batch = head_of_batch.to(tl.int64)
    batch = head_of_batch // heads
    head = head_of_batch % heads
    start_q, rows = sequence(cu_q_ptr, batch, rows, lse_rows, VARLEN)
    start_k, columns = sequence(cu_k_ptr, batch, columns, all_columns, VARLEN)
    if tile * ROWS >= rows:
        return

    row = tile * ROWS + tl.arange(0, ROWS)
    if LONG_OFFSETS:
        row = row.to(tl.int64)
    d = tl.arange(0, DEPTH)
    q_base = q_ptr + batch * q_stride_b + head * q_stride_h + start_q * q_stride_m
    k_base = k_ptr + batch * k_stride_b + head // group * k_stride_h + start_k * k_stride_n
    v_base = v_ptr + batch * v_stride_b + head // group * v_stride_h + start_k * v_stride_n
    bias_base = bias_ptr
    if BIAS != "none":
        bias_base += batch * bias_stride_b + head * bias_stride_h
    slope = 0.0
    if ALIBI != "none":
        slope = tl.load(slopes_ptr + batch * slopes_stride_b + head * slopes_stride_h).to(tl.float32)
    seed = 0
    if DROPOUT_P > 0.0:
        seed = tl.load(seed_ptr)
    matrix = head_of_batch.to(tl.int64)

    q = load_rows(q_base, row, q_stride_m, rows, d, depth, True, WHOLE_HEAD)
    top = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    acc = tl.zeros([ROWS, DEPTH], dtype=tl.float32)
    place, first_key, last_key = limits(row, rows, columns, left, right, HAS_RIGHT)
    last = tl.minimum(tile * ROWS + ROWS, rows) - 1
    edges = keys_seen(tile * ROWS, last, rows, columns, left, right, HAS_LEFT, HAS_RIGHT, COLUMNS)
    for PART in tl.static_range(0 if HAS_LEFT else 1, 3):
        acc, top, total = _attend(
            acc, top, total, q, row, place, first_key, last_key, d, edges[PART], edges[PART + 1], k_base, v_base,
            k_stride_n, v_stride_n, bias_base, bias_stride_m, bias_stride_n, slope, seed, matrix, rows, columns, depth,
            SCALE, SOFTCAP, DROPOUT_P, ALIBI, BIAS, HAS_LEFT and (PART == 0 or (PART == 2 and NARROW)),
            PART == 2 or (PART == 0 and NARROW), PART != 1, COLUMNS, WHOLE_HEAD, LONG_OFFSETS,
        )  # fmt: skip

    if HAS_SINKS:
        acc, top, total = with_sink(acc, top, total, tl.load(sinks_ptr + head).to(tl.float32) * LOG2E)
    first_row = first_row_of(head_of_batch, head, start_q, lse_rows, VARLEN)
    target = batch * o_stride_b + head * o_stride_h + start_q * o_stride_m + row[:, None] * o_stride_m + d[None, :]
    exists = (row[:, None] < rows) & (d[None, :] < depth)
    _store(
        acc, top, total, o_ptr, lse_ptr, normalizer_ptr, rest_ptr, target, exists, first_row + row, row < rows,
        KEEP_REST,
    )  # fmt: skip


def _plan(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, alibi_slopes: Tensor | None, sinks: Tensor | None,
    seed: Tensor | None, scale: float, left: int, right: int, softcap: float, dropout_p: float,
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, max_seqlen_q: int, max_seqlen_k: int,
    keep_rest: bool,
) -> Callable[..., tuple[Tensor, ...]]:  # fmt: skip
    """The launcher of the operator: `(o, lse, normalizer, rest)`."""
    g = Geometry(
        q, k, v, bias, alibi_slopes, sinks, seed, scale, left, right, softcap, dropout_p,
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    )  # fmt: skip
    if g.is_empty:
        return lambda *_: (g.new_o().zero_(), g.new_lse(NOTHING), *(t.zero_() for t in g.new_saved(keep_rest)))
    hopper = gluon_launch.chosen(g, q, k, v, sinks, g.right)
    if hopper is not None:
        return gluon_launch.plan(g, q, k, v, scale, keep_rest, hopper)
    options = g.options(FORWARD)
    launch = bind(
        _forward_kernel, (cdiv(g.rows, options["ROWS"]) * g.batch * g.heads,),
        *g.sizes,
        *g.q_strides, *g.k_strides, *g.v_strides, *g.o_strides, *g.bias_strides, *g.slopes_strides,
        HAS_SINKS=sinks is not None, KEEP_REST=keep_rest, VARLEN=g.varlen, **options,
    )  # fmt: skip

    results, read_sinks = g.results(keep_rest, NOTHING), reader(sinks, g.dense)
    read_q, read_k, read_v = (reader(x, g.unit_depth) for x in (q, k, v))
    read_cu_q, read_cu_k = reader(cu_seqlens_q, g.dense), reader(cu_seqlens_k, g.dense)

    def run(
        q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, alibi_slopes: Tensor | None, sinks: Tensor | None,
        seed: Tensor | None, *rest: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        o, lse, normalizer, kept = results()
        bias = None if bias is None else g.bias_data(bias)
        launch(read_q(q), read_k(k), read_v(v), bias, alibi_slopes, read_sinks(sinks), seed,
               read_cu_q(rest[5]), read_cu_k(rest[6]), o, lse, normalizer, kept)  # fmt: skip
        return o, lse, normalizer, kept

    return run


flash_attention = Planned(_plan, gluon_launch.is_asked_for)
