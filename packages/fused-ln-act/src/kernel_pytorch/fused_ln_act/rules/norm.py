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

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .._core.direct_calls import DTYPE_NAMES
from .._core.operator import Rules
from .._core.philox import dropout
from .._core.sharding import Shardings
from .activations import FLOPS, derivative

# Operations of the norm, forward and backward: what "layer" and "rms" do to an element, without the activation.
FLOPS_OF_NORM = {"layer": (7, 13), "rms": (4, 10)}


def fake(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    eps: float,
    dropout_p: float,
    norm: str,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """What it allocates; without a residual h is empty, since it would be x."""
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    return (
        x.new_empty(x.shape, dtype=dtype),
        x.new_empty((0,) if residual is None else x.shape, dtype=dtype),
        x.new_empty((2 if norm == "layer" else 1, *x.shape[:-1]), dtype=torch.promote_types(dtype, torch.float32)),
    )


def save(x: Tensor, residual: Tensor | None, h: Tensor) -> tuple[Tensor]:
    """What was normalised."""
    return (x if residual is None else h,)


def gradient(
    backward: Callable[..., Any],
    dy: Tensor | None,
    dh: Tensor | None,
    saved: tuple[Tensor],
    weight: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    statistics: Tensor,
    eps: float,
    dropout_p: float,
    norm: str,
    activation: str,
    needs: Sequence[bool],
    dtypes: Sequence[torch.dtype | None],
) -> tuple[Tensor | None, ...]:
    """Gradients of x, the residual, weight and bias; None for the seed."""
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
        dy, dh, *saved, weight, bias, seed, statistics, eps, dropout_p, norm, activation,
        DTYPE_NAMES[x_dtype], "" if residual_dtype is None else DTYPE_NAMES[residual_dtype],
        need_x or (one and need_residual), need_residual and not one, need_dweight, need_dbias,
    )  # fmt: skip
    return dx, dx if one else dresidual, dweight if need_dweight else None, dbias if need_dbias else None, None


def flops(
    x: Any, residual: Any, weight: Any, bias: Any, seed: Any, eps: float, dropout_p: float, norm: str,
    activation: str, **_: Any,
) -> int:  # fmt: skip
    """Operations of the forward; shapes in the place of tensors."""
    each = FLOPS_OF_NORM[norm][0] + FLOPS[activation][0]
    each += (residual is not None) + (bias is not None) + (dropout_p > 0.0)
    return each * torch.Size(x).numel()


def sharding(
    placements: Any, x: Any, residual: Any, weight: Any, bias: Any, seed: Any, eps: float, dropout_p: float, *_: str
) -> Shardings:
    """Where y, h, the statistics and what goes in may lie."""
    whole = placements.Replicate()
    for rows, statistics, _share in placed_together(placements, x, dropout_p):
        inputs = (x, rows), (residual, rows), (weight, whole), (bias, whole), (seed, whole)
        outputs = [rows, whole if residual is None else rows, statistics]
        yield outputs, [None if tensor is None else place for tensor, place in inputs]


NORM_ACT: Rules = {
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


def fake_backward(
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    statistics: Tensor,
    eps: float,
    dropout_p: float,
    norm: str,
    activation: str,
    x_dtype: str,
    residual_dtype: str,
    need_dx: bool,
    need_dresidual: bool,
    need_dweight: bool,
    need_dbias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What it allocates; what is not needed comes back empty."""
    nothing: tuple[int, ...] = (0,)
    of_x, of_residual = getattr(torch, x_dtype), getattr(torch, residual_dtype or x_dtype)
    return (
        h.new_empty(h.shape if need_dx else nothing, dtype=of_x),
        h.new_empty(h.shape if need_dresidual and residual_dtype else nothing, dtype=of_residual),
        h.new_empty(nothing) if weight is None else weight.new_empty(weight.shape if need_dweight else nothing),
        h.new_empty(nothing) if bias is None else bias.new_empty(bias.shape if need_dbias else nothing),
    )


def formula(
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    statistics: Tensor,
    eps: float,
    dropout_p: float,
    norm: str,
    activation: str,
    x_dtype: str,
    residual_dtype: str,
    *needs: bool,
) -> tuple[Tensor, ...]:
    """The gradients in PyTorch that autograd can follow; statistics are made again."""
    wide = torch.promote_types(h.dtype, torch.float32)
    x_hat, dz = h.to(wide), dy.to(wide)
    if norm == "layer":
        x_hat = x_hat - x_hat.mean(-1, keepdim=True)
    rstd = torch.rsqrt(x_hat.square().mean(-1, keepdim=True) + eps)
    x_hat = x_hat * rstd
    z = x_hat if weight is None else x_hat * weight.to(wide)
    z = z if bias is None else z + bias.to(wide)
    drops = dropout_p > 0.0 and seed is not None
    if drops and not residual_dtype:
        dz = dropout(dz, seed, dropout_p)  # type: ignore[arg-type]
    if activation != "identity":
        dz = dz * derivative(z, activation)
    g = dz if weight is None else dz * weight.to(wide)
    dh_all = g - x_hat * (g * x_hat).mean(-1, keepdim=True)
    if norm == "layer":
        dh_all = dh_all - g.mean(-1, keepdim=True)
    dh_all = dh_all * rstd
    if dh is not None:
        dh_all = dh_all + dh.to(wide)
    dx = dropout(dh_all, seed, dropout_p) if drops and residual_dtype else dh_all.clone()  # type: ignore[arg-type]
    found = (
        dx.to(getattr(torch, x_dtype)),
        dh_all.to(getattr(torch, residual_dtype)) if residual_dtype else None,
        None if weight is None else (dz * x_hat).sum_to_size(weight.shape).to(weight.dtype),
        None if bias is None else dz.sum_to_size(bias.shape).to(bias.dtype),
    )
    nothing = fake_backward(
        dy, dh, h, weight, bias, seed, statistics, eps, dropout_p, norm, activation, x_dtype, residual_dtype,
        *[False] * 4,
    )  # fmt: skip
    return tuple(empty if t is None or not need else t for t, need, empty in zip(found, needs, nothing, strict=True))


def flops_backward(
    dy: Any, dh: Any, h: Any, weight: Any, bias: Any, seed: Any, statistics: Any, eps: float, dropout_p: float,
    norm: str, activation: str, *_: Any, **__: Any,
) -> int:  # fmt: skip
    """Operations of the backward; shapes in the place of tensors."""
    each = FLOPS_OF_NORM[norm][1] + FLOPS[activation][1]
    each += (dh is not None) + (bias is not None) + (dropout_p > 0.0)
    return each * torch.Size(h).numel()


def sharding_backward(
    placements: Any, dy: Any, dh: Any, h: Any, weight: Any, bias: Any, seed: Any, statistics: Any, eps: float,
    dropout_p: float, norm: str, activation: str, x_dtype: str, residual_dtype: str, need_dx: bool,
    need_dresidual: bool, need_dweight: bool, need_dbias: bool,
) -> Shardings:  # fmt: skip
    """Where the gradients and what goes in may lie."""
    whole = placements.Replicate()
    needs = (
        need_dx, need_dresidual and residual_dtype != "", need_dweight and weight is not None,
        need_dbias and bias is not None,
    )  # fmt: skip
    for rows, of_rows, share in placed_together(placements, h, dropout_p):
        # What is not needed comes back empty, and is the same everywhere.
        outputs = [place if need else whole for place, need in zip((rows, rows, share, share), needs, strict=True)]
        parameters = (weight, whole), (bias, whole), (seed, whole)
        inputs = (dy, rows), (dh, rows), (h, rows), *parameters, (statistics, of_rows)
        yield outputs, [None if tensor is None else place for tensor, place in inputs]


NORM_ACT_BACKWARD: Rules = {
    "schema": "norm_act_backward(Tensor dy, Tensor? dh, Tensor h, Tensor? weight, Tensor? bias, Tensor? seed,"
    " Tensor statistics, float eps, float dropout_p, str norm, str activation, str x_dtype, str residual_dtype,"
    " bool need_dx, bool need_dresidual, bool need_dweight, bool need_dbias)"
    " -> (Tensor dx, Tensor dresidual, Tensor dweight, Tensor dbias)",
    "fake": fake_backward,
    "formula": formula,
    "flops": flops_backward,
    "sharding": sharding_backward,
}


def placed_together(placements: Any, x: Any, dropout_p: float) -> Iterator[tuple[Any, Any, Any]]:
    """Placements of x, the statistics and the parameters' gradients that belong together."""
    yield (placements.Replicate(),) * 3
    if dropout_p == 0.0:
        for dimension in range(x.ndim - 1):
            # The statistics have a dimension more, in front: mean and rstd.
            yield placements.Shard(dimension), placements.Shard(dimension + 1), placements.Partial()
