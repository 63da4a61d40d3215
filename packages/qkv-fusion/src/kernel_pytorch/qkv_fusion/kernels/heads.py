"""How the kernels see heads: tiles of rows, a row being one head of one token, and the pairs of its columns.

A head's first 2 * PAIRS columns are rotated, as halves or as neighbours; the REST pass. Tiles are of whole rows, and
their size depends on the columns alone, so the result of a row never depends on how many rows there are.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_pytorch.qkv_fusion._core.sizes import next_power_of_2, warps

TILE = 2048  # columns of a tile, rows taken together


@triton.jit
def load_pairs(row_ptr, mask, INTERLEAVED: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Both members of the pairs of ROWS rows, `[ROWS, BLOCK]` each. row_ptr, mask: `[ROWS, 1]`."""
    if INTERLEAVED:
        column = tl.arange(0, 2 * BLOCK)[None, :]
        x = tl.load(row_ptr + column, mask=mask & (column < 2 * PAIRS), other=0.0)
        first, second = tl.split(tl.reshape(x, [ROWS, BLOCK, 2]))
    else:
        column = tl.arange(0, BLOCK)[None, :]
        inside = mask & (column < PAIRS)
        first = tl.load(row_ptr + column, mask=inside, other=0.0)
        second = tl.load(row_ptr + PAIRS + column, mask=inside, other=0.0)
    return first, second


@triton.jit
def store_pairs(
    row_ptr, first, second, mask,
    INTERLEAVED: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Store what `load_pairs` loads, rounded once to the dtype of the memory."""
    first, second = first.to(row_ptr.dtype.element_ty), second.to(row_ptr.dtype.element_ty)
    if INTERLEAVED:
        column = tl.arange(0, 2 * BLOCK)[None, :]
        x = tl.reshape(tl.join(first, second), [ROWS, 2 * BLOCK])
        tl.store(row_ptr + column, x, mask=mask & (column < 2 * PAIRS))
    else:
        column = tl.arange(0, BLOCK)[None, :]
        inside = mask & (column < PAIRS)
        tl.store(row_ptr + column, first, mask=inside)
        tl.store(row_ptr + PAIRS + column, second, mask=inside)


@triton.jit
def load_block(row_ptr, mask, COUNT: tl.constexpr, BLOCK: tl.constexpr, OTHER: tl.constexpr):
    """COUNT columns that lie side by side, `[ROWS, BLOCK]`; what is masked is OTHER."""
    column = tl.arange(0, BLOCK)[None, :]
    return tl.load(row_ptr + column, mask=mask & (column < COUNT), other=OTHER)


@triton.jit
def store_block(row_ptr, x, mask, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Store what `load_block` loads, rounded to the dtype of the memory."""
    column = tl.arange(0, BLOCK)[None, :]
    tl.store(row_ptr + column, x.to(row_ptr.dtype.element_ty), mask=mask & (column < COUNT))


@triton.jit
def turn(first, second, cos, sin, TRANSPOSED: tl.constexpr):
    """Rotate pairs by angles, or back."""
    if TRANSPOSED:
        sin = -sin
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def locate(tile, heads, sequence, ROWS: tl.constexpr, LONG_OFFSETS: tl.constexpr):
    """Row, head, batch and place in the sequence of each row of a tile, `[ROWS, 1]` each."""
    row = tl.arange(0, ROWS)[:, None]
    if LONG_OFFSETS:
        row = row + tile.to(tl.int64) * ROWS
    else:
        row = row + tile * ROWS
    token = row // heads
    return row, row % heads, token // sequence, token % sequence


def as_heads(x: Tensor) -> Tensor:
    """View `x`, `(..., S, H, D)`, as `(B, S, H, D)` with columns side by side; copies only what has no such view."""
    heads = x.reshape(x.shape[:-3].numel(), *x.shape[-3:]) if x.dim() != 4 else x
    return heads if heads.stride(-1) == 1 or heads.shape[-1] == 1 else heads.contiguous()


def as_rows(table: Tensor) -> Tensor:
    """View a table, `(S, C)` or `(..., S, C)`, as `(B, S, C)` in the same way; B is 1 where all batches share it."""
    rows = table.reshape(table.shape[:-2].numel(), *table.shape[-2:])
    return rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()


def strides(view: Tensor) -> list[int]:
    """Strides of all dimensions but the last; 0 for dimensions of size one."""
    return [0 if n == 1 else stride for n, stride in zip(view.shape[:-1], view.stride()[:-1], strict=True)]


def tiling(columns: int, pairs: int) -> dict[str, Any]:
    """Constants and warps of a kernel for heads of `columns` columns, of which `pairs` pairs are rotated."""
    block, rest = next_power_of_2(pairs), columns - 2 * pairs
    rest_block = next_power_of_2(rest) if rest else 1
    width = max(2 * block, rest_block)
    rows = max(1, TILE // width)
    shape = {"PAIRS": pairs, "BLOCK": block, "REST": rest, "REST_BLOCK": rest_block, "ROWS": rows}
    return {**shape, "num_warps": warps(rows * width)}


def check_geometry(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, tokens: torch.Size) -> None:
    """Check the shapes of a direct call, which passes no other check: a wrong shape would read out of bounds.

    Args:
        q: `(..., S, H, D)`.
        k: `(..., S, K, D)`.
        cos: its last dimension is half of what is rotated.
        sin: like cos.
        tokens: the shapes that q and k must have in front of their heads.

    Raises:
        ValueError: shapes do not fit; the message names the argument.
    """
    for name, x in (("q", q), ("k", k)):
        if x.dim() < 3 or x.shape[:-2] != tokens or x.shape[-1] != q.shape[-1]:
            wanted = (*tokens, "heads", q.shape[-1] if q.dim() else 1)
            raise ValueError(f"{name}: shape is {tuple(x.shape)}; it must be ({', '.join(map(str, wanted))})")
    if sin.shape != cos.shape:
        raise ValueError(f"sin: shape is {tuple(sin.shape)}; it must be that of cos, {tuple(cos.shape)}")
    if not 1 <= cos.shape[-1] <= q.shape[-1] // 2:
        raise ValueError(
            f"cos: shape is {tuple(cos.shape)}; its last dimension is half of what is rotated of a head, from 1 to"
            f" D/2 = {q.shape[-1] // 2}"
        )


def check_tables(cos: Tensor, tokens: torch.Size) -> None:
    """Raise ValueError unless a table has a row for each token, or each place in the sequence."""
    if cos.dim() < 2 or (cos.shape[:-1] != tokens and cos.shape[:-1] != tokens[-1:]):
        raise ValueError(
            f"cos: shape is {tuple(cos.shape)}; it must be (S, R/2) = ({tokens[-1]}, R/2), or"
            f" ({', '.join(map(str, tokens))}, R/2)"
        )
