"""The gradients of queries and of a bias in Triton: one program for each tile of queries; see `backward.py`."""

import triton
import triton.language as tl

from .tiles import first_row_of, gradient_of_scores, keys_seen, limits, load_rows, sequence


@triton.jit
def _add_keys(
    dq, q, do, base, delta, row, place, first_key, last_key, d, start, end, k_base, v_base, k_stride, v_stride,
    bias_base, bias_stride_m, bias_stride_n, slope, seed, matrix, rows, columns, depth,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT_P: tl.constexpr, ALIBI: tl.constexpr, BIAS: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, MASKED: tl.constexpr,
    COLUMNS: tl.constexpr, WHOLE_HEAD: tl.constexpr, LONG_OFFSETS: tl.constexpr,
):  # fmt: skip
    """Add to dq what comes from the keys from `start` to `end`."""
    for first in tl.range(start, end, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        if LONG_OFFSETS:
            column = column.to(tl.int64)
        k = load_rows(k_base, column, k_stride, columns, d, depth, MASKED, WHOLE_HEAD)
        v = load_rows(v_base, column, v_stride, columns, d, depth, MASKED, WHOLE_HEAD)
        _, ds, slope_of_cap = gradient_of_scores(
            tl.dot(q, k.T, input_precision="ieee"), tl.dot(do, v.T, input_precision="ieee"),
            base[:, None], delta[:, None], (place - first)[:, None], tl.arange(0, COLUMNS)[None, :],
            (first_key - first)[:, None], (last_key - first)[:, None], row[:, None], column[None, :],
            rows, columns, slope, bias_base, bias_stride_m, bias_stride_n, seed, matrix,
            SCALE, SOFTCAP, DROPOUT_P, ALIBI, BIAS, FIRST, LAST,
        )  # fmt: skip
        dq = tl.dot((ds * slope_of_cap).to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit
def dq_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, slopes_ptr, seed_ptr, cu_q_ptr, cu_k_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr,
    heads, group, rows, columns, depth, left, right, lse_rows, all_columns,
    q_stride_b, q_stride_h, q_stride_m, k_stride_b, k_stride_h, k_stride_n, v_stride_b, v_stride_h, v_stride_n,
    do_stride_b, do_stride_h, do_stride_m, dq_stride_b, dq_stride_h, dq_stride_m,
    bias_stride_b, bias_stride_h, bias_stride_m, bias_stride_n, slopes_stride_b, slopes_stride_h,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT_P: tl.constexpr, ALIBI: tl.constexpr, BIAS: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, NARROW: tl.constexpr, VARLEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WHOLE_HEAD: tl.constexpr,
    LONG_OFFSETS: tl.constexpr,
):  # fmt: skip
    """This program computes dq of ROWS queries of one head."""
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
    do_base = do_ptr + batch * do_stride_b + head * do_stride_h + start_q * do_stride_m
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
    first_row = first_row_of(head_of_batch, head, start_q, lse_rows, VARLEN)
    q = load_rows(q_base, row, q_stride_m, rows, d, depth, True, WHOLE_HEAD)
    do = load_rows(do_base, row, do_stride_m, rows, d, depth, True, WHOLE_HEAD)
    base = tl.load(lse_ptr + first_row + row, mask=row < rows, other=float("inf"))
    delta = tl.load(delta_ptr + first_row + row, mask=row < rows, other=0.0)
    place, first_key, last_key = limits(row, rows, columns, left, right, HAS_RIGHT)
    dq = tl.zeros([ROWS, DEPTH], dtype=tl.float32)
    last = tl.minimum(tile * ROWS + ROWS, rows) - 1
    edges = keys_seen(tile * ROWS, last, rows, columns, left, right, HAS_LEFT, HAS_RIGHT, COLUMNS)
    for PART in tl.static_range(0 if HAS_LEFT else 1, 3):
        dq = _add_keys(
            dq, q, do, base, delta, row, place, first_key, last_key, d, edges[PART], edges[PART + 1], k_base, v_base,
            k_stride_n, v_stride_n, bias_base, bias_stride_m, bias_stride_n, slope, seed, matrix, rows, columns, depth,
            SCALE, SOFTCAP, DROPOUT_P, ALIBI, BIAS, HAS_LEFT and (PART == 0 or (PART == 2 and NARROW)),
            PART == 2 or (PART == 0 and NARROW), PART != 1, COLUMNS, WHOLE_HEAD, LONG_OFFSETS,
        )  # fmt: skip
    dq_base = dq_ptr + batch * dq_stride_b + head * dq_stride_h + start_q * dq_stride_m
    exists = (row[:, None] < rows) & (d[None, :] < depth)
    tl.store(dq_base + row[:, None] * dq_stride_m + d[None, :], (dq * SCALE).to(dq_ptr.dtype.element_ty), mask=exists)


@triton.jit
def dbias_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, seed_ptr, do_ptr, lse_ptr, delta_ptr, dbias_ptr,
    batches, heads, group, rows, columns, depth, left, right, bias_heads, batches_each, heads_each,
    q_stride_b, q_stride_h, q_stride_m, k_stride_b, k_stride_h, k_stride_n, v_stride_b, v_stride_h, v_stride_n,
    do_stride_b, do_stride_h, do_stride_m, bias_stride_b, bias_stride_h, bias_stride_m, bias_stride_n,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT_P: tl.constexpr, ALIBI: tl.constexpr, BIAS: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, NARROW: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WHOLE_HEAD: tl.constexpr,
    LONG_OFFSETS: tl.constexpr,
):  # fmt: skip
    """This program computes a tile of dbias, summed over the batches and heads that the bias is broadcast over.

    dbias: (b, h, Sq, Sk) float32, contiguous, where b is 1 or B and h is 1 or H.
    """
    row_tiles = tl.cdiv(rows, ROWS)
    column_tiles = tl.cdiv(columns, COLUMNS)
    tile = tl.program_id(0) % (row_tiles * column_tiles)
    matrix_of_bias = tl.program_id(0) // (row_tiles * column_tiles)
    row = tile // column_tiles * ROWS + tl.arange(0, ROWS)
    column = tile % column_tiles * COLUMNS + tl.arange(0, COLUMNS)
    if LONG_OFFSETS:
        matrix_of_bias = matrix_of_bias.to(tl.int64)
        row = row.to(tl.int64)
        column = column.to(tl.int64)
    d = tl.arange(0, DEPTH)
    seed = 0
    if DROPOUT_P > 0.0:
        seed = tl.load(seed_ptr)
    place, first_key, last_key = limits(row, rows, columns, left, right, HAS_RIGHT)
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for member in range(batches_each * heads_each):
        batch = matrix_of_bias // bias_heads + member // heads_each
        head = matrix_of_bias % bias_heads + member % heads_each
        q = load_rows(q_ptr + batch * q_stride_b + head * q_stride_h, row, q_stride_m, rows, d, depth, True, WHOLE_HEAD)
        do_base = do_ptr + batch * do_stride_b + head * do_stride_h
        do = load_rows(do_base, row, do_stride_m, rows, d, depth, True, WHOLE_HEAD)
        k_base = k_ptr + batch * k_stride_b + head // group * k_stride_h
        k = load_rows(k_base, column, k_stride_n, columns, d, depth, True, WHOLE_HEAD)
        v_base = v_ptr + batch * v_stride_b + head // group * v_stride_h
        v = load_rows(v_base, column, v_stride_n, columns, d, depth, True, WHOLE_HEAD)
        matrix = (batch * heads + head).to(tl.int64)
        base = tl.load(lse_ptr + matrix * rows + row, mask=row < rows, other=float("inf"))
        delta = tl.load(delta_ptr + matrix * rows + row, mask=row < rows, other=0.0)
        _, ds, _ = gradient_of_scores(
            tl.dot(q, k.T, input_precision="ieee"), tl.dot(do, v.T, input_precision="ieee"),
            base[:, None], delta[:, None], place[:, None], column[None, :], first_key[:, None], last_key[:, None],
            row[:, None], column[None, :], rows, columns, 0.0,
            bias_ptr + batch * bias_stride_b + head * bias_stride_h, bias_stride_m, bias_stride_n, seed, matrix,
            SCALE, SOFTCAP, DROPOUT_P, ALIBI, BIAS, HAS_LEFT, True,
        )  # fmt: skip
        total += ds
    exists = (row[:, None] < rows) & (column[None, :] < columns)
    tl.store(dbias_ptr + (matrix_of_bias * rows + row[:, None]) * columns + column[None, :], total, mask=exists)
