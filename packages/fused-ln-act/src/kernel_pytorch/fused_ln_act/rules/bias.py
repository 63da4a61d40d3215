"""`bias_act`, which is `activation(x + bias)`, `bias_dropout_add`, `residual + dropout(x + bias)`, and their gradients.

Saved for the backward: x, where there is an activation; bias and seed. Never the sum, its activation, or the mask.

The operation is elementwise, so DTensor may shard x and residual the same way over every dimension, and over the last
one together with the bias, as a column-parallel projection leaves them. Nothing is sent; if every rank has the bias,
each rank holds the part of its gradient from its own rows. With dropout the mask depends on the position of an element
in the whole tensor, which a rank that holds a part does not know: then everything is replicated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._core.direct_calls import DTYPE_NAMES
from .._core.gradients import asks
from .._core.operator import Rules, like_first
from .._core.philox import dropout
from .._core.sharding import Shardings, row_placements
from .activations import FLOPS, derivative


def sharding(placements: Any, a: Any) -> Shardings:
    """Where tensors may lie; with dropout everything is replicated."""
    x = a[0]  # or dy, which has its shape
    choices = [(rows, placements.Replicate(), share) for rows, share in row_placements(placements, x.ndim)]
    choices.append((placements.Shard(x.ndim - 1), placements.Shard(0), placements.Shard(0)))
    for rows, of_bias, share in choices[: 1 if getattr(a, "p", 0.0) > 0.0 else None]:
        yield {**dict.fromkeys(("x", "residual", "y", "dy", "dx"), rows), "bias": of_bias, "dbias": share}


# Bias and activation.


def save(x: Tensor, bias: Tensor | None, activation: str) -> tuple[Tensor | None, Tensor | None]:
    """What the gradient is made of: without a derivative x is not needed."""
    return None if activation == "identity" else x, bias


@asks("backward dy saved activation needs")
def gradient(backward: Callable[..., Any], *given: Any) -> tuple[Tensor, Tensor | None]:
    """Gradients of x and bias."""
    dy, saved, activation, needs = given
    # Where nothing is done to x, its gradient is there already.
    compute_dx = needs[0] and activation != "identity"
    if not compute_dx and not needs[1]:
        return dy, None
    dx, dbias = backward(dy, *saved, activation, compute_dx, needs[1])
    return dx if compute_dx else dy, dbias


def flops(x: Any, bias: Any, activation: str, *_: Any, **__: Any) -> int:
    """Operations of the forward; shapes in the place of tensors."""
    return torch.Size(x).numel() * (FLOPS[activation][0] + (bias is not None))


BIAS_ACT_RULES: Rules = {
    "schema": "bias_act(Tensor x, Tensor? bias, str activation) -> Tensor",
    "fake": like_first,
    "save": save,
    "gradient": gradient,
    "flops": flops,
    "sharding": sharding,
}


def fake_backward(a: Any) -> tuple[Tensor, Tensor]:
    """What it allocates; what is not needed comes back empty."""
    like = a.dy if a.x is None else a.x
    dx = like.new_empty(a.dy.shape if a.need_dx else (0,))
    return dx, like.new_empty((0,)) if a.bias is None else a.bias.new_empty(a.bias.shape if a.need_dbias else (0,))


def formula(a: Any) -> tuple[Tensor, Tensor]:
    """The gradients in PyTorch that autograd can follow."""
    like = a.dy if a.x is None else a.x
    dz = a.dy.to(torch.promote_types(a.dy.dtype, torch.float32))
    if a.activation != "identity":
        assert a.x is not None
        z = a.x.to(dz.dtype)
        dz = dz * derivative(z if a.bias is None else z + a.bias.to(dz.dtype), a.activation)
    return _gradients(a.dy, dz, a.bias, like, like.dtype, a.need_dx, a.need_dbias)


def _gradients(
    dy: Tensor, dz: Tensor, bias: Tensor | None, like: Tensor, dtype: torch.dtype, need_dx: bool, need_dbias: bool
) -> tuple[Tensor, Tensor]:
    """`(dx, dbias)` of the gradient of the sum; what is not needed is empty."""
    dx = dz.to(dtype)
    # An operator's output is no input of it, which dx would be where nothing is done.
    dx = (dx.clone() if dx is dy else dx) if need_dx else dx.new_empty((0,))
    if bias is None or not need_dbias:
        return dx, (like if bias is None else bias).new_empty((0,))
    return dx, dz.sum_to_size(bias.shape).to(bias.dtype)


def flops_backward(dy: Any, x: Any, bias: Any, activation: str, *_: Any, **__: Any) -> int:
    """Operations of the backward; shapes in the place of tensors."""
    return torch.Size(dy).numel() * ((0 if x is None else FLOPS[activation][1] + 1) + (bias is not None))


BIAS_ACT_BACKWARD_RULES: Rules = {
    "schema": "bias_act_backward(Tensor dy, Tensor? x, Tensor? bias, str activation, bool need_dx, bool need_dbias)"
    " -> (Tensor dx, Tensor dbias)",
    "fake": fake_backward,
    "formula": formula,
    "flops": flops_backward,
    "sharding": sharding,
}


# Bias, dropout and residual.


def fake_add(x: Tensor, bias: Tensor | None, residual: Tensor, seed: Tensor | None, p: float) -> Tensor:
    """What it allocates."""
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))


@asks("backward dy bias seed p dtypes needs")
def gradient_add(backward: Callable[..., Any], *given: Any) -> tuple[Tensor, Tensor | None, Tensor, None]:
    """Gradients of x, bias and residual; None for the seed."""
    dy, bias, seed, p, dtypes, needs = given
    # Where nothing is done to x, its gradient is there already.
    compute_dx = needs[0] and (p > 0.0 or dy.dtype != dtypes[0])
    if not compute_dx and not needs[1]:
        return dy, None, dy, None
    dx, dbias = backward(dy, bias, seed, p, DTYPE_NAMES[dtypes[0]], compute_dx, needs[1])
    return dx if compute_dx else dy, dbias, dy, None


def flops_add(x: Any, bias: Any, residual: Any, seed: Any, p: float, *_: Any, **__: Any) -> int:
    """Operations of the forward; shapes in the place of tensors."""
    return torch.Size(x).numel() * (1 + (bias is not None) + (p > 0.0))


BIAS_DROPOUT_ADD_RULES: Rules = {
    "schema": "bias_dropout_add(Tensor x, Tensor? bias, Tensor residual, Tensor? seed, float p) -> Tensor",
    "fake": fake_add,
    "gradient": gradient_add,
    "flops": flops_add,
    "sharding": sharding,
}


def fake_add_backward(a: Any) -> tuple[Tensor, Tensor]:
    """What it allocates; what is not needed comes back empty."""
    dx = a.dy.new_empty(a.dy.shape if a.need_dx else (0,), dtype=getattr(torch, a.x_dtype))
    return dx, a.dy.new_empty((0,)) if a.bias is None else a.bias.new_empty(a.bias.shape if a.need_dbias else (0,))


def formula_add(a: Any) -> tuple[Tensor, Tensor]:
    """The gradients in PyTorch that autograd can follow."""
    dz = a.dy.to(torch.promote_types(a.dy.dtype, torch.float32))
    if a.p > 0.0:
        assert a.seed is not None
        dz = dropout(dz, a.seed, a.p)
    return _gradients(a.dy, dz, a.bias, a.dy, getattr(torch, a.x_dtype), a.need_dx, a.need_dbias)


def flops_add_backward(dy: Any, bias: Any, seed: Any, p: float, *_: Any, **__: Any) -> int:
    """Operations of the backward; shapes in the place of tensors."""
    return torch.Size(dy).numel() * ((bias is not None) + (p > 0.0))


BIAS_DROPOUT_ADD_BACKWARD_RULES: Rules = {
    "schema": "bias_dropout_add_backward(Tensor dy, Tensor? bias, Tensor? seed, float p, str x_dtype, bool need_dx,"
    " bool need_dbias) -> (Tensor dx, Tensor dbias)",
    "fake": fake_add_backward,
    "formula": formula_add,
    "flops": flops_add_backward,
    "sharding": sharding,
}
