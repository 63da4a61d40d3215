"""The gradients of head norms and rotation in Triton: of q, k and shares of their weights', and a sum of the shares.

The incoming gradient is rotated back, which is exact mathematics of the forward; what was normalised is computed again
of the head, which has to be read anyway, and its rstd.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_pytorch.qkv_fusion._core.device import program_count
from kernel_pytorch.qkv_fusion._core.direct_calls import check_count, check_operands, check_shapes
from kernel_pytorch.qkv_fusion._core.launch import bind
from kernel_pytorch.qkv_fusion._core.plans import Planned
from kernel_pytorch.qkv_fusion._core.sizes import allocator, cdiv, exceeds_int32, reader, unmade
from kernel_pytorch.qkv_fusion.kernels.heads import (
    as_heads,
    as_rows,
    load_block,
    load_pairs,
    locate,
    store_block,
    store_pairs,
    strides,
    tiling,
    turn,
)
from kernel_pytorch.qkv_fusion.norm_rope.kernels.forward import centre, check
from kernel_pytorch.qkv_fusion.rules.norm_rope import compute_dtype

PROGRAMS_PER_MULTIPROCESSOR = 8


@triton.jit
def _backward_side(
    program, programs, dy_ptr, x_ptr, weight_ptr, cos_ptr, sin_ptr, rstd_ptr, dx_ptr, shares_ptr,
    rows, heads, sequence, dy_stride_b, dy_stride_s, dy_stride_h, x_stride_b, x_stride_s, x_stride_h,
    cos_stride_b, cos_stride_s, sin_stride_b, sin_stride_s, NEED_DX: tl.constexpr, NEED_DWEIGHT: tl.constexpr,
    OFFSET: tl.constexpr, CENTRED: tl.constexpr, INTERLEAVED: tl.constexpr,
    PAIRS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, REST_BLOCK: tl.constexpr, ROWS: tl.constexpr,
    LONG_OFFSETS: tl.constexpr,
):  # fmt: skip
    wide = rstd_ptr.dtype.element_ty
    columns = 2 * PAIRS + REST
    every = tl.full([1, 1], 1, tl.int1)
    w_first, w_second = load_pairs(weight_ptr + tl.zeros([1, 1], dtype=tl.int32), every, INTERLEAVED, PAIRS, BLOCK, 1)
    w_first, w_second = OFFSET + w_first.to(wide), OFFSET + w_second.to(wide)
    w_rest = tl.zeros([1, REST_BLOCK], dtype=wide)
    if REST > 0:
        w_rest = OFFSET + load_block(weight_ptr + 2 * PAIRS, every, REST, REST_BLOCK, 0.0).to(wide)
    share_first = tl.zeros([ROWS, BLOCK], dtype=wide)
    share_second = tl.zeros([ROWS, BLOCK], dtype=wide)
    share_rest = tl.zeros([ROWS, REST_BLOCK], dtype=wide)

    for tile in range(program, tl.cdiv(rows, ROWS), programs):
        row, head, batch, place = locate(tile, heads, sequence, ROWS, LONG_OFFSETS)
        mask = row < rows
        x_row = x_ptr + batch * x_stride_b + place * x_stride_s + head * x_stride_h
        dy_row = dy_ptr + batch * dy_stride_b + place * dy_stride_s + head * dy_stride_h
        rstd = tl.load(rstd_ptr + row, mask=mask, other=0.0)
        x_first, x_second = load_pairs(x_row, mask, INTERLEAVED, PAIRS, BLOCK, ROWS)
        x_first, x_second = x_first.to(wide), x_second.to(wide)
        x_rest = tl.zeros([ROWS, REST_BLOCK], dtype=wide)
        if REST > 0:
            x_rest = load_block(x_row + 2 * PAIRS, mask, REST, REST_BLOCK, 0.0).to(wide)
        if CENTRED:
            x_first, x_second, x_rest = centre(x_first, x_second, x_rest, PAIRS, BLOCK, REST, REST_BLOCK)
        x_first, x_second, x_rest = x_first * rstd, x_second * rstd, x_rest * rstd
        g_first, g_second = load_pairs(dy_row, mask, INTERLEAVED, PAIRS, BLOCK, ROWS)
        cos = load_block(cos_ptr + batch * cos_stride_b + place * cos_stride_s, mask, PAIRS, BLOCK, 0.0).to(wide)
        sin = load_block(sin_ptr + batch * sin_stride_b + place * sin_stride_s, mask, PAIRS, BLOCK, 0.0).to(wide)
        g_first, g_second = turn(g_first.to(wide), g_second.to(wide), cos, sin, True)
        g_rest = tl.zeros([ROWS, REST_BLOCK], dtype=wide)
        if REST > 0:
            g_rest = load_block(dy_row + 2 * PAIRS, mask, REST, REST_BLOCK, 0.0).to(wide)
        if NEED_DWEIGHT:
            share_first += g_first * x_first
            share_second += g_second * x_second
            if REST > 0:
                share_rest += g_rest * x_rest
        if NEED_DX:
            g_first, g_second, g_rest = g_first * w_first, g_second * w_second, g_rest * w_rest
            mean = tl.sum(g_first * x_first + g_second * x_second, axis=1, keep_dims=True)
            if REST > 0:
                mean += tl.sum(g_rest * x_rest, axis=1, keep_dims=True)
            mean = mean / columns
            if CENTRED:
                g_first, g_second, g_rest = centre(g_first, g_second, g_rest, PAIRS, BLOCK, REST, REST_BLOCK)
            dx_row = dx_ptr + row * columns
            store_pairs(
                dx_row, rstd * (g_first - x_first * mean), rstd * (g_second - x_second * mean), mask,
                INTERLEAVED, PAIRS, BLOCK, ROWS,
            )  # fmt: skip
            if REST > 0:
                store_block(dx_row + 2 * PAIRS, rstd * (g_rest - x_rest * mean), mask, REST, REST_BLOCK)

    if NEED_DWEIGHT:
        share_row = shares_ptr + program * columns + tl.zeros([1, 1], dtype=tl.int32)
        first, second = tl.sum(share_first, axis=0)[None, :], tl.sum(share_second, axis=0)[None, :]
        store_pairs(share_row, first, second, every, INTERLEAVED, PAIRS, BLOCK, 1)
        if REST > 0:
            store_block(share_row + 2 * PAIRS, tl.sum(share_rest, axis=0)[None, :], every, REST, REST_BLOCK)


@triton.jit
def _backward_kernel(
    dq_out_ptr, dk_out_ptr, q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, q_rstd_ptr, k_rstd_ptr,
    dq_ptr, dk_ptr, q_shares_ptr, k_shares_ptr,
    q_rows, k_rows, q_heads, k_heads, sequence,
    dq_stride_b, dq_stride_s, dq_stride_h, dk_stride_b, dk_stride_s, dk_stride_h,
    q_stride_b, q_stride_s, q_stride_h, k_stride_b, k_stride_s, k_stride_h,
    cos_stride_b, cos_stride_s, sin_stride_b, sin_stride_s,
    HAS_Q: tl.constexpr, HAS_K: tl.constexpr, NEED_DQ: tl.constexpr, NEED_DK: tl.constexpr,
    NEED_DQ_WEIGHT: tl.constexpr, NEED_DK_WEIGHT: tl.constexpr, OFFSET: tl.constexpr,
    CENTRED: tl.constexpr, INTERLEAVED: tl.constexpr,
    PAIRS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, REST_BLOCK: tl.constexpr, ROWS: tl.constexpr,
    LONG_OFFSETS: tl.constexpr,
):  # fmt: skip
    """This program walks every P-th tile of ROWS heads of q, or of k where its second number is the last.

    q, k and what comes in: (B, S, H, D) with unit stride in D. Gradients: contiguous. Shares: (P, D).
    """
    program, programs = tl.program_id(0), tl.num_programs(0)
    is_k = tl.program_id(1) == tl.num_programs(1) - 1
    if HAS_K:  # noqa: SIM102  (known when it is compiled, unlike the next)
        if is_k:
            _backward_side(
                program, programs, dk_out_ptr, k_ptr, k_weight_ptr, cos_ptr, sin_ptr, k_rstd_ptr, dk_ptr, k_shares_ptr,
                k_rows, k_heads, sequence, dk_stride_b, dk_stride_s, dk_stride_h, k_stride_b, k_stride_s, k_stride_h,
                cos_stride_b, cos_stride_s, sin_stride_b, sin_stride_s, NEED_DK, NEED_DK_WEIGHT,
                OFFSET, CENTRED, INTERLEAVED, PAIRS, BLOCK, REST, REST_BLOCK, ROWS, LONG_OFFSETS,
            )  # fmt: skip
    if HAS_Q:  # noqa: SIM102
        if not HAS_K or not is_k:
            _backward_side(
                program, programs, dq_out_ptr, q_ptr, q_weight_ptr, cos_ptr, sin_ptr, q_rstd_ptr, dq_ptr, q_shares_ptr,
                q_rows, q_heads, sequence, dq_stride_b, dq_stride_s, dq_stride_h, q_stride_b, q_stride_s, q_stride_h,
                cos_stride_b, cos_stride_s, sin_stride_b, sin_stride_s, NEED_DQ, NEED_DQ_WEIGHT,
                OFFSET, CENTRED, INTERLEAVED, PAIRS, BLOCK, REST, REST_BLOCK, ROWS, LONG_OFFSETS,
            )  # fmt: skip


@triton.jit
def _add_shares_kernel(
    q_shares_ptr, k_shares_ptr, dq_weight_ptr, dk_weight_ptr, programs, columns,
    NEED_DQ_WEIGHT: tl.constexpr, NEED_DK_WEIGHT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """This program adds the shares of BLOCK columns of both weights' gradients, always in the same order."""
    if NEED_DQ_WEIGHT:
        _add_shares(q_shares_ptr, dq_weight_ptr, programs, columns, ROWS, BLOCK)
    if NEED_DK_WEIGHT:
        _add_shares(k_shares_ptr, dk_weight_ptr, programs, columns, ROWS, BLOCK)


@triton.jit
def _add_shares(shares_ptr, dweight_ptr, programs, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([ROWS, BLOCK], dtype=shares_ptr.dtype.element_ty)
    for start in range(0, programs, ROWS):
        program = start + tl.arange(0, ROWS)[:, None]
        mask = (program < programs) & (column[None, :] < columns)
        total += tl.load(shares_ptr + program * columns + column[None, :], mask=mask, other=0.0)
    dweight = tl.sum(total, axis=0).to(dweight_ptr.dtype.element_ty)
    tl.store(dweight_ptr + column, dweight, mask=column < columns)


def plan(
    centred: bool,
    dq_out: Tensor | None,
    dk_out: Tensor | None,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_rstd: Tensor,
    k_rstd: Tensor,
    eps: float,
    interleaved: bool,
    offset: float,
    *needs: bool,
) -> Callable[..., tuple[Tensor, ...]]:
    """What launches the kernels: `(dq, dk, dq_weight, dk_weight)`, contiguous, empty where not needed; as `forward`."""
    check(q, k, q_weight, k_weight, cos, sin)
    check_gradients(dq_out, dk_out, q, k, q_rstd, k_rstd, needs)
    results = [allocator(x, needed=need) for x, need in zip((q, k, q_weight, k_weight), needs, strict=True)]
    if q.numel() == 0 and k.numel() == 0:
        return lambda *arguments: tuple(make().zero_() for make in results)
    has_q, has_k = needs[0] or needs[2], needs[1] or needs[3]
    if not has_q and not has_k:
        return lambda *arguments: tuple(make() for make in results)
    flags: dict[str, Any] = {"HAS_Q": has_q, "HAS_K": has_k, "NEED_DQ": needs[0], "NEED_DK": needs[1]}
    flags |= {"NEED_DQ_WEIGHT": needs[2], "NEED_DK_WEIGHT": needs[3], "OFFSET": offset}
    flags |= {"CENTRED": centred, "INTERLEAVED": interleaved}
    programs, launch = plan_kernel(dq_out if has_q else q, dk_out if has_k else k, q, k, cos, sin, flags)
    columns, device = q.shape[-1], q.device
    add = bind(
        _add_shares_kernel, (cdiv(columns, 16),), programs, columns,
        NEED_DQ_WEIGHT=needs[2], NEED_DK_WEIGHT=needs[3], ROWS=256, BLOCK=16, num_warps=8,
    )  # fmt: skip
    wide, shares_shape = compute_dtype(q.dtype), (programs, columns)
    incoming = [reader(dy if has else x, as_heads) for dy, x, has in ((dq_out, q, has_q), (dk_out, k, has_k))]
    reads = [reader(q, as_heads), reader(k, as_heads), reader(cos, as_rows), reader(sin, as_rows)]

    def run(
        dq_out: Tensor | None, dk_out: Tensor | None, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor,
        cos: Tensor, sin: Tensor, q_rstd: Tensor, k_rstd: Tensor, *scalars: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        dq, dk, dq_weight, dk_weight = (make() for make in results)
        shares = [torch.empty(shares_shape if need else (0,), dtype=wide, device=device) for need in needs[2:]]
        launch(
            incoming[0](dq_out if has_q else q), incoming[1](dk_out if has_k else k), reads[0](q), reads[1](k),
            q_weight.contiguous(), k_weight.contiguous(), reads[2](cos), reads[3](sin),
            q_rstd.contiguous(), k_rstd.contiguous(), dq, dk, *shares,
        )  # fmt: skip
        if needs[2] or needs[3]:
            add(*shares, dq_weight, dk_weight)
        return dq, dk, dq_weight, dk_weight

    return run


qk_norm_rope_backward = Planned(functools.partial(plan, False))
qk_layer_norm_rope_backward = Planned(functools.partial(plan, True))


def plan_kernel(
    dq_out: Tensor, dk_out: Tensor, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, flags: dict[str, Any]
) -> tuple[int, Callable[..., None]]:
    """How many programs walk q and k each, and their launch; what is not needed is given as q and k themselves."""
    views, tables = [as_heads(x) for x in (dq_out, dk_out, q, k)], [as_rows(cos), as_rows(sin)]
    constants = tiling(q.shape[-1], cos.shape[-1])
    rows = [view.shape[:-1].numel() for view in views[2:]]
    walkers = program_count(q.device, PROGRAMS_PER_MULTIPROCESSOR)
    programs = min(walkers, cdiv(max(rows), constants["ROWS"]))
    launch = bind(
        _backward_kernel, (programs, flags["HAS_Q"] + flags["HAS_K"]),
        *rows, q.shape[-2], k.shape[-2], q.shape[-3],
        *(stride for view in views for stride in strides(view)), *strides(tables[0]), *strides(tables[1]),
        LONG_OFFSETS=exceeds_int32(*views, *tables, unmade(q.shape, q.dtype), unmade(k.shape, k.dtype)),
        **flags, **constants,
    )  # fmt: skip
    return programs, launch


def check_gradients(
    dq_out: Tensor | None, dk_out: Tensor | None, q: Tensor, k: Tensor, q_rstd: Tensor, k_rstd: Tensor,
    needs: tuple[bool, ...],
) -> None:  # fmt: skip
    """Check the tensors of a direct call of the operator, which passes no other check."""
    check_operands(dq_out=dq_out, dk_out=dk_out, q_rstd=q_rstd, k_rstd=k_rstd)
    check_shapes(q.shape, dq_out=dq_out)
    check_shapes(k.shape, dk_out=dk_out)
    check_count(q.shape[:-1].numel(), q_rstd=q_rstd)
    check_count(k.shape[:-1].numel(), k_rstd=k_rstd)
    for name, dy, of, needed in (("dq_out", dq_out, "q", needs[::2]), ("dk_out", dk_out, "k", needs[1::2])):
        if dy is None and any(needed):
            raise ValueError(f"{name}: given None; gradients of {of} need it")
