# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""The end of a greedy step in one kernel: the largest logit of each row, and what the next step begins with."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def begin_next(token, b, tokens_ptr, history_ptr, lengths_ptr, ends_ptr, SLOTS: tl.constexpr, ENDS: tl.constexpr):
    """Give row b its token, -1 for none, and end the row where that is an end token or none."""
    ends = tl.load(ends_ptr + tl.arange(0, ENDS))
    has_ended = (tl.max((ends == token).to(tl.int32), 0) > 0) | (token < 0)
    position = tl.load(lengths_ptr + b)
    tl.store(history_ptr + b.to(tl.int64) * SLOTS + position, token, position >= 0)
    tl.store(lengths_ptr + b, tl.where((position >= 0) & (has_ended == 0), position + 1, -1))
    tl.store(tokens_ptr + b, tl.maximum(token, 0))


@triton.jit
def greedy_kernel(
    logits_ptr, tokens_ptr, history_ptr, lengths_ptr, ends_ptr, top_ptr, index_ptr, counter_ptr,
    V: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr, ALL_TILES: tl.constexpr, SLOTS: tl.constexpr,
    ENDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One tile of one row of logits (B, V); the last program of a row compares the tiles. See `launch.greedy`."""
    b, tile = tl.program_id(0), tl.program_id(1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    n = tile * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + b.to(tl.int64) * V + n, n < V, float("-inf")).to(tl.float32)
    top = tl.max(x, 0)
    index = tl.min(tl.where(x == top, n, V), 0)
    index = tl.where(tl.max((x != x).to(tl.int32), 0) > 0, -1, index)  # the maximum passes over NaN
    tl.store(top_ptr + b * TILES + tile, top)
    tl.store(index_ptr + b * TILES + tile, index)
    tl.debug_barrier()
    is_last = tl.atomic_add(counter_ptr + b, 1, sem="acq_rel") == TILES - 1
    tl.debug_barrier()
    if is_last:
        tl.store(counter_ptr + b, 0)
        each = tl.arange(0, ALL_TILES)
        tops = tl.load(top_ptr + b * TILES + each, each < TILES, float("-inf"), cache_modifier=".cg")
        indices = tl.load(index_ptr + b * TILES + each, each < TILES, V, cache_modifier=".cg")
        best = tl.max(tops, 0)
        token = tl.min(tl.where(tops == best, indices, V), 0)
        is_number = (tl.min(indices, 0) >= 0) & (best > float("-inf")) & (best < float("inf"))
        token = tl.where(is_number, token, -1).to(tl.int64)
        begin_next(token, b, tokens_ptr, history_ptr, lengths_ptr, ends_ptr, SLOTS, ENDS)
