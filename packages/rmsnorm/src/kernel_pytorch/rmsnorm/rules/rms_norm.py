"""`rms_norm`, `add_rms_norm` and the gradient of both.

Rows are independent, so DTensor may shard x over every dimension but the last: y, the sum and rstd lie like x, each
rank holds its rows' part of the gradient of the weight, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._core.gradients import asks
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


def fake_add(a: Any) -> tuple[Tensor, Tensor, Tensor]:
    """What it allocates."""
    h = a.x.new_empty(a.x.shape, dtype=torch.promote_types(a.x.dtype, a.residual.dtype))
    y, rstd = fake(h, a.weight, a.eps, a.offset, a.casting)
    return y, h, rstd


def fake_backward(a: Any) -> tuple[Tensor, Tensor]:
    """What it allocates; what is not needed comes back empty."""
    dx = a.h.new_empty(a.h.shape if a.need_dx else (0,))
    like = a.h if a.weight is None else a.weight
    return dx, like.new_empty(like.shape if a.need_dweight and a.weight is not None else (0,))


@asks("backward dy x weight rstd eps offset needs")
def gradient(backward: Callable[..., Any], *given: Any) -> tuple[Tensor, Tensor]:
    """Gradients of x and the weight; the forward saves x, the weight and the rstd of each row."""
    dy, *saved, needs = given
    return backward(dy, None, *saved, *needs)


@asks("backward dy dh h weight rstd eps offset needs")
def gradient_add(backward: Callable[..., Any], *given: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of x, the residual and the weight; the forward saves h, the weight and the rstd of each row."""
    dy, dh, *saved, needs = given
    if dy is None:
        return dh, dh, None
    dx, dweight = backward(dy, dh, *saved, needs[0] or needs[1], needs[2])
    return dx, dx, dweight


def formula(a: Any) -> tuple[Tensor, Tensor]:
    """The gradients in PyTorch that autograd can follow: rstd is computed again for that."""
    wide = compute_dtype(a.h.dtype, a.dy.dtype)
    x, dy, nothing = a.h.to(wide), a.dy.to(wide), a.h.new_empty((0,))
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + a.eps)
    x_hat = x * rstd
    g = dy if a.weight is None else dy * (a.offset + a.weight.to(wide))
    dx = rstd * (g - x_hat * (g * x_hat).mean(-1, keepdim=True))
    if a.dh is not None:
        dx = dx + a.dh.to(wide)
    dweight = nothing.clone()
    if a.weight is not None and a.need_dweight:
        dweight = (dy * x_hat).sum_to_size(a.weight.shape).to(a.weight.dtype)
    return dx.to(a.h.dtype) if a.need_dx else nothing, dweight


def sharding(placements: Any, a: Any) -> Shardings:
    """Where tensors may lie: the weight is replicated, or has its rows where the heads are."""
    x = a[0]  # or dy, which has its shape
    for rows, share in row_placements(placements, x.ndim):
        found = dict.fromkeys(("x", "residual", "h", "y", "rstd", "dy", "dh", "dx"), rows)
        if a.weight is not None and a.weight.ndim == 2 and rows.is_shard(x.ndim - 2):
            yield {**found, "weight": placements.Shard(0), "dweight": placements.Shard(0)}
        else:
            yield {**found, "dweight": share}


RMS_NORM_RULES: Rules = {
    "schema": "rms_norm(Tensor x, Tensor? weight, float eps, float offset, str casting) -> (Tensor y, Tensor rstd)",
    "fake": fake,
    "gradient": gradient,
    "flops": per_element(4),
    "sharding": sharding,
}
ADD_RMS_NORM_RULES: Rules = {
    "schema": "add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, float offset, str casting)"
    " -> (Tensor y, Tensor h, Tensor rstd)",
    "fake": fake_add,
    "gradient": gradient_add,
    "follows": {"h": ("x", "residual")},
    "flops": per_element(5),
    "sharding": sharding,
}
BACKWARD_RULES: Rules = {
    "schema": "rms_norm_backward(Tensor dy, Tensor? dh, Tensor h, Tensor? weight, Tensor rstd, float eps, float offset,"
    " bool need_dx, bool need_dweight) -> (Tensor dx, Tensor dweight)",
    "fake": fake_backward,
    "formula": formula,
    "flops": per_element(11),
    "sharding": sharding,
}
