# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""What a step does with whole rows: the embedding of a token, and a norm with the residual added after it."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def add_norm_kernel(
    y_ptr, weight_ptr, residual_ptr, o_ptr, y_stride, o_stride,
    N: tl.constexpr, BLOCK: tl.constexpr, OFFSET: tl.constexpr, EPS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Row b of o is residual + RMSNorm(y). y and o may be the same memory: a program reads its row before it writes."""
    b = tl.program_id(0)
    n = tl.arange(0, BLOCK)
    seen = n < N
    weight = tl.load(weight_ptr + n, seen, 0.0).to(tl.float32) + OFFSET
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    y = tl.load(y_ptr + b * y_stride + n, seen, 0.0).to(tl.float32)
    o = y * tl.rsqrt(tl.sum(y * y) / N + EPS) * weight
    if HAS_RESIDUAL:
        o += tl.load(residual_ptr + b * N + n, seen, 0.0).to(tl.float32)
    tl.store(o_ptr + b * o_stride + n, o.to(o_ptr.dtype.element_ty), seen)


@triton.jit
def embed_kernel(
    tokens_ptr, table_ptr, o_ptr, N: tl.constexpr, BLOCK: tl.constexpr, SCALE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK elements of row b of o are those of row tokens[b] of the table, times SCALE where it is not 1."""
    b = tl.program_id(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.load(tokens_ptr + b)
    x = tl.load(table_ptr + token * N + n, n < N, 0.0)
    if SCALE != 1.0:
        x = (x.to(tl.float32) * SCALE).to(x.dtype)
    tl.store(o_ptr + b * N + n, x, n < N)
