"""RMSNorm or LayerNorm of heads of q and k and then their rotation, in one launch of Triton. Kernel, then launcher.

Programs are numbered through the tiles of q and then those of k. A tile holds whole heads, read and written once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import triton
import triton.language as tl
from torch import Tensor

from kernel_pytorch.qkv_fusion._core.direct_calls import check_operands, check_shapes
from kernel_pytorch.qkv_fusion._core.launch import bind
from kernel_pytorch.qkv_fusion._core.plans import Planned
from kernel_pytorch.qkv_fusion._core.sizes import allocator, cdiv, exceeds_int32, reader, unmade
from kernel_pytorch.qkv_fusion.kernels.heads import (
    as_heads,
    as_rows,
    check_geometry,
    check_tables,
    load_block,
    load_pairs,
    locate,
    store_block,
    store_pairs,
    strides,
    tiling,
    turn,
)
from kernel_pytorch.qkv_fusion.rules.norm_rope import compute_dtype


@triton.jit
def centre(first, second, rest, PAIRS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, REST_BLOCK: tl.constexpr):
    """Subtract the mean of each head. What lies beyond its columns stays zero."""
    total = tl.sum(first + second, axis=1, keep_dims=True)
    if REST > 0:
        total += tl.sum(rest, axis=1, keep_dims=True)
        mean = total / (2 * PAIRS + REST)
        rest = tl.where(tl.arange(0, REST_BLOCK)[None, :] < REST, rest - mean, 0.0)
    else:
        mean = total / (2 * PAIRS)
    inside = tl.arange(0, BLOCK)[None, :] < PAIRS
    return tl.where(inside, first - mean, 0.0), tl.where(inside, second - mean, 0.0), rest


@triton.jit
def load_heads(
    x_row, mask, wide: tl.constexpr, EPS: tl.constexpr, CENTRED: tl.constexpr, INTERLEAVED: tl.constexpr,
    PAIRS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, REST_BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Both members of the pairs of ROWS heads, the rest of their columns, and rstd; less the mean where CENTRED.

    x_row, mask: `[ROWS, 1]`.
    """
    first, second = load_pairs(x_row, mask, INTERLEAVED, PAIRS, BLOCK, ROWS)
    first, second = first.to(wide), second.to(wide)
    rest = tl.zeros([ROWS, REST_BLOCK], dtype=wide)
    if REST > 0:
        rest = load_block(x_row + 2 * PAIRS, mask, REST, REST_BLOCK, 0.0).to(wide)
    if CENTRED:
        first, second, rest = centre(first, second, rest, PAIRS, BLOCK, REST, REST_BLOCK)
    squares = tl.sum(first * first + second * second, axis=1, keep_dims=True)
    if REST > 0:
        squares += tl.sum(rest * rest, axis=1, keep_dims=True)
    return first, second, rest, tl.rsqrt(squares / (2 * PAIRS + REST) + EPS)


@triton.jit
def turn_heads(
    first, second, rstd, weight_ptr, cos_ptr, sin_ptr, batch, place, mask,
    cos_stride_b, cos_stride_s, sin_stride_b, sin_stride_s,
    wide: tl.constexpr, OFFSET: tl.constexpr, INTERLEAVED: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Pairs that `load_heads` returned, normalised and rotated."""
    weight_row = weight_ptr + tl.zeros([1, 1], dtype=tl.int32)
    every = tl.full([1, 1], 1, tl.int1)
    first_weight, second_weight = load_pairs(weight_row, every, INTERLEAVED, PAIRS, BLOCK, 1)
    first = first * rstd * (OFFSET + first_weight.to(wide))
    second = second * rstd * (OFFSET + second_weight.to(wide))
    cos = load_block(cos_ptr + batch * cos_stride_b + place * cos_stride_s, mask, PAIRS, BLOCK, 0.0).to(wide)
    sin = load_block(sin_ptr + batch * sin_stride_b + place * sin_stride_s, mask, PAIRS, BLOCK, 0.0).to(wide)
    return turn(first, second, cos, sin, False)


@triton.jit
def store_heads(
    y_row, first, second, rest, rstd, weight_ptr, mask, wide: tl.constexpr, OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, REST_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Write what `turn_heads` returned, and the rest, normalised, to y_row, `[ROWS, 1]`."""
    store_pairs(y_row, first, second, mask, INTERLEAVED, PAIRS, BLOCK, ROWS)
    if REST > 0:
        every = tl.full([1, 1], 1, tl.int1)
        rest_weight = load_block(weight_ptr + 2 * PAIRS, every, REST, REST_BLOCK, 0.0).to(wide)
        store_block(y_row + 2 * PAIRS, rest * rstd * (OFFSET + rest_weight), mask, REST, REST_BLOCK)


@triton.jit
def _norm_rope_tile(
    tile, x_ptr, weight_ptr, cos_ptr, sin_ptr, y_ptr, rstd_ptr, rows, heads, sequence,
    x_stride_b, x_stride_s, x_stride_h, cos_stride_b, cos_stride_s, sin_stride_b, sin_stride_s,
    EPS: tl.constexpr, OFFSET: tl.constexpr, CENTRED: tl.constexpr, INTERLEAVED: tl.constexpr,
    PAIRS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, REST_BLOCK: tl.constexpr, ROWS: tl.constexpr,
    LONG_OFFSETS: tl.constexpr,
):  # fmt: skip
    row, head, batch, place = locate(tile, heads, sequence, ROWS, LONG_OFFSETS)
    mask = row < rows
    wide: tl.constexpr = rstd_ptr.dtype.element_ty
    x_row = x_ptr + batch * x_stride_b + place * x_stride_s + head * x_stride_h
    first, second, rest, rstd = load_heads(
        x_row, mask, wide, EPS, CENTRED, INTERLEAVED, PAIRS, BLOCK, REST, REST_BLOCK, ROWS
    )
    tl.store(rstd_ptr + row, rstd, mask=mask)
    first, second = turn_heads(
        first, second, rstd, weight_ptr, cos_ptr, sin_ptr, batch, place, mask,
        cos_stride_b, cos_stride_s, sin_stride_b, sin_stride_s, wide, OFFSET, INTERLEAVED, PAIRS, BLOCK,
    )  # fmt: skip
    store_heads(
        y_ptr + row * (2 * PAIRS + REST), first, second, rest, rstd, weight_ptr, mask, wide, OFFSET,
        INTERLEAVED, PAIRS, BLOCK, REST, REST_BLOCK, ROWS,
    )  # fmt: skip


@triton.jit
def _norm_rope_kernel(
    q_ptr, k_ptr, q_weight_ptr, k_weight_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr, q_rstd_ptr, k_rstd_ptr,
    q_tiles, q_rows, k_rows, q_heads, k_heads, sequence,
    q_stride_b, q_stride_s, q_stride_h, k_stride_b, k_stride_s, k_stride_h,
    cos_stride_b, cos_stride_s, sin_stride_b, sin_stride_s,
    EPS: tl.constexpr, OFFSET: tl.constexpr, CENTRED: tl.constexpr, INTERLEAVED: tl.constexpr,
    PAIRS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, REST_BLOCK: tl.constexpr, ROWS: tl.constexpr,
    LONG_OFFSETS: tl.constexpr,
):  # fmt: skip
    """This program normalises and rotates ROWS heads of q or of k.

    q, k: (B, S, H, D) with unit stride in D. Weights: (D). cos, sin: (B or 1, S, R/2). Results: contiguous.
    """
    tile = tl.program_id(0)
    if tile < q_tiles:
        _norm_rope_tile(
            tile, q_ptr, q_weight_ptr, cos_ptr, sin_ptr, q_out_ptr, q_rstd_ptr, q_rows, q_heads, sequence,
            q_stride_b, q_stride_s, q_stride_h, cos_stride_b, cos_stride_s, sin_stride_b, sin_stride_s,
            EPS, OFFSET, CENTRED, INTERLEAVED, PAIRS, BLOCK, REST, REST_BLOCK, ROWS, LONG_OFFSETS,
        )  # fmt: skip
    else:
        _norm_rope_tile(
            tile - q_tiles, k_ptr, k_weight_ptr, cos_ptr, sin_ptr, k_out_ptr, k_rstd_ptr, k_rows, k_heads, sequence,
            k_stride_b, k_stride_s, k_stride_h, cos_stride_b, cos_stride_s, sin_stride_b, sin_stride_s,
            EPS, OFFSET, CENTRED, INTERLEAVED, PAIRS, BLOCK, REST, REST_BLOCK, ROWS, LONG_OFFSETS,
        )  # fmt: skip


def plan(
    centred: bool,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    interleaved: bool,
    offset: float,
) -> Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]:
    """What launches the operators' kernel: `(q_out, k_out, q_rstd, k_rstd)`, contiguous; `centred` is LayerNorm."""
    check(q, k, q_weight, k_weight, cos, sin)
    wide = compute_dtype(q.dtype)
    new_q, new_k = (allocator(x) for x in (q, k))
    new_q_rstd, new_k_rstd = (allocator(x, x.shape[:-1], wide) for x in (q, k))
    if q.numel() == 0 and k.numel() == 0:
        return lambda *arguments: (new_q(), new_k(), new_q_rstd(), new_k_rstd())
    views, tables = [as_heads(x) for x in (q, k)], [as_rows(cos), as_rows(sin)]
    constants = tiling(q.shape[-1], cos.shape[-1])
    rows = [view.shape[:-1].numel() for view in views]
    tiles = [cdiv(count, constants["ROWS"]) for count in rows]
    launch = bind(
        _norm_rope_kernel, (sum(tiles),),
        tiles[0], *rows, q.shape[-2], k.shape[-2], q.shape[-3],
        *strides(views[0]), *strides(views[1]), *strides(tables[0]), *strides(tables[1]),
        EPS=eps, OFFSET=offset, CENTRED=centred, INTERLEAVED=interleaved,
        LONG_OFFSETS=exceeds_int32(*views, *tables, unmade(q.shape, q.dtype), unmade(k.shape, k.dtype)), **constants,
    )  # fmt: skip
    read_q, read_k = reader(q, as_heads), reader(k, as_heads)
    read_cos, read_sin = reader(cos, as_rows), reader(sin, as_rows)

    def run(
        q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, *scalars: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        q_out, k_out, q_rstd, k_rstd = new_q(), new_k(), new_q_rstd(), new_k_rstd()
        launch(
            read_q(q), read_k(k), q_weight.contiguous(), k_weight.contiguous(), read_cos(cos), read_sin(sin),
            q_out, k_out, q_rstd, k_rstd,
        )  # fmt: skip
        return q_out, k_out, q_rstd, k_rstd

    return run


qk_norm_rope = Planned(functools.partial(plan, False))
qk_layer_norm_rope = Planned(functools.partial(plan, True))


def check(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Check the shapes of a direct call, which passes no other check: a wrong shape would read out of bounds."""
    check_operands(q=q, k=k, q_weight=q_weight, k_weight=k_weight, cos=cos, sin=sin)
    check_geometry(q, k, cos, sin, q.shape[:-2])
    check_tables(cos, q.shape[:-2])
    check_shapes(q.shape[-1:], q_weight=q_weight, k_weight=k_weight)
    if k.dtype != q.dtype:
        raise TypeError(f"k: dtype is {k.dtype}; it must be that of q, {q.dtype}")
