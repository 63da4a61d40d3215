"""Sharding rules of the operators that walk rows: gated, bias_act, bias_dropout_add, norm_act, softmax.

gated: nothing crosses an element, so two tensors may be sharded alike over every dimension; a packed input not over its
last, where gate and up would part. bias_act: x over every dimension, over the last one with the bias; of a bias that
every rank has, each rank holds its own rows' part of the gradient. softmax: x over every dimension but the last, a mask
with it where it has that dimension, else replicated, and its gradient a part. norm_act: x over every dimension but the
last, the parameters replicated, their gradients a part. Nothing is ever sent.

With dropout the mask goes by the place of an element in the whole tensor, which a rank that holds a part does not know:
then everything is replicated.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

Shardings = Iterator[tuple[Sequence[Any], Sequence[Any]]]
"""Acceptable placements of the outputs, then of the tensors among the arguments, None for one that is absent."""


def row_placements(placements: ModuleType, dimensions: int) -> Iterator[tuple[Any, Any]]:
    """Where the rows of a tensor may lie, and what a sum over all rows is then.

    Args:
        placements: `torch.distributed.tensor`.
        dimensions: of the tensor; the last one is the row, which is whole.
    """
    yield placements.Replicate(), placements.Replicate()
    for dimension in range(dimensions - 1):
        yield placements.Shard(dimension), placements.Partial()


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


def _dropout_choices(placements: Any, x: Any, p: float) -> Iterator[tuple[Any, Any, Any]]:
    """As `_bias_choices`, where nothing is dropped."""
    choices = _bias_choices(placements, x)
    return choices if p == 0.0 else itertools.islice(choices, 1)


def bias_dropout_add(placements: Any, x: Any, bias: Any, residual: Any, seed: Any, p: float, *_: Any) -> Shardings:
    """Of `bias_dropout_add`."""
    of_seed = None if seed is None else placements.Replicate()
    for rows, of_bias, _gradient in _dropout_choices(placements, x, p):
        yield [rows], [rows, None if bias is None else of_bias, rows, of_seed]


def bias_dropout_add_backward(
    placements: Any, dy: Any, bias: Any, seed: Any, p: float, x_dtype: str, need_dx: bool, need_dbias: bool
) -> Shardings:
    """Of `bias_dropout_add_backward`."""
    nothing = placements.Replicate()
    for rows, of_bias, gradient in _dropout_choices(placements, dy, p):
        outputs = [rows if need_dx else nothing, gradient if need_dbias and bias is not None else nothing]
        yield outputs, [rows, None if bias is None else of_bias, None if seed is None else nothing]


def _norm_choices(placements: Any, x: Any, p: float) -> Iterator[tuple[Any, Any, Any]]:
    """Placements of x, the statistics and the parameters' gradients that belong together."""
    yield (placements.Replicate(),) * 3
    # The statistics have a dimension more, in front: mean and rstd.
    for dimension in range(x.ndim - 1 if p == 0.0 else 0):
        yield placements.Shard(dimension), placements.Shard(dimension + 1), placements.Partial()


def norm_act(
    placements: Any, x: Any, residual: Any, weight: Any, bias: Any, seed: Any, eps: float, dropout_p: float, *_: Any
) -> Shardings:
    """Of `norm_act`."""
    nothing = placements.Replicate()
    whole = [None if t is None else nothing for t in (weight, bias, seed)]
    for rows, statistics, _gradient in _norm_choices(placements, x, dropout_p):
        of_residual = None if residual is None else rows
        yield [rows, nothing if residual is None else rows, statistics], [rows, of_residual, *whole]


def norm_act_backward(
    placements: Any, dy: Any, dh: Any, h: Any, weight: Any, bias: Any, seed: Any, statistics: Any,
    eps: float, dropout_p: float, norm: str, activation: str, x_dtype: str, residual_dtype: str,
    need_dx: bool, need_dresidual: bool, need_dweight: bool, need_dbias: bool, *_: Any,
) -> Shardings:  # fmt: skip
    """Of `norm_act_backward`."""
    nothing = placements.Replicate()
    whole = [None if t is None else nothing for t in (weight, bias, seed)]
    for rows, of_rows, gradient in _norm_choices(placements, h, dropout_p):
        outputs = [
            rows if need_dx else nothing,
            rows if need_dresidual and residual_dtype else nothing,
            gradient if need_dweight and weight is not None else nothing,
            gradient if need_dbias and bias is not None else nothing,
        ]
        yield outputs, [rows, None if dh is None else rows, rows, *whole, of_rows]


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
