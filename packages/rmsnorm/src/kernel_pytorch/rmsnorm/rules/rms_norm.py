"""`rms_norm`, `add_rms_norm` and the gradient of both.

Rows are independent, so DTensor may shard x over every dimension but the last: y, the sum and rstd lie like x, each
rank holds its rows' part of the gradient of the weight, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .._core.operator import Rules, per_element
from .._core.sharding import Shardings, row_placements


def result_dtype(h_dtype: torch.dtype, weight: Tensor | None, casting: str) -> torch.dtype:
    """The dtype of y: that of x, or of the sum, for casting "gemma" and without a weight; else both promoted."""
    return h_dtype if weight is None or casting == "gemma" else torch.promote_types(h_dtype, weight.dtype)


def compute_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype of rstd: float64 where one of these is, else float32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def fake(x: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str) -> tuple[Tensor, Tensor]:
    """What it allocates."""
    y = x.new_empty(x.shape, dtype=result_dtype(x.dtype, weight, casting))
    return y, x.new_empty(x.shape[:-1], dtype=compute_dtype(x.dtype, y.dtype))


def fake_add(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str
) -> tuple[Tensor, Tensor, Tensor]:
    """What it allocates."""
    h = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    y, rstd = fake(h, weight, eps, offset, casting)
    return y, h, rstd


def fake_backward(
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
    """What it allocates; what is not needed comes back empty."""
    dx = h.new_empty(h.shape if need_dx else (0,))
    like = h if weight is None else weight
    return dx, like.new_empty(like.shape if need_dweight and weight is not None else (0,))


def gradient(
    backward: Callable[..., Any],
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    eps: float,
    offset: float,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    """Gradients of x and the weight; the forward saves x, the weight and one float32 a row."""
    found: tuple[Tensor, Tensor] = backward(dy, None, x, weight, rstd, eps, offset, *needs)
    return found


def gradient_add(
    backward: Callable[..., Any],
    dy: Tensor | None,
    dh: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    eps: float,
    offset: float,
    needs: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, the residual and the weight; the forward saves h, the weight and one float32 a row."""
    if dy is None:
        return dh, dh, None
    dx, dweight = backward(dy, dh, h, weight, rstd, eps, offset, needs[0] or needs[1], needs[2])
    return dx, dx, dweight


def formula(
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
    """The gradients in PyTorch that autograd can follow: rstd is computed again for that."""
    wide = compute_dtype(h.dtype, dy.dtype)
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


def placed_together(placements: Any, h: Any, weight: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Placements of h, the weight and its gradient: the weight is replicated, or has its rows where the heads are."""
    for rows, share in row_placements(placements, h.ndim):
        per_head = weight is not None and weight.ndim == 2 and rows.is_shard(h.ndim - 2)
        both = (placements.Shard(0), placements.Shard(0)) if per_head else (placements.Replicate(), share)
        yield rows, None if weight is None else both[0], both[1]


def sharding(placements: Any, x: Any, weight: Any, *scalars: Any) -> Shardings:
    """Where y, rstd, x and the weight may lie."""
    for rows, of_weight, _ in placed_together(placements, x, weight):
        yield [rows] * 2, [rows, of_weight]


def sharding_add(placements: Any, x: Any, residual: Any, weight: Any, *scalars: Any) -> Shardings:
    """Where y, h, rstd, x, the residual and the weight may lie."""
    for rows, of_weight, _ in placed_together(placements, x, weight):
        yield [rows] * 3, [rows, rows, of_weight]


def sharding_backward(
    placements: Any, dy: Any, dh: Any, h: Any, weight: Any, rstd: Any, eps: float, offset: float, *needs: bool
) -> Shardings:
    """Where dx, dweight and what goes in may lie."""
    nothing = placements.Replicate()  # what is not needed comes back empty, and is the same everywhere
    need_dx, need_dweight = needs
    for rows, of_weight, share in placed_together(placements, h, weight):
        outputs = [rows if need_dx else nothing, share if need_dweight and weight is not None else nothing]
        yield outputs, [rows, None if dh is None else rows, rows, of_weight, rows]


RMS_NORM: Rules = {
    "schema": "rms_norm(Tensor x, Tensor? weight, float eps, float offset, str casting) -> (Tensor y, Tensor rstd)",
    "fake": fake,
    "gradient": gradient,
    "flops": per_element(4),
    "sharding": sharding,
}
ADD_RMS_NORM: Rules = {
    "schema": "add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, float offset, str casting)"
    " -> (Tensor y, Tensor h, Tensor rstd)",
    "fake": fake_add,
    "gradient": gradient_add,
    "follows": {"h": ("x", "residual")},
    "flops": per_element(5),
    "sharding": sharding_add,
}
BACKWARD: Rules = {
    "schema": "rms_norm_backward(Tensor dy, Tensor? dh, Tensor h, Tensor? weight, Tensor rstd, float eps, float offset,"
    " bool need_dx, bool need_dweight) -> (Tensor dx, Tensor dweight)",
    "fake": fake_backward,
    "formula": formula,
    "flops": per_element(11),
    "sharding": sharding_backward,
}
