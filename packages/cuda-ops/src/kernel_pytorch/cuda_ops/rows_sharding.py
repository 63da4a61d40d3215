"""Sharding rules of the operators that walk rows without a norm: gated, bias_act, softmax.

gated: nothing crosses an element, so two tensors may be sharded alike over every dimension; a packed input not over its
last, where gate and up would part. bias_act: x over every dimension, over the last one with the bias; of a bias that
every rank has, each rank holds its own rows' part of the gradient. softmax: x over every dimension but the last, a mask
with it where it has that dimension, else replicated, and its gradient a part. Nothing is ever sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .sharding import Shardings, row_placements


def _gated_choices(placements: Any, gate: Any, up: Any) -> list[Any]:
    dimensions = gate.ndim - 1 if up is None else gate.ndim
    return [placements.Replicate(), *(placements.Shard(d) for d in range(dimensions))]


def gated(placements: Any, gate: Any, up: Any, *scalars: Any) -> Shardings:
    """Of `gated`."""
    for p in _gated_choices(placements, gate, up):
        yield [p], [p, None if up is None else p]


def gated_backward(placements: Any, dy: Any, gate: Any, up: Any, *scalars: Any) -> Shardings:
    """Of `gated_backward`; what is not needed comes back empty, and is the same everywhere."""
    needed = (scalars[-2], scalars[-1] and up is not None)
    for p in _gated_choices(placements, gate, up):
        yield [p if need else placements.Replicate() for need in needed], [p, p, None if up is None else p]


def _bias_choices(placements: Any, x: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Placements of x, the bias and its gradient that belong together."""
    for rows, gradient in row_placements(placements, x.ndim):
        yield rows, placements.Replicate(), gradient
    yield placements.Shard(x.ndim - 1), placements.Shard(0), placements.Shard(0)


def bias_act(placements: Any, x: Any, bias: Any, *scalars: Any) -> Shardings:
    """Of `bias_act`."""
    for rows, of_bias, _ in _bias_choices(placements, x):
        yield [rows], [rows, None if bias is None else of_bias]


def bias_act_backward(
    placements: Any, dy: Any, x: Any, bias: Any, activation: str, need_dx: bool, need_dbias: bool
) -> Shardings:
    """Of `bias_act_backward`."""
    nothing = placements.Replicate()
    for rows, of_bias, gradient in _bias_choices(placements, dy):
        outputs = [rows if need_dx else nothing, gradient if need_dbias and bias is not None else nothing]
        yield outputs, [rows, None if x is None else rows, None if bias is None else of_bias]


def _softmax_choices(placements: Any, x: Any, mask: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Placements of x, the mask and its gradient that belong together."""
    yield (placements.Replicate(),) * 3
    for dimension in range(x.ndim - 1):
        of_mask = -1 if mask is None else dimension - (x.ndim - mask.ndim)
        if of_mask >= 0 and mask.shape[of_mask] == x.shape[dimension] != 1:
            yield placements.Shard(dimension), placements.Shard(of_mask), placements.Shard(of_mask)
        else:
            yield placements.Shard(dimension), placements.Replicate(), placements.Partial()


def softmax(placements: Any, x: Any, mask: Any, *scalars: Any) -> Shardings:
    """Of `softmax`."""
    for rows, of_mask, _ in _softmax_choices(placements, x, mask):
        yield [rows], [rows, None if mask is None else of_mask]


def softmax_backward(
    placements: Any, dy: Any, y: Any, mask: Any, scale: float, need_dx: bool, need_dmask: bool
) -> Shardings:
    """Of `softmax_backward`."""
    nothing = placements.Replicate()
    for rows, of_mask, gradient in _softmax_choices(placements, y, mask):
        outputs = [rows if need_dx else nothing, gradient if need_dmask and mask is not None else nothing]
        yield outputs, [rows, rows, None if mask is None else of_mask]
