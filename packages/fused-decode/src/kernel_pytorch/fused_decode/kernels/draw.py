# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""The end of a sampling step in one kernel: top-k, top-p and the draw, among the largest logits of each row."""

from __future__ import annotations

import triton
import triton.language as tl

from .greedy import begin_next


@triton.jit
def exponential(seed, row, step, token, STEPS: tl.constexpr):
    """Exponential noise above 0 of a token: the words of `core/philox.py`, float32."""
    counter = (row * STEPS + step % STEPS).to(tl.uint32)
    zero = tl.zeros_like(token).to(tl.uint32)
    a, b, c, d = tl.philox(seed, (token // 4).to(tl.uint32), zero + counter, zero, zero)
    word = token % 4
    word = tl.where(word == 0, a, tl.where(word == 1, b, tl.where(word == 2, c, d)))
    u = tl.minimum((word.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.9999999403953552)
    small = u * (1.0 + u * (0.5 + u * 0.3333333333333333))  # where 1 - u rounds away what u is
    return tl.where(u < 1e-3, small, -tl.log(1.0 - u))


@triton.jit
def draw_kernel(
    values_ptr, indices_ptr, seed_ptr, step_ptr, temperature_ptr, top_k_ptr, top_p_ptr,
    tokens_ptr, history_ptr, lengths_ptr, ends_ptr,
    K: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr, ENDS: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """One row: values (B, K), the largest logits in falling order, of tokens indices (B, K). See `launch.draw`."""
    b = tl.program_id(0)
    n = tl.arange(0, BLOCK)
    x = tl.load(values_ptr + b * K + n, n < K, float("-inf")).to(tl.float32)
    best = tl.max(x, 0)
    is_number = (tl.max((x != x).to(tl.int32), 0) == 0) & (best > float("-inf")) & (best < float("inf"))
    scores = tl.where(is_number, x, 0.0) / tl.load(temperature_ptr)
    token = tl.load(indices_ptr + b * K + n, n < K, 0).to(tl.int32)
    last = tl.minimum(tl.load(top_k_ptr), K) - 1
    lowest = tl.max(tl.where(n == last, scores, float("-inf")), 0)
    kept = (scores >= lowest) & (n < K)
    p = tl.where(kept, tl.exp(scores - tl.max(scores, 0)), 0.0)
    p = p / tl.sum(p, 0)
    before = tl.cumsum(p, 0) - p  # the probability of all that are larger
    top_p = tl.load(top_p_ptr)
    top_p = tl.where(top_p < 1.0, top_p, 2.0)  # sums of rounded probabilities pass 1
    kept = kept & ((before < top_p) | (n == 0))
    noise = exponential(tl.load(seed_ptr), b, tl.load(step_ptr), token, STEPS)
    race = tl.where(kept, scores - tl.log(noise), float("-inf"))
    found = tl.min(tl.where(race == tl.max(race, 0), token, 2147483647), 0)
    found = tl.where(is_number, found, -1).to(tl.int64)
    begin_next(found, b, tokens_ptr, history_ptr, lengths_ptr, ends_ptr, SLOTS, ENDS)
