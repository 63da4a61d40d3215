"""The gradients of keys and values in Triton: one program for each tile of keys; see `backward.py`."""

import triton
import triton.language as tl

from .tiles import first_row_of, gradient_of_scores, load_rows, queries_seeing, sequence


@triton.jit
def _add_queries(
    dk, dv, k, v, column, d, start, end, q_base, do_base, q_stride, do_stride, lse_base, delta_base,
    bias_base, bias_stride_m, bias_stride_n, slope, seed, matrix, rows, columns, depth, left, right,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT_P: tl.constexpr, ALIBI: tl.constexpr, BIAS: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, MASKED: tl.constexpr,
    ROWS: tl.constexpr, WHOLE_HEAD: tl.constexpr, LONG_OFFSETS: tl.constexpr,
):  # fmt: skip
    """Add to dk and dv what comes from the queries from `start` to `end`."""
    for first in tl.range(start, end, ROWS):
        row = first + tl.arange(0, ROWS)
        if LONG_OFFSETS:
            row = row.to(tl.int64)
        q = load_rows(q_base, row, q_stride, rows, d, depth, MASKED, WHOLE_HEAD)
        do = load_rows(do_base, row, do_stride, rows, d, depth, MASKED, WHOLE_HEAD)
        # A query that does not exist has weights of zero: exp(s - inf).
        exists = (row < rows) if MASKED else None
        base = tl.load(lse_base + row, mask=exists, other=float("inf") if MASKED else None)
        delta = tl.load(delta_base + row, mask=exists, other=0.0 if MASKED else None)
        place = tl.arange(0, ROWS)[None, :]
        key = column[:, None] - (first + columns - rows)
        weights, ds, slope_of_cap = gradient_of_scores(
            tl.dot(k, q.T, input_precision="ieee"), tl.dot(v, do.T, input_precision="ieee"),
            base[None, :], delta[None, :], place, key, place - left, place + right, row[None, :], column[:, None],
            rows, columns, slope, bias_base, bias_stride_m, bias_stride_n, seed, matrix,
            SCALE, SOFTCAP, DROPOUT_P, ALIBI, BIAS, FIRST, LAST,
        )  # fmt: skip
        dv = tl.dot(weights.to(do.dtype), do, dv, input_precision="ieee")
        dk = tl.dot((ds * slope_of_cap).to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def dkdv_kernel(
    q_ptr, k_ptr, v_ptr, bias_ptr, slopes_ptr, seed_ptr, cu_q_ptr, cu_k_ptr, do_ptr, lse_ptr, delta_ptr,
    dk_ptr, dv_ptr,
    heads, group, rows, columns, depth, left, right, lse_rows, all_columns,
    q_stride_b, q_stride_h, q_stride_m, k_stride_b, k_stride_h, k_stride_n, v_stride_b, v_stride_h, v_stride_n,
    do_stride_b, do_stride_h, do_stride_m, dk_stride_b, dk_stride_h, dk_stride_n,
    bias_stride_b, bias_stride_h, bias_stride_m, bias_stride_n, slopes_stride_b, slopes_stride_h,
    SCALE: tl.constexpr, SOFTCAP: tl.constexpr, DROPOUT_P: tl.constexpr, ALIBI: tl.constexpr, BIAS: tl.constexpr,
    HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, NARROW: tl.constexpr, VARLEN: tl.constexpr,
    NEED_DK: tl.constexpr, NEED_DV: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, WHOLE_HEAD: tl.constexpr,
    LONG_OFFSETS: tl.constexpr,
):  # fmt: skip
    """This program computes dk and dv of COLUMNS keys of one key head, from all query heads that read it."""
    tiles = tl.cdiv(columns, COLUMNS)
    tile = tl.program_id(0) % tiles
    kv_heads = heads // group
    kv_head_of_batch = tl.program_id(0) // tiles
    if LONG_OFFSETS:
        kv_head_of_batch = kv_head_of_batch.to(tl.int64)
    batch = kv_head_of_batch // kv_heads
    kv_head = kv_head_of_batch % kv_heads
    start_q, rows = sequence(cu_q_ptr, batch, rows, lse_rows, VARLEN)
    start_k, columns = sequence(cu_k_ptr, batch, columns, all_columns, VARLEN)
    if tile * COLUMNS >= columns:
        return

    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    if LONG_OFFSETS:
        column = column.to(tl.int64)
    d = tl.arange(0, DEPTH)
    k_base = k_ptr + batch * k_stride_b + kv_head * k_stride_h + start_k * k_stride_n
    v_base = v_ptr + batch * v_stride_b + kv_head * v_stride_h + start_k * v_stride_n
    k = load_rows(k_base, column, k_stride_n, columns, d, depth, True, WHOLE_HEAD)
    v = load_rows(v_base, column, v_stride_n, columns, d, depth, True, WHOLE_HEAD)
    dk = tl.zeros([COLUMNS, DEPTH], dtype=tl.float32)
    dv = tl.zeros([COLUMNS, DEPTH], dtype=tl.float32)
    seed = 0
    if DROPOUT_P > 0.0:
        seed = tl.load(seed_ptr)
    edges = queries_seeing(
        tile * COLUMNS, tile * COLUMNS + COLUMNS - 1, rows, columns, left, right, HAS_LEFT, HAS_RIGHT, ROWS
    )
    for member in range(group):
        head = kv_head * group + member
        head_of_batch = batch * heads + head
        q_base = q_ptr + batch * q_stride_b + head * q_stride_h + start_q * q_stride_m
        do_base = do_ptr + batch * do_stride_b + head * do_stride_h + start_q * do_stride_m
        first_row = first_row_of(head_of_batch, head, start_q, lse_rows, VARLEN)
        bias_base = bias_ptr
        if BIAS != "none":
            bias_base += batch * bias_stride_b + head * bias_stride_h
        slope = 0.0
        if ALIBI != "none":
            slope = tl.load(slopes_ptr + batch * slopes_stride_b + head * slopes_stride_h).to(tl.float32)
        matrix = head_of_batch.to(tl.int64)
        for PART in tl.static_range(0 if HAS_RIGHT else 1, 3):
            dk, dv = _add_queries(
                dk, dv, k, v, column, d, edges[PART], edges[PART + 1], q_base, do_base, q_stride_m, do_stride_m,
                lse_ptr + first_row, delta_ptr + first_row, bias_base, bias_stride_m, bias_stride_n, slope, seed,
                matrix, rows, columns, depth, left, right, SCALE, SOFTCAP, DROPOUT_P, ALIBI, BIAS,
                HAS_LEFT and (PART == 2 or (PART == 0 and NARROW)), HAS_RIGHT and (PART == 0 or (PART == 2 and NARROW)),
                PART != 1, ROWS, WHOLE_HEAD, LONG_OFFSETS,
            )  # fmt: skip

    target = batch * dk_stride_b + kv_head * dk_stride_h + start_k * dk_stride_n
    target += column[:, None] * dk_stride_n + d[None, :]
    exists = (column[:, None] < columns) & (d[None, :] < depth)
    if NEED_DK:
        tl.store(dk_ptr + target, (dk * SCALE).to(dk_ptr.dtype.element_ty), mask=exists)
    if NEED_DV:
        tl.store(dv_ptr + target, dv.to(dv_ptr.dtype.element_ty), mask=exists)
