"""The backward pass in Triton. Kernels, then the launcher.

The scores are computed again, tile by tile, and the weights from them and the saved maxima and sums. With
`dp = do v^T`:

    delta = sum over d of do * o - dlse        one number for each query and head (`_delta_kernel`); see below
    ds    = p * (dp - delta)
    dv    = p^T do,  dk = scale * ds^T q       one program for each tile of keys (`dkdv_kernel`)
    dq    = scale * ds k                       one program for each tile of queries (`dq_kernel`)
    dbias = ds                                 summed over what the bias is broadcast over (`dbias_kernel`)
    dsink = -sum of exp(sink - lse) * delta

For 16-bit tensors the kernel reads o together with its rounding error: where keys are nearly equal `dp - delta`
cancels, and an error of delta is multiplied by their mean. lse, computed from the maximum and the sum, is rounded too:
p is off by the same factor for all keys of a query. In float32 this is the largest error, and with a maximum of 1e9 the
sum is lost. So do and dlse are first multiplied by that factor (`normalizer_of`): then dv, delta and ds, and the
gradients that depend on them, are those of the exact p. In 16 bits this changes do only where scores exceed 1e4.

Every sum is made by one program in a fixed order, without atomic additions, so gradients are the same bits each time.

Dao, "FlashAttention-2", 2023, https://arxiv.org/abs/2307.08691, section 3.1.2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_pytorch.flash_attn_triton._core.direct_calls import check_shapes
from kernel_pytorch.flash_attn_triton._core.launch import bind
from kernel_pytorch.flash_attn_triton._core.plans import Planned
from kernel_pytorch.flash_attn_triton._core.sizes import cdiv

from .configurations import KEYS, QUERIES
from .geometry import Geometry, check_all_memory
from .gradient_keys import dkdv_kernel
from .gradient_queries import dbias_kernel, dq_kernel
from .tiles import LOG2E, finite, load_rows, normalizer_of


@triton.jit
def _delta_kernel(
    do_ptr, o_ptr, rest_ptr, dlse_ptr, normalizer_ptr, scaled_ptr, delta_ptr, base_ptr, heads, rows, depth,
    do_stride_b, do_stride_h, do_stride_m, o_stride_b, o_stride_h, o_stride_m,
    dlse_stride_b, dlse_stride_h, dlse_stride_m,
    scaled_stride_b, scaled_stride_h, scaled_stride_m,
    HAS_REST: tl.constexpr, HAS_DLSE: tl.constexpr, IS_LSE: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, LONG_OFFSETS: tl.constexpr,
):  # fmt: skip
    """This program computes delta of ROWS queries of one head; packed sequences are one long one here.

    normalizer: maxima and sums, (B, H, Sq, 2), or with IS_LSE lse. scaled: do times the factor of `normalizer_of`.
    base: what is subtracted from scores, in units of `log2`.
    """
    tiles = tl.cdiv(rows, ROWS)
    head_of_batch = tl.program_id(0) // tiles
    row = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    if LONG_OFFSETS:
        head_of_batch = head_of_batch.to(tl.int64)
        row = row.to(tl.int64)
    batch = head_of_batch // heads
    head = head_of_batch % heads
    d = tl.arange(0, DEPTH)
    do_base = do_ptr + batch * do_stride_b + head * do_stride_h
    o_base = o_ptr + batch * o_stride_b + head * o_stride_h
    statistics = head_of_batch * rows + row
    if IS_LSE:
        base = finite(tl.load(normalizer_ptr + statistics, mask=row < rows, other=0.0)) * LOG2E
        factor = base * 0.0 + 1.0
        sums = factor
    else:
        top = tl.load(normalizer_ptr + 2 * statistics, mask=row < rows, other=0.0)
        sums = tl.load(normalizer_ptr + 2 * statistics + 1, mask=row < rows, other=0.0)
        base, factor = normalizer_of(top, sums)
    do = load_rows(do_base, row, do_stride_m, rows, d, depth, True, False).to(tl.float32) * factor[:, None]
    scaled = do.to(scaled_ptr.dtype.element_ty)
    target = batch * scaled_stride_b + head * scaled_stride_h + row[:, None] * scaled_stride_m + d[None, :]
    tl.store(scaled_ptr + target, scaled, mask=(row[:, None] < rows) & (d[None, :] < depth))
    do = scaled.to(tl.float32)
    o = load_rows(o_base, row, o_stride_m, rows, d, depth, True, False).to(tl.float32)
    if HAS_REST:
        rest_base = rest_ptr + batch * o_stride_b + head * o_stride_h
        o += load_rows(rest_base, row, o_stride_m, rows, d, depth, True, False).to(tl.float32)
    delta = tl.sum(do * o, axis=1)
    if HAS_DLSE:
        dlse = dlse_ptr + batch * dlse_stride_b + head * dlse_stride_h + row * dlse_stride_m
        delta -= tl.load(dlse, mask=row < rows, other=0.0).to(tl.float32) * factor
    delta = tl.where(sums == 0.0, 0.0, delta)  # of a query that sees no key, whatever its dlse is
    tl.store(base_ptr + statistics, base, mask=row < rows)
    tl.store(delta_ptr + statistics, delta, mask=row < rows)


@Planned
def flash_attention_backward(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None,
    alibi_slopes: Tensor | None, sinks: Tensor | None, seed: Tensor | None, o: Tensor, normalizer: Tensor,
    rest: Tensor | None, scale: float, left: int, right: int, softcap: float, dropout_p: float,
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, max_seqlen_q: int, max_seqlen_k: int,
    need_dq: bool, need_dk: bool, need_dv: bool, need_dbias: bool, need_dsinks: bool,
) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:  # fmt: skip
    """The launcher of the gradients: `(dq, dk, dv, dbias, dsinks)`; what is not needed comes back empty."""
    g = Geometry(
        q, k, v, bias, alibi_slopes, sinks, seed, scale, left, right, softcap, dropout_p,
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    )  # fmt: skip
    check_all_memory(do=do, dlse=dlse, o=o, normalizer=normalizer, rest=rest)
    check_shapes(q.shape, do=do, o=o, rest=rest)
    check_shapes(q.shape[:-1], dlse=dlse)
    is_lse = normalizer.dim() < q.dim()
    check_shapes(q.shape[:-1] if is_lse else (*q.shape[:-1], 2), normalizer=normalizer)
    need_dbias, need_dsinks = need_dbias and bias is not None, need_dsinks and sinks is not None
    launch_delta = None if g.is_empty else _bind_delta(g, do, dlse, o, rest is not None, is_lse)
    launch_keys = _bind_keys(g, need_dk, need_dv)
    launch_queries = _bind_queries(g) if need_dq and not g.is_empty else None
    add_bias = _bias_gradient(g, bias) if need_dbias and not g.is_empty else None

    def run(
        do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None,
        alibi_slopes: Tensor | None, sinks: Tensor | None, seed: Tensor | None, o: Tensor, normalizer: Tensor,
        rest: Tensor | None, *options: Any,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        nothing, (cu_q, cu_k) = q.new_empty, options[5:7]
        dq = g.new_o() if need_dq else nothing((0,))
        dk, dv = (g.new_kv() if need else nothing((0,)) for need in (need_dk, need_dv))
        q, k, v, do, o = (g.unit_depth(t) for t in (q, k, v, do, o))
        scaled, delta, base = g.q_like.new(zeros=launch_delta is None), g.new_lse(), g.new_lse()
        if launch_delta is not None:
            launch_delta(do, o, _like(rest, o), dlse, normalizer.contiguous(), scaled, delta, base)
        shared = q, k, v, g.bias_data(bias), alibi_slopes, seed, g.dense(cu_q), g.dense(cu_k), scaled, base, delta
        if launch_keys is not None:
            launch_keys(*shared, dk, dv)
        if launch_queries is not None:
            launch_queries(*shared, dq)
        dbias = dsinks = nothing((0,))
        if need_dbias:
            assert bias is not None
            dbias = torch.zeros_like(bias, memory_format=torch.contiguous_format)
            if add_bias is not None:
                dbias = add_bias(q, k, v, bias, seed, scaled, base, delta)
        if need_dsinks:
            assert sinks is not None
            of_sink = torch.exp2(sinks.float().unsqueeze(-1) * LOG2E.value - base)
            dsinks = (of_sink * delta).sum((0, 2)).neg().to(sinks.dtype)
        return dq, dk, dv, dbias, dsinks

    return run


def _like(x: Tensor | None, o: Tensor) -> Tensor | None:
    """The tensor with the strides of o, which it has where the forward allocated both."""
    return x if x is None or x.stride() == o.stride() else torch.empty_like(o).copy_(x)


def _bind_delta(g: Geometry, do: Tensor, dlse: Tensor | None, o: Tensor, has_rest: bool, is_lse: bool) -> Any:
    """The launch of delta; packed sequences are one."""
    rows = max(1, 2048 // g.padded_depth)
    dlse_strides = (0, 0, 0) if dlse is None else dlse.stride()
    heads_of_batches = do.shape[0] * g.heads
    return bind(
        _delta_kernel, (cdiv(do.shape[2], rows) * heads_of_batches,), g.heads, do.shape[2], g.depth,
        *g.unit_depth(do).stride()[:3], *g.unit_depth(o).stride()[:3], *dlse_strides,
        *g.q_like.meta.stride()[:3],
        HAS_REST=has_rest, HAS_DLSE=dlse is not None, IS_LSE=is_lse, ROWS=rows, DEPTH=g.padded_depth,
        LONG_OFFSETS=g.long_offsets, num_warps=4,
    )  # fmt: skip


def _bind_keys(g: Geometry, need_dk: bool, need_dv: bool) -> Any:
    """Bind the launch of dk and dv; return None if neither is needed or there are none."""
    options = g.options(KEYS)
    programs = cdiv(g.columns, options["COLUMNS"]) * g.batch * g.kv_heads
    if not (need_dk or need_dv) or programs == 0:
        return None
    return bind(
        dkdv_kernel, (programs,), *g.sizes,
        *g.q_strides, *g.k_strides, *g.v_strides, *g.o_strides, *g.dk_strides, *g.bias_strides, *g.slopes_strides,
        VARLEN=g.varlen, NEED_DK=need_dk, NEED_DV=need_dv, **options,
    )  # fmt: skip


def _bind_queries(g: Geometry) -> Any:
    """The launch of dq."""
    options = g.options(QUERIES)
    return bind(
        dq_kernel, (cdiv(g.rows, options["ROWS"]) * g.batch * g.heads,),
        *g.sizes,
        *g.q_strides, *g.k_strides, *g.v_strides, *g.o_strides, *g.o_strides, *g.bias_strides, *g.slopes_strides,
        VARLEN=g.varlen, **options,
    )  # fmt: skip


def _bias_gradient(g: Geometry, bias: Tensor) -> Callable[..., Tensor]:
    """What computes the gradient of the bias; over queries and keys that share one number PyTorch sums."""
    options, shape, dtype = g.options(QUERIES), bias.shape, bias.dtype
    batches, heads = shape[:2]
    tiles = cdiv(g.rows, options["ROWS"]) * cdiv(g.columns, options["COLUMNS"])
    launch = None if tiles == 0 else bind(
        dbias_kernel, (tiles * batches * heads,), g.batch, *g.sizes[:7],
        heads, g.batch // batches, g.heads // heads,
        *g.q_strides, *g.k_strides, *g.v_strides, *g.o_strides, *g.bias_strides, **options,
    )  # fmt: skip

    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seed: Tensor | None, *rest: Tensor) -> Tensor:
        found = torch.empty((batches, heads, g.rows, g.columns), dtype=torch.float32, device=q.device)
        if launch is not None:
            launch(q, k, v, bias, seed, *rest, found)
        return found.sum_to_size(shape).to(dtype)

    return run
