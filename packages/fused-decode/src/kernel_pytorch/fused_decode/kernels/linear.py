# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Products of 1 to 16 rows with a weight, with the norm ahead of it and what follows it: bound by reading the weight.

A weight is read once, so a kernel is as fast as its bytes in flight. `vector_kernel` multiplies 1 or 2 rows on CUDA
cores. `rows_kernel` multiplies up to 16 rows on tensor cores, with the weight as the M side, so that rows waste no part
of a tile; it splits K where N gives too few tiles, and the last program of a tile adds the shares in their order.

With programmatic dependent launch (PDL) a program starts while the kernel ahead still runs. It loads its first tile of
the weight, which no kernel of a step writes, and then waits, once, before it reads anything else.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def tanh(x):
    """Hyperbolic tangent of float32, without overflow."""
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """The gate of a gated product, in float32."""
    if ACTIVATION == "silu":
        return x * tl.sigmoid(x)
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        return 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


@triton.jit
def statistics(x_ptr, row, exists, K: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, NORM: tl.constexpr,
               EPS: tl.constexpr):  # fmt: skip
    """Mean and reciprocal deviation of whole rows; the mean is 0 for "rms"."""
    column = tl.arange(0, BLOCK)
    mean = tl.zeros([ROWS], tl.float32)
    if NORM == "layer":
        for k in range(0, K, BLOCK):
            seen = exists[:, None] & (k + column < K)[None, :]
            mean += tl.sum(tl.load(x_ptr + row[:, None] * K + k + column[None, :], seen, 0.0).to(tl.float32), 1)
        mean = mean / K
    square = tl.zeros([ROWS], tl.float32)
    for k in range(0, K, BLOCK):
        seen = exists[:, None] & (k + column < K)[None, :]
        x = tl.load(x_ptr + row[:, None] * K + k + column[None, :], seen, 0.0).to(tl.float32)
        x = tl.where(seen, x - mean[:, None], 0.0)
        square += tl.sum(x * x, 1)
    return mean, tl.rsqrt(square / K + EPS)


@triton.jit
def finish(
    total, up, y_ptr, bias_ptr, residual_ptr, to, n, exists, N,
    GATED: tl.constexpr, SOFTCAP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Write a tile of y from its sums: bias, gate, residual and soft cap. `to`: its places; `n`: its columns."""
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, n < N, 0.0).to(tl.float32)
        if GATED != "none":
            up += tl.load(bias_ptr + N + n, n < N, 0.0).to(tl.float32)
    if GATED != "none":
        total = activate(total, GATED) * up
    if HAS_RESIDUAL:
        total += tl.load(residual_ptr + to, exists, 0.0).to(tl.float32)
    if SOFTCAP > 0.0:
        total = SOFTCAP * tanh(total / SOFTCAP)
    tl.store(y_ptr + to, total.to(y_ptr.dtype.element_ty), exists)


@triton.jit
def neighbour_sums(x, EACH: tl.constexpr):
    """Sums of EACH neighbours along the last dimension. A thread has loaded them together, so it keeps one number."""
    return tl.sum(tl.reshape(x, [x.shape[0], x.shape[1], x.shape[2] // EACH, EACH]), 3)


@triton.jit
def vector_kernel(
    x_ptr, w_ptr, y_ptr, norm_weight_ptr, norm_bias_ptr, bias_ptr, residual_ptr, M, N,
    K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr,
    OFFSET: tl.constexpr, EPS: tl.constexpr, GATED: tl.constexpr, SOFTCAP: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_NORM_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, LONG_OFFSETS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Up to ROWS rows: x (M, K), w (N, K), or (2 N, K) when gated: the gates' rows first; y (M, N).

    This program writes y[:, COLUMNS]. Tiles are (rows, columns, K), with 1 where a tensor lacks the dimension. Sums are
    kept for EACH elements of K together: with one for each, registers would limit how many programs load at a time.
    """
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    exists = (n < N)[None, :, None]
    row = tl.arange(0, ROWS)
    row_exists = (row < M)[:, None, None]
    column = tl.arange(0, BLOCK)[None, None, :]
    start = n.to(tl.int64) if LONG_OFFSETS else n
    at = start[None, :, None] * K + column
    x_at = row[:, None, None] * K + column
    whole: tl.constexpr = K % BLOCK == 0
    EACH: tl.constexpr = min(BLOCK, 128 // w_ptr.dtype.element_ty.primitive_bitwidth)
    seen = exists if whole else exists & (column < K)
    w = tl.load(w_ptr + at, seen, 0.0, eviction_policy="evict_first")
    up_ptr = w_ptr
    if GATED != "none":
        up_ptr = w_ptr + (N.to(tl.int64) if LONG_OFFSETS else N) * K
        u = tl.load(up_ptr + at, seen, 0.0, eviction_policy="evict_first")
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    if NORM == "layer":
        mean, rstd = statistics(x_ptr, row, row < M, K, BLOCK, ROWS, NORM, EPS)
    total = tl.zeros([ROWS, COLUMNS, BLOCK // EACH], tl.float32)
    up = tl.zeros([ROWS, COLUMNS, BLOCK // EACH], tl.float32)
    square = tl.zeros([ROWS, 1, BLOCK // EACH], tl.float32)
    for k in tl.static_range(0, K, BLOCK):
        in_row = k + column < K
        x = tl.load(x_ptr + x_at + k, row_exists if whole else row_exists & in_row, 0.0).to(tl.float32)
        if NORM != "none":
            scale = tl.load(norm_weight_ptr + k + column, in_row, 0.0).to(tl.float32) + OFFSET
            if NORM == "layer":
                x = (x - mean[:, None, None]) * rstd[:, None, None] * scale
                if HAS_NORM_BIAS:
                    x += tl.load(norm_bias_ptr + k + column, in_row, 0.0).to(tl.float32)
                x = tl.where(in_row, x, 0.0)
            else:  # the sum is scaled after the product: one pass over x
                square += neighbour_sums(x * x, EACH)
                x *= scale
        if k > 0:
            seen = exists if whole else exists & in_row
            w = tl.load(w_ptr + at + k, seen, 0.0, eviction_policy="evict_first")
            if GATED != "none":
                u = tl.load(up_ptr + at + k, seen, 0.0, eviction_policy="evict_first")
        total += neighbour_sums(w.to(tl.float32) * x, EACH)
        if GATED != "none":
            up += neighbour_sums(u.to(tl.float32) * x, EACH)
    if GATED != "none":
        y, up_sum = tl.split(tl.sum(tl.join(total, up), 2))
    else:
        y = tl.sum(total, 2)
        up_sum = y
    if NORM == "rms":
        r = tl.rsqrt(tl.sum(square, 2) / K + EPS)
        y *= r
        up_sum *= r
    finish(y, up_sum, y_ptr, bias_ptr, residual_ptr, row[:, None] * N + n[None, :], n[None, :],
           (row < M)[:, None] & (n < N)[None, :], N, GATED, SOFTCAP, HAS_BIAS, HAS_RESIDUAL)  # fmt: skip


@triton.jit
def row_tile(
    x_ptr, norm_weight_ptr, norm_bias_ptr, k, row, exists, mean, rstd,
    K: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, OFFSET: tl.constexpr, HAS_NORM_BIAS: tl.constexpr,
    SCALED_AFTER: tl.constexpr, END: tl.constexpr,
):  # fmt: skip
    """A tile of the rows `(BLOCK, ROWS)`: normalised, or with SCALED_AFTER times the norm's weight; and its squares."""
    column = k + tl.arange(0, BLOCK)
    in_row = (column < K)[:, None]
    seen = exists[None, :] & in_row if END else exists[None, :]
    x = tl.load(x_ptr + row[None, :] * K + column[:, None], seen, 0.0)
    square = x
    if NORM != "none":
        scale = (tl.load(norm_weight_ptr + column, column < K, 0.0).to(tl.float32) + OFFSET)[:, None]
        f = x.to(tl.float32)
        square = f * f
        if SCALED_AFTER:
            f = f * scale
        else:
            f = (f - mean[None, :]) * rstd[None, :] * scale
            if HAS_NORM_BIAS:
                f += tl.load(norm_bias_ptr + column, column < K, 0.0).to(tl.float32)[:, None]
            if END:
                f = tl.where(in_row, f, 0.0)
        x = f.to(x.dtype)
    return x, square


@triton.jit
def sum_shares(
    total, up, squares, partial_ptr, square_ptr, counter_ptr, tile, split,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SPLITS: tl.constexpr, IS_GATED: tl.constexpr, HAS_SQUARES: tl.constexpr,
):  # fmt: skip
    """Store this program's share; the last program of a tile gets True and the sums of all shares, in their order."""
    row = tl.arange(0, ROWS)
    place = tl.arange(0, COLUMNS)[:, None] * ROWS + row[None, :]
    size: tl.constexpr = (2 if IS_GATED else 1) * COLUMNS * ROWS
    base = partial_ptr + (tile * SPLITS + split) * size
    tl.store(base + place, total)
    if IS_GATED:
        tl.store(base + COLUMNS * ROWS + place, up)
    if HAS_SQUARES:
        tl.store(square_ptr + (tile * SPLITS + split) * ROWS + row, squares)
    tl.debug_barrier()
    is_last = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") == SPLITS - 1
    tl.debug_barrier()
    if is_last:
        tl.store(counter_ptr + tile, 0)
        total = tl.zeros([COLUMNS, ROWS], tl.float32)
        up = tl.zeros([COLUMNS, ROWS], tl.float32)
        squares = tl.zeros([ROWS], tl.float32)
        for i in tl.static_range(SPLITS):
            base = partial_ptr + (tile * SPLITS + i) * size
            total += tl.load(base + place, cache_modifier=".cg")
            if IS_GATED:
                up += tl.load(base + COLUMNS * ROWS + place, cache_modifier=".cg")
            if HAS_SQUARES:
                squares += tl.load(square_ptr + (tile * SPLITS + i) * ROWS + row, cache_modifier=".cg")
    return is_last, total, up, squares


@triton.jit
def rows_kernel(
    x_ptr, w_ptr, y_ptr, norm_weight_ptr, norm_bias_ptr, bias_ptr, residual_ptr, partial_ptr, square_ptr, counter_ptr,
    M, N,
    K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr,
    NORM: tl.constexpr, OFFSET: tl.constexpr, EPS: tl.constexpr, SCALED_AFTER: tl.constexpr, GATED: tl.constexpr,
    SOFTCAP: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_NORM_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    LONG_OFFSETS: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Up to ROWS rows: x (M, K), w (N, K) or (2 N, K). This program sums a share of K for COLUMNS columns of y (M, N).

    With EARLY the first tile of the weight is loaded before the wait; without, all loads are pipelined after it.
    """
    tile, split = tl.program_id(0), tl.program_id(1)
    n = tile * COLUMNS + tl.arange(0, COLUMNS)
    exists = n < N
    row = tl.arange(0, ROWS)
    row_exists = row < M
    share: tl.constexpr = (K + SPLITS * BLOCK - 1) // (SPLITS * BLOCK) * BLOCK
    END: tl.constexpr = K % (SPLITS * BLOCK) != 0
    first = split * share
    start = n.to(tl.int64) if LONG_OFFSETS else n
    column = tl.arange(0, BLOCK)
    at = start[:, None] * K + (first + column)[None, :]
    up_ptr = w_ptr
    if GATED != "none":
        up_ptr = w_ptr + (N.to(tl.int64) if LONG_OFFSETS else N) * K
    if EARLY:
        seen = exists[:, None] & (first + column < K)[None, :] if END else exists[:, None]
        w = tl.load(w_ptr + at, seen, 0.0)
        if GATED != "none":
            u = tl.load(up_ptr + at, seen, 0.0)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    mean = tl.zeros([ROWS], tl.float32)
    rstd = mean
    if NORM != "none" and not SCALED_AFTER:
        mean, rstd = statistics(x_ptr, row, row_exists, K, BLOCK, ROWS, NORM, EPS)
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    up = tl.zeros([COLUMNS, ROWS], tl.float32)
    squares = tl.zeros([ROWS], tl.float32)
    if EARLY:
        x, square = row_tile(x_ptr, norm_weight_ptr, norm_bias_ptr, first, row, row_exists, mean, rstd,
                             K, BLOCK, NORM, OFFSET, HAS_NORM_BIAS, SCALED_AFTER, END)  # fmt: skip
        if NORM != "none" and SCALED_AFTER:
            squares += tl.sum(square, 0)
        total = tl.dot(w, x, total, input_precision="ieee")
        if GATED != "none":
            up = tl.dot(u, x, up, input_precision="ieee")
    for k in range(BLOCK if EARLY else 0, share, BLOCK):
        x, square = row_tile(x_ptr, norm_weight_ptr, norm_bias_ptr, first + k, row, row_exists, mean, rstd,
                             K, BLOCK, NORM, OFFSET, HAS_NORM_BIAS, SCALED_AFTER, END)  # fmt: skip
        if NORM != "none" and SCALED_AFTER:
            squares += tl.sum(square, 0)
        seen = exists[:, None] & (first + k + column < K)[None, :] if END else exists[:, None]
        total = tl.dot(tl.load(w_ptr + at + k, seen, 0.0), x, total, input_precision="ieee")
        if GATED != "none":
            up = tl.dot(tl.load(up_ptr + at + k, seen, 0.0), x, up, input_precision="ieee")
    is_last = True
    if SPLITS > 1:
        is_last, total, up, squares = sum_shares(
            total, up, squares, partial_ptr, square_ptr, counter_ptr, tile, split,
            ROWS, COLUMNS, SPLITS, GATED != "none", NORM != "none" and SCALED_AFTER,
        )  # fmt: skip
    if is_last:
        if NORM != "none" and SCALED_AFTER:
            r = tl.rsqrt(squares / K + EPS)[None, :]
            total *= r
            up *= r
        finish(total, up, y_ptr, bias_ptr, residual_ptr, row[None, :] * N + n[:, None], n[:, None],
               exists[:, None] & row_exists[None, :], N, GATED, SOFTCAP, HAS_BIAS, HAS_RESIDUAL)  # fmt: skip
