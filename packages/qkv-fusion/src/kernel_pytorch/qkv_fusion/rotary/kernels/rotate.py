"""The rotation of queries and keys in Triton, out of place and in place. Kernels, then launchers.

One launch for both: programs are numbered through the tiles of q and then those of k. A tile holds whole heads, which
stay in registers between their load and their store, so the same kernel may write where it read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_pytorch.qkv_fusion._core.direct_calls import check_memory, check_operands
from kernel_pytorch.qkv_fusion._core.launch import Launch, bind
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


@triton.jit
def _rotate_tile(
    tile, x_ptr, y_ptr, cos_ptr, sin_ptr, position_ptr, rows, heads, sequence, positions,
    x_stride_b, x_stride_s, x_stride_h, y_stride_b, y_stride_s, y_stride_h,
    cos_stride_b, cos_stride_s, sin_stride_b, sin_stride_s, position_stride_b, position_stride_s,
    HAS_POSITIONS: tl.constexpr, INTERLEAVED: tl.constexpr, TRANSPOSED: tl.constexpr, IN_PLACE: tl.constexpr,
    PAIRS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, REST_BLOCK: tl.constexpr, ROWS: tl.constexpr,
    LONG_OFFSETS: tl.constexpr,
):  # fmt: skip
    row, head, batch, place = locate(tile, heads, sequence, ROWS, LONG_OFFSETS)
    mask = row < rows
    known = mask
    if HAS_POSITIONS:
        place_ptr = position_ptr + batch * position_stride_b + place * position_stride_s
        position = tl.load(place_ptr, mask=mask, other=0)
        known = mask & (position >= 0) & (position < positions)  # nothing is read outside of the tables
        cos_row, sin_row = position * cos_stride_s, position * sin_stride_s
    else:
        cos_row = batch * cos_stride_b + place * cos_stride_s
        sin_row = batch * sin_stride_b + place * sin_stride_s
    wide = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    cos = load_block(cos_ptr + cos_row, known, PAIRS, BLOCK, float("nan")).to(wide)
    sin = load_block(sin_ptr + sin_row, known, PAIRS, BLOCK, float("nan")).to(wide)
    x_row = x_ptr + batch * x_stride_b + place * x_stride_s + head * x_stride_h
    y_row = y_ptr + batch * y_stride_b + place * y_stride_s + head * y_stride_h
    first, second = load_pairs(x_row, mask, INTERLEAVED, PAIRS, BLOCK, ROWS)
    first, second = turn(first.to(wide), second.to(wide), cos, sin, TRANSPOSED)
    store_pairs(y_row, first, second, mask, INTERLEAVED, PAIRS, BLOCK, ROWS)
    if REST > 0 and not IN_PLACE:
        rest = load_block(x_row + 2 * PAIRS, mask, REST, REST_BLOCK, 0.0)
        store_block(y_row + 2 * PAIRS, rest, mask, REST, REST_BLOCK)


@triton.jit
def _rotate_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, cos_ptr, sin_ptr, position_ptr,
    q_tiles, q_rows, k_rows, q_heads, k_heads, sequence, positions,
    q_stride_b, q_stride_s, q_stride_h, k_stride_b, k_stride_s, k_stride_h,
    q_out_stride_b, q_out_stride_s, q_out_stride_h, k_out_stride_b, k_out_stride_s, k_out_stride_h,
    cos_stride_b, cos_stride_s, sin_stride_b, sin_stride_s, position_stride_b, position_stride_s,
    HAS_POSITIONS: tl.constexpr, INTERLEAVED: tl.constexpr, TRANSPOSED: tl.constexpr, IN_PLACE: tl.constexpr,
    PAIRS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr, REST_BLOCK: tl.constexpr, ROWS: tl.constexpr,
    LONG_OFFSETS: tl.constexpr,
):  # fmt: skip
    """This program rotates ROWS heads of q or of k.

    q, k, q_out, k_out: (B, S, H, D) with unit stride in D. cos, sin: (B or 1, S, R/2), or (P, R/2) with positions,
    which are (B or 1, S); a position outside of the tables gives NaN.
    """
    tile = tl.program_id(0)
    if tile < q_tiles:
        _rotate_tile(
            tile, q_ptr, q_out_ptr, cos_ptr, sin_ptr, position_ptr, q_rows, q_heads, sequence, positions,
            q_stride_b, q_stride_s, q_stride_h, q_out_stride_b, q_out_stride_s, q_out_stride_h,
            cos_stride_b, cos_stride_s, sin_stride_b, sin_stride_s, position_stride_b, position_stride_s,
            HAS_POSITIONS, INTERLEAVED, TRANSPOSED, IN_PLACE, PAIRS, BLOCK, REST, REST_BLOCK, ROWS, LONG_OFFSETS,
        )  # fmt: skip
    else:
        _rotate_tile(
            tile - q_tiles, k_ptr, k_out_ptr, cos_ptr, sin_ptr, position_ptr, k_rows, k_heads, sequence, positions,
            k_stride_b, k_stride_s, k_stride_h, k_out_stride_b, k_out_stride_s, k_out_stride_h,
            cos_stride_b, cos_stride_s, sin_stride_b, sin_stride_s, position_stride_b, position_stride_s,
            HAS_POSITIONS, INTERLEAVED, TRANSPOSED, IN_PLACE, PAIRS, BLOCK, REST, REST_BLOCK, ROWS, LONG_OFFSETS,
        )  # fmt: skip


@Planned
def rotary_qk(
    q: Tensor | None,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None,
    interleaved: bool,
    transposed: bool,
) -> Callable[..., tuple[Tensor, Tensor]]:
    """The launcher of the operator: `(q_out, k_out)`, contiguous; empty where there is nothing to rotate."""
    given = [x for x in (q, k) if x is not None]
    if not given:
        raise ValueError("q: given None, and k too; one of them must be a tensor")
    check(given[0], given[-1], cos, sin, position_ids)
    results = [allocator(cos if x is None else x, needed=x is not None) for x in (q, k)]
    if all(x.numel() == 0 for x in given):
        return lambda *arguments: (results[0](), results[1]())
    made = [as_heads(unmade(x.shape, x.dtype)) for x in given]
    launch = plan(given, made, cos, sin, position_ids, interleaved, transposed, in_place=False)
    reads = [reader(x, as_heads) for x in (q, k)]
    read_cos, read_sin, read_ids = readers(cos, sin, position_ids)

    def run(
        q: Tensor | None, k: Tensor | None, cos: Tensor, sin: Tensor, position_ids: Tensor | None, *scalars: bool
    ) -> tuple[Tensor, Tensor]:
        q_out, k_out = results[0](), results[1]()
        tables = read_cos(cos), read_sin(sin), read_ids(position_ids)
        if q is None or k is None:
            x, y = (reads[0](q), q_out) if k is None else (reads[1](k), k_out)
            launch(x, x, y, y, *tables)
        else:
            launch(reads[0](q), reads[1](k), q_out, k_out, *tables)
        return q_out, k_out

    return run


@Planned
def rotary_qk_(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None, interleaved: bool, transposed: bool
) -> Callable[..., None]:
    """The launcher of the operator that writes where it read."""
    check(q, k, cos, sin, position_ids)
    views = [as_heads(x) for x in (q, k)]
    for name, x, view in zip(("q", "k"), (q, k), views, strict=True):
        if view.data_ptr() != x.data_ptr():
            raise ValueError(f"{name}: strides are {x.stride()}; columns must lie side by side, as in (B, S, H, D)")
    if q.numel() == 0 and k.numel() == 0:
        return lambda *arguments: None
    launch = plan(views, views, cos, sin, position_ids, interleaved, transposed, in_place=True)
    read_cos, read_sin, read_ids = readers(cos, sin, position_ids)

    def run(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None, *scalars: bool) -> None:
        launch(q, k, q, k, read_cos(cos), read_sin(sin), read_ids(position_ids))
        torch.autograd.graph.increment_version((q, k))

    return run


def check(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None) -> None:
    """Check the shapes of a direct call, which passes no other check: a wrong shape would read out of bounds."""
    check_operands(q=q, k=k, cos=cos, sin=sin)
    check_geometry(q, k, cos, sin, q.shape[:-2])
    if position_ids is None:
        check_tables(cos, q.shape[:-2])
        return
    check_memory("position_ids", position_ids)
    if position_ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"position_ids: dtype is {position_ids.dtype}; allowed are torch.int64, torch.int32")
    if position_ids.shape not in (q.shape[:-2], q.shape[-3:-2]):
        raise ValueError(
            f"position_ids: shape is {tuple(position_ids.shape)}; it must be {tuple(q.shape[-3:-2])} or"
            f" {tuple(q.shape[:-2])}"
        )
    if cos.dim() != 2:
        raise ValueError(f"cos: shape is {tuple(cos.shape)}; with position_ids it must be (P, R/2)")


def readers(cos: Tensor, sin: Tensor, position_ids: Tensor | None) -> list[Callable[[Any], Any]]:
    """What gives the kernel the memory of the tables and the positions."""
    return [reader(cos, as_rows), reader(sin, as_rows), reader(position_ids, as_places)]


def as_places(position_ids: Tensor) -> Tensor:
    """View positions, `(S,)` or `(..., S)`, as `(B, S)`; B is 1 where all batches share them."""
    return position_ids.reshape(-1, position_ids.shape[-1])


def plan(
    given: list[Tensor],
    made: list[Tensor],
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None,
    interleaved: bool,
    transposed: bool,
    in_place: bool,
) -> Launch:
    """The launch for what is rotated, one tensor or two, into tensors `(B, S, H, D)` of these strides."""
    views = [as_heads(x) for x in given]
    first, last = views[0], views[-1]
    tables = [as_rows(cos), as_rows(sin)]
    if position_ids is not None:
        ids = as_places(position_ids)
        id_strides = [0 if n == 1 else stride for n, stride in zip(ids.shape, ids.stride(), strict=True)]
    else:
        id_strides = [0, 0]
    constants = tiling(first.shape[-1], cos.shape[-1])
    rows = [view.shape[:-1].numel() for view in (first, last)]
    tiles = [cdiv(count, constants["ROWS"]) for count in rows]
    return bind(
        _rotate_kernel, (tiles[0] + (tiles[1] if len(given) == 2 else 0),),
        tiles[0], *rows, first.shape[2], last.shape[2], first.shape[1], cos.shape[-2],
        *strides(first), *strides(last), *strides(made[0]), *strides(made[-1]),
        *strides(tables[0]), *strides(tables[1]), *id_strides,
        HAS_POSITIONS=position_ids is not None, INTERLEAVED=interleaved, TRANSPOSED=transposed, IN_PLACE=in_place,
        LONG_OFFSETS=exceeds_int32(*views, *made, *tables), **constants,
    )  # fmt: skip
