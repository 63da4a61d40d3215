"""Checks that the public functions share. Each error says what was given and what is allowed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._core.arguments import check_device, check_filled, check_flag, check_floats, check_integer, check_tensor, shape_of
from ._core.call_kinds import can_bypass_dispatcher, is_watched


def check_heads(q: Tensor, k: Tensor) -> None:
    """Raise TypeError or ValueError, naming the argument, unless these are heads of the same tokens, of one size."""
    check_tensor("q", q)
    check_tensor("k", k)
    if q.dim() < 3:
        raise ValueError(f"q: shape is {shape_of(q)}; it must be (..., S, H, D)")
    if k.dim() != q.dim() or k.shape[:-2] != q.shape[:-2] or k.shape[-1] != q.shape[-1]:
        raise ValueError(
            f"k: shape is {shape_of(k)}; it must be that of q, {shape_of(q)}, but for the number of heads, the second"
            " dimension from the right"
        )
    if k.dtype != q.dtype:
        raise TypeError(f"k: dtype is {k.dtype}; it must be that of q, {q.dtype}")
    check_device("k", k, q, "q")


def check_angles(
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None,
    interleaved: bool,
    x: Tensor,
    tokens: Sequence[int],
    columns: int,
) -> None:
    """Raise TypeError or ValueError, naming the argument, unless these are angles for heads of `columns` columns.

    Args:
        x: what is on the device that they must be on.
        tokens: `(..., S)`, the shape in front of the heads.
        columns: of a head.
    """
    check_flag("interleaved", interleaved)
    for name, table in (("cos", cos), ("sin", sin)):
        check_tensor(name, table)
        check_device(name, table, x, "the heads")
    if sin.shape != cos.shape:
        raise ValueError(f"sin: shape is {shape_of(sin)}; it must be that of cos, {shape_of(cos)}")
    if 2 * cos.shape[-1] > columns:
        raise ValueError(
            f"cos: shape is {shape_of(cos)}; its last dimension is half of what is rotated of a head, at most D/2 ="
            f" {columns // 2}: of tables that hold every angle twice give the first half"
        )
    if position_ids is None:
        if not _are_of(cos.shape[:-1], tokens):
            raise ValueError(
                f"cos: shape is {shape_of(cos)}; without position_ids it must have a row for each token,"
                f" {tuple(tokens[-1:])} or {tuple(tokens)} in front of its columns"
            )
        return
    check_positions(position_ids, x, tokens)
    if cos.dim() != 2:
        raise ValueError(
            f"cos: shape is {shape_of(cos)}; with position_ids it must be (P, R/2), a row for each position"
        )


def check_positions(position_ids: Tensor, x: Tensor, tokens: Sequence[int]) -> None:
    """Raise TypeError or ValueError unless these are integers for tokens, `(S,)` or `(..., S)`, on the device of x."""
    if not isinstance(position_ids, Tensor):
        raise TypeError(f"position_ids: given {type(position_ids).__name__}; it must be a torch.Tensor or None")
    if position_ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"position_ids: dtype is {position_ids.dtype}; allowed are torch.int64, torch.int32")
    if not _are_of(position_ids.shape, tokens):
        raise ValueError(
            f"position_ids: shape is {shape_of(position_ids)}; it must be {tuple(tokens[-1:])} or {tuple(tokens)}"
        )
    check_device("position_ids", position_ids, x, "the heads")
    check_filled("position_ids", position_ids)


def check_position_values(position_ids: Tensor | None, cos: Tensor) -> None:
    """Raise ValueError, naming position_ids, if it holds positions that are no rows of the tables.

    Values are read on a CPU alone, and not while something traces: on a GPU that would wait for it. Each call has to do
    this itself: the ladder caches other checks for matching calls, and those have other values. Arguments that
    `check_angles` refuses pass.
    """
    if torch.compiler.is_compiling() or not isinstance(position_ids, Tensor) or not isinstance(cos, Tensor):
        return
    if not position_ids.is_cpu or not can_bypass_dispatcher(position_ids) or is_watched():
        return
    if position_ids.dtype not in (torch.int64, torch.int32) or position_ids.numel() == 0 or cos.dim() != 2:
        return
    check_filled("position_ids", position_ids)
    least, greatest = (int(value) for value in position_ids.aminmax())
    rows = cos.shape[0]
    if least < 0 or greatest >= rows:
        having = f"rows 0 to {rows - 1}" if rows > 0 else "no rows"
        raise ValueError(f"position_ids: given {least if least < 0 else greatest}; the tables have {having}")


def check_apart(q: Tensor, k: Tensor) -> None:
    """Raise ValueError, naming k, if it begins where q does: what is written in place would be rotated twice."""
    if torch.compiler.is_compiling() or not can_bypass_dispatcher(q, k) or q.numel() == 0 or k.numel() == 0:
        return
    if q.device == k.device and q.data_ptr() == k.data_ptr() != 0:
        raise ValueError("k: it begins at the address of q; they must not share memory: both are overwritten")


def _are_of(shape: Sequence[int], tokens: Sequence[int]) -> bool:
    """Whether this is the shape of all tokens, or of those of one sequence."""
    # Lengths first: of shapes of other lengths torch.export would compare the sizes, and forbid some for ever.
    alike = len(shape) == len(tokens) and all(a == b for a, b in zip(shape, tokens, strict=True))
    return alike or (len(shape) == 1 and shape[0] == tokens[-1])


def check_positive(**counts: int) -> None:
    """Raise TypeError or ValueError, naming the argument, unless these are integers of at least 1."""
    for name, count in counts.items():
        check_integer(name, count)
        if count < 1:
            raise ValueError(f"{name}: given {count}; it must be at least 1")


def check_projection(x: Tensor, weight: Tensor, bias: Tensor | None, rows: int, of: str) -> None:
    """Raise TypeError or ValueError, naming the argument, unless x can go through this projection to `rows` columns.

    Args:
        x: `(..., C)`.
        weight: `(rows, C)`.
        bias: `(rows,)` or None.
        rows: how many the weight must have.
        of: what they are, for messages.
    """
    check_tensor("x", x)
    check_tensor("weight", weight)
    if x.dim() < 2:
        raise ValueError(f"x: shape is {shape_of(x)}; it must be (..., S, C)")
    for name, tensor, wanted in (("weight", weight, (rows, x.shape[-1])), ("bias", bias, (rows,))):
        if tensor is None:
            continue
        check_tensor(name, tensor)
        if tensor.shape != wanted:
            raise ValueError(f"{name}: shape is {shape_of(tensor)}; it must be {wanted}: {of} rows")
        check_device(name, tensor, x)
        if tensor.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
            raise TypeError(f"{name}: dtype is {tensor.dtype}; it must be that of x, {x.dtype}")


def check_cache(
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor | None,
    x: Tensor,
    columns: int,
    dtype: torch.dtype,
) -> None:
    """Raise TypeError or ValueError, naming the argument, unless these are a cache for the tokens of x.

    Args:
        x: `(B, S, ...)`, on the device that they must be on.
        columns: of a head.
        dtype: of keys and values.
    """
    batch = x.shape[0]
    wanted = f"(B, K, N, D) with B = {batch}" if block_table is None else "(num_blocks, K, page_size, D)"
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_floats(name, cache)
        check_device(name, cache, x)
        if cache.dtype != dtype:
            raise TypeError(f"{name}: dtype is {cache.dtype}; it must be that of keys and values, {dtype}")
        if cache.dim() != 4 or cache.shape[-1] != columns or (block_table is None and cache.shape[0] != batch):
            raise ValueError(f"{name}: shape is {shape_of(cache)}; it must be {wanted} and D = {columns}")
    if v_cache.shape != k_cache.shape:
        raise ValueError(f"v_cache: shape is {shape_of(v_cache)}; it must be that of k_cache, {shape_of(k_cache)}")
    check_int32("cache_seqlens", cache_seqlens, x, "(B,)")
    if block_table is not None:
        check_int32("block_table", block_table, x, "(B, max_blocks)")


def check_int32(name: str, tensor: Tensor, x: Tensor, shape: str) -> None:
    """Raise TypeError or ValueError unless this is int32 of such a shape, written out, with the batch of x."""
    if not isinstance(tensor, Tensor) or tensor.dtype != torch.int32:
        given = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"{name}: given {given}; it must be a tensor of torch.int32")
    if tensor.dim() != len(shape.strip("(,)").split(",")) or tensor.shape[0] != x.shape[0]:
        raise ValueError(f"{name}: shape is {shape_of(tensor)}; it must be {shape} with B = {x.shape[0]}")
    check_device(name, tensor, x)
    check_filled(name, tensor)
