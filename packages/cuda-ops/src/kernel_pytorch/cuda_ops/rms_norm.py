"""RMSNorm: `rms_norm`, `add_rms_norm`, `head_rms_norm`, and their gradients.

    y = x / sqrt(mean(x^2) + eps) * (offset + weight)        the mean runs over the last dimension

Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, https://arxiv.org/abs/1910.07467. Everything is
computed in float32 (float64 for float64) and rounded once, so the rounding that castings "llama" and "none" have in
between is left out; the dtype of the result is theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ._core.operator import declare, per_element
from .arguments import check_tensor
from .operators import call
from .rows_sharding import Shardings, row_placements


def _compute_dtype(*dtypes: torch.dtype) -> torch.dtype:
    return torch.float64 if torch.float64 in dtypes else torch.float32


def _result_dtype(h: torch.dtype, weight: Tensor | None, casting: str) -> torch.dtype:
    return h if weight is None or casting == "gemma" else torch.promote_types(h, weight.dtype)


def _fake(
    x: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str, version: int = 0
) -> tuple[Tensor, Tensor]:
    y = x.new_empty(x.shape, dtype=_result_dtype(x.dtype, weight, casting))
    return y, x.new_empty(x.shape[:-1], dtype=_compute_dtype(x.dtype, y.dtype))


def _fake_add(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str, version: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    h = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    y, rstd = _fake(h, weight, eps, offset, casting)
    return y, h, rstd


def _fake_backward(
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    eps: float,
    offset: float,
    need_dx: bool,
    need_dweight: bool,
) -> tuple[Tensor, Tensor]:
    dx = h.new_empty(h.shape if need_dx else (0,))
    like = h if weight is None else weight
    return dx, like.new_empty(like.shape if need_dweight and weight is not None else (0,))


def _formula(
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    eps: float,
    offset: float,
    need_dx: bool,
    need_dweight: bool,
) -> tuple[Tensor, Tensor]:
    """The gradients in PyTorch that autograd can follow."""
    wide = _compute_dtype(h.dtype, dy.dtype)
    x, dy, nothing = h.to(wide), dy.to(wide), h.new_empty((0,))
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    x_hat = x * rstd
    g = dy if weight is None else dy * (offset + weight.to(wide))
    dx = rstd * (g - x_hat * (g * x_hat).mean(-1, keepdim=True))
    if dh is not None:
        dx = dx + dh.to(wide)
    dweight = nothing.clone()
    if weight is not None and need_dweight:
        dweight = (dy * x_hat).sum_to_size(weight.shape).to(weight.dtype)
    return dx.to(h.dtype) if need_dx else nothing, dweight


def _gradient(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, eps: float, offset: float, needs: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = run_rms_norm_backward(dy, None, x, weight, rstd, eps, offset, *needs)
    return found


def _gradient_add(
    dy: Tensor | None,
    dh: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    eps: float,
    offset: float,
    needs: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if dy is None:
        return dh, dh, None
    dx, dweight = run_rms_norm_backward(dy, dh, h, weight, rstd, eps, offset, needs[0] or needs[1], needs[2])
    return dx, dx, dweight


# Sharding: the weight is replicated, or has its rows where the heads are; each rank holds its rows' part of dweight.


def _choices(placements: Any, h: Any, weight: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Placements of h, the weight and its gradient that belong together."""
    for rows, gradient in row_placements(placements, h.ndim):
        per_head = weight is not None and weight.ndim == 2 and rows.is_shard(h.ndim - 2)
        shares = (placements.Shard(0), placements.Shard(0)) if per_head else (placements.Replicate(), gradient)
        yield (rows, None if weight is None else shares[0], shares[1])


def _sharding(placements: Any, x: Any, weight: Any, *scalars: Any) -> Shardings:
    for rows, of_weight, _ in _choices(placements, x, weight):
        yield [rows] * 2, [rows, of_weight]


def _sharding_add(placements: Any, x: Any, residual: Any, weight: Any, *scalars: Any) -> Shardings:
    for rows, of_weight, _ in _choices(placements, x, weight):
        yield [rows] * 3, [rows, rows, of_weight]


def _sharding_backward(
    placements: Any, dy: Any, dh: Any, h: Any, weight: Any, rstd: Any, eps: float, offset: float, *needs: bool
) -> Shardings:
    nothing = placements.Replicate()  # what is not needed comes back empty, and is the same everywhere
    need_dx, need_dweight = needs
    for rows, of_weight, gradient in _choices(placements, h, weight):
        outputs = [rows if need_dx else nothing, gradient if need_dweight and weight is not None else nothing]
        yield outputs, [rows, None if dh is None else rows, rows, of_weight, rows]


run_rms_norm = declare(
    "rms_norm(Tensor x, Tensor? weight, float eps, float offset, str casting) -> (Tensor y, Tensor rstd)",
    fake=_fake,
    gradient=_gradient,
    flops=per_element(4),
    sharding=_sharding,
)
run_add_rms_norm = declare(
    "add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, float offset, str casting)"
    " -> (Tensor y, Tensor h, Tensor rstd)",
    fake=_fake_add,
    gradient=_gradient_add,
    follows={"h": ("x", "residual")},
    flops=per_element(5),
    sharding=_sharding_add,
)
run_rms_norm_backward = declare(
    "rms_norm_backward(Tensor dy, Tensor? dh, Tensor h, Tensor? weight, Tensor rstd, float eps, float offset,"
    " bool need_dx, bool need_dweight) -> (Tensor dx, Tensor dweight)",
    fake=_fake_backward,
    formula=_formula,
    flops=per_element(11),
    sharding=_sharding_backward,
)


def _rms_norm(function: str, *arguments: Any) -> Tensor:
    y: Tensor = call(function, run_rms_norm, *arguments)[0]
    return y


def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, offset: float = 0.0, casting: str = "llama"
) -> Tensor:
    """Normalise the last dimension of `x`, differentiable in x and weight any number of times.

    Args:
        x: `(..., N)`, float16, bfloat16 or float32, on a CPU float64 too; any strides.
        weight: `(N,)`, or `(H, N)` for x of shape `(..., H, N)`; any of these dtypes, on the device of x.
        eps: added to the mean square.
        offset: added to the weight.
        casting: the dtype of the result: that of x for "gemma", x and weight promoted for "llama" and "none".

    Returns:
        `(..., N)`.

    Raises:
        RuntimeError: the arguments do not fit, or the kernel could not be launched; the message names them.
        TypeError: an argument is not of its kind.
        ValueError: a number is not finite, or eps negative.
    """
    return _rms_norm("rms_norm", x, weight, eps, offset, casting)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: str = "llama",
) -> tuple[Tensor, Tensor]:
    """Add the residual stream, then normalise: `h = x + residual`, `y = rms_norm(h)`.

    Args:
        x: `(..., N)`.
        residual: `(..., N)`, on the device of x; its dtype may differ.
        weight: as for `rms_norm`.
        eps: as for `rms_norm`.
        offset: as for `rms_norm`.
        casting: as for `rms_norm`, with h in the place of x.

    Returns:
        `(y, h)`; h in the promoted dtype of x and residual.

    Raises:
        RuntimeError, TypeError, ValueError: as `rms_norm`.
    """
    arguments = (x, residual, weight, eps, offset, casting)
    y, h, _ = call("add_rms_norm", run_add_rms_norm, *arguments)
    return y, h


def head_rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, offset: float = 0.0, casting: str = "llama") -> Tensor:
    """Normalise every head on its own: `rms_norm` of x `(..., H, D)` with weight `(H, D)`."""
    check_tensor("head_rms_norm", "weight", weight)  # which the operator can do without
    return _rms_norm("head_rms_norm", x, weight, eps, offset, casting)
