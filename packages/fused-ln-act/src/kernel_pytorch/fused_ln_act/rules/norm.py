"""`norm_act` and its gradient: one pair for all norms; arguments select the norm, the activation and optional inputs.

    h = residual + dropout(x)
    y = dropout(activation(norm(x)))        or, with a residual, activation(norm(h))

Saved for the backward: what was normalised (x, or h, which is a result already), the parameters, the seed, and mean and
rstd, two float32 a row (one for the RMS norm). The input of the activation and the mask of dropout are recomputed.

Rows are independent, so DTensor may shard x over every dimension but the last, the parameters are replicated, and
nothing is sent: y, h and the statistics are sharded like x, and each rank holds the part of the parameters' gradients
from its own rows. With dropout the mask depends on the position of an element in the whole tensor, which a rank that
holds a part does not know: then everything is replicated. DTensor first redistributes other inputs (a sharded last
dimension, a pending sum) to the cheapest of these placements.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._core.direct_calls import DTYPE_NAMES
from .._core.gradients import asks
from .._core.operator import Rules
from .._core.philox import dropout
from .._core.sharding import Shardings, row_placements
from .activations import FLOPS, derivative

# Operations of the norm, forward and backward: what "layer" and "rms" do to an element, without the activation.
FLOPS_OF_NORM = {"layer": (7, 13), "rms": (4, 10)}


def fake(a: Any) -> tuple[Tensor, Tensor, Tensor]:
    """What it allocates; without a residual h is empty, since it would be x."""
    dtype = a.x.dtype if a.residual is None else torch.promote_types(a.x.dtype, a.residual.dtype)
    return (
        a.x.new_empty(a.x.shape, dtype=dtype),
        a.x.new_empty((0,) if a.residual is None else a.x.shape, dtype=dtype),
        a.x.new_empty(
            (2 if a.norm == "layer" else 1, *a.x.shape[:-1]), dtype=torch.promote_types(dtype, torch.float32)
        ),
    )


def save(x: Tensor, residual: Tensor | None, h: Tensor) -> tuple[Tensor]:
    """What was normalised."""
    return (x if residual is None else h,)


@asks("backward dy dh saved weight bias seed statistics eps dropout_p norm activation needs dtypes")
def gradient(backward: Callable[..., Any], *given: Any) -> tuple[Tensor | None, ...]:
    """Gradients of x, the residual, weight and bias; None for the seed."""
    dy, dh, saved, *others, dropout_p, norm, activation, needs, dtypes = given
    x_dtype, residual_dtype = dtypes[:2]
    need_x, need_residual, need_dweight, need_dbias, _ = needs
    if dy is None:
        assert dh is not None
        if dropout_p == 0.0:  # only the sum was used
            return dh, dh, None, None, None
        dy, need_dweight, need_dbias = torch.zeros_like(dh), False, False
    # Without dropout the gradients of x and of the residual are the same, but for their dtypes.
    one = residual_dtype is None or (dropout_p == 0.0 and residual_dtype == x_dtype)
    dx, dresidual, dweight, dbias = backward(
        dy, dh, *saved, *others, dropout_p, norm, activation,
        DTYPE_NAMES[x_dtype], "" if residual_dtype is None else DTYPE_NAMES[residual_dtype],
        need_x or (one and need_residual), need_residual and not one, need_dweight, need_dbias,
    )  # fmt: skip
    return dx, dx if one else dresidual, dweight if need_dweight else None, dbias if need_dbias else None, None


def flops(a: Any) -> int:
    """Operations of the forward; shapes in the place of tensors."""
    each = FLOPS_OF_NORM[a.norm][0] + FLOPS[a.activation][0]
    each += (a.residual is not None) + (a.bias is not None) + (a.dropout_p > 0.0)
    return each * torch.Size(a.x).numel()


def sharding(placements: Any, a: Any) -> Shardings:
    """Where tensors may lie; with dropout everything is replicated."""
    for rows, share in row_placements(placements, a[0].ndim if a.dropout_p == 0.0 else 1):
        found = dict.fromkeys(("x", "residual", "y", "h", "dy", "dh", "dx", "dresidual"), rows)
        if getattr(a, "residual", a) is None:
            found.pop("h")  # which is empty
        if not getattr(a, "residual_dtype", True):
            found.pop("dresidual")
        # The statistics have a dimension more, in front: mean and rstd.
        statistics = placements.Shard(rows.dim + 1) if rows.is_shard() else rows
        yield {**found, "statistics": statistics, "dweight": share, "dbias": share}


NORM_ACT_RULES: Rules = {
    "schema": "norm_act(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, Tensor? seed, float eps,"
    " float dropout_p, str norm, str activation) -> (Tensor y, Tensor h, Tensor statistics)",
    "fake": fake,
    "save": save,
    "gradient": gradient,
    "follows": {"h": ("x", "residual")},
    "flops": flops,
    "sharding": sharding,
}


# The gradient.


def fake_backward(a: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What it allocates; what is not needed comes back empty."""
    nothing: tuple[int, ...] = (0,)
    of_x, of_residual = getattr(torch, a.x_dtype), getattr(torch, a.residual_dtype or a.x_dtype)
    return (
        a.h.new_empty(a.h.shape if a.need_dx else nothing, dtype=of_x),
        a.h.new_empty(a.h.shape if a.need_dresidual and a.residual_dtype else nothing, dtype=of_residual),
        a.h.new_empty(nothing)
        if a.weight is None
        else a.weight.new_empty(a.weight.shape if a.need_dweight else nothing),
        a.h.new_empty(nothing) if a.bias is None else a.bias.new_empty(a.bias.shape if a.need_dbias else nothing),
    )


def formula(a: Any) -> tuple[Tensor, ...]:
    """The gradients in PyTorch that autograd can follow; statistics are made again."""
    wide = torch.promote_types(a.h.dtype, torch.float32)
    x_hat, dz = a.h.to(wide), a.dy.to(wide)
    if a.norm == "layer":
        x_hat = x_hat - x_hat.mean(-1, keepdim=True)
    rstd = torch.rsqrt(x_hat.square().mean(-1, keepdim=True) + a.eps)
    x_hat = x_hat * rstd
    z = x_hat if a.weight is None else x_hat * a.weight.to(wide)
    z = z if a.bias is None else z + a.bias.to(wide)
    drops = a.dropout_p > 0.0 and a.seed is not None
    if drops and not a.residual_dtype:
        dz = dropout(dz, a.seed, a.dropout_p)
    if a.activation != "identity":
        dz = dz * derivative(z, a.activation)
    g = dz if a.weight is None else dz * a.weight.to(wide)
    dh_all = g - x_hat * (g * x_hat).mean(-1, keepdim=True)
    if a.norm == "layer":
        dh_all = dh_all - g.mean(-1, keepdim=True)
    dh_all = dh_all * rstd
    if a.dh is not None:
        dh_all = dh_all + a.dh.to(wide)
    dx = dropout(dh_all, a.seed, a.dropout_p) if drops and a.residual_dtype else dh_all.clone()
    found = (
        dx.to(getattr(torch, a.x_dtype)),
        dh_all.to(getattr(torch, a.residual_dtype)) if a.residual_dtype else None,
        None if a.weight is None else (dz * x_hat).sum_to_size(a.weight.shape).to(a.weight.dtype),
        None if a.bias is None else dz.sum_to_size(a.bias.shape).to(a.bias.dtype),
    )
    nothing = fake_backward(a._replace(need_dx=False, need_dresidual=False, need_dweight=False, need_dbias=False))
    return tuple(empty if t is None or not need else t for t, need, empty in zip(found, a[-4:], nothing, strict=True))


def flops_backward(a: Any) -> int:
    """Operations of the backward; shapes in the place of tensors."""
    each = FLOPS_OF_NORM[a.norm][1] + FLOPS[a.activation][1]
    each += (a.dh is not None) + (a.bias is not None) + (a.dropout_p > 0.0)
    return each * torch.Size(a.h).numel()


NORM_ACT_BACKWARD_RULES: Rules = {
    "schema": "norm_act_backward(Tensor dy, Tensor? dh, Tensor h, Tensor? weight, Tensor? bias, Tensor? seed,"
    " Tensor statistics, float eps, float dropout_p, str norm, str activation, str x_dtype, str residual_dtype,"
    " bool need_dx, bool need_dresidual, bool need_dweight, bool need_dbias)"
    " -> (Tensor dx, Tensor dresidual, Tensor dweight, Tensor dbias)",
    "fake": fake_backward,
    "formula": formula,
    "flops": flops_backward,
    "sharding": sharding,
}
