"""The operators of the Triton level: `bias_act`, which is `residual + dropout(activation(x + bias))`, and its gradient.

One pair serves both functions of this group: what is there is said by arguments. Saved for the backward: x, where there
is an activation; bias and seed. Never the sum, its activation, or the mask.

Nothing crosses an element, so DTensor may shard x and residual alike over every dimension: over the last one too, then
with the bias, as a column-parallel projection leaves them behind. Nothing is sent; of a bias that every rank has, each
rank holds its own rows' part of the gradient. With dropout the mask goes by the place of an element in the whole
tensor, which a rank that holds a part does not know: then everything is replicated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kernel_pytorch.fused_ln_act._core.operator import declare
from kernel_pytorch.fused_ln_act.activations import FLOPS, derivative
from kernel_pytorch.fused_ln_act.philox import dropout

Placed = Iterator[tuple[list[Any], list[Any]]]


def launch() -> Callable[..., Any]:
    """The launcher."""
    from .kernels import forward

    return forward.bias_act


def fake(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor | None, dropout_p: float, activation: str
) -> Tensor:
    """What it allocates."""
    return x.new_empty(x.shape, dtype=x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype))


def save(x: Tensor, activation: str) -> tuple[Tensor | None]:
    """What the gradient is made of beside the parameters."""
    return (None if activation == "identity" else x,)


def gradient(
    dy: Tensor,
    saved: tuple[Tensor | None],
    bias: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
    activation: str,
    needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Of x, bias and residual."""
    # Where nothing is done to x, its gradient is there already.
    compute_dx = needs[0] and (dropout_p > 0.0 or activation != "identity")
    dx, dbias = dy, None
    if compute_dx or needs[1]:
        found, dbias = bias_act_backward(dy, *saved, bias, seed, dropout_p, activation, compute_dx, needs[1])
        dx = found if compute_dx else dy
    return dx, dbias, dy, None


def flops(x: Any, bias: Any, residual: Any, seed: Any, dropout_p: float, activation: str, **_: Any) -> int:
    """Operations of the forward; shapes in the place of tensors."""
    each = FLOPS[activation][0] + (bias is not None) + (residual is not None) + (dropout_p > 0.0)
    return each * torch.Size(x).numel()


def placements(dtensor: Any, x: Any, bias: Any, residual: Any, seed: Any, dropout_p: float, activation: str) -> Placed:
    """Where y, x, bias, residual and seed may lie."""
    for rows, of_bias, _ in placed_together(dtensor, x, dropout_p):
        inputs = (x, rows), (bias, of_bias), (residual, rows), (seed, dtensor.Replicate())
        yield [rows], [None if tensor is None else place for tensor, place in inputs]


bias_act = declare(
    "bias_act(Tensor x, Tensor? bias, Tensor? residual, Tensor? seed, float dropout_p, str activation) -> Tensor",
    launch=launch,
    fake=fake,
    save=save,
    gradient=gradient,
    flops=flops,
    sharding=placements,
)


# The gradient.


def launch_backward() -> Callable[..., Any]:
    """The launcher."""
    from .kernels import backward

    return backward.bias_act_backward


def fake_backward(
    dy: Tensor,
    x: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
    activation: str,
    need_dx: bool,
    need_dbias: bool,
) -> tuple[Tensor, Tensor]:
    """What it allocates; what is not needed comes back empty."""
    dx = dy.new_empty(dy.shape if need_dx else (0,), dtype=(dy if x is None else x).dtype)
    return dx, dy.new_empty((0,)) if bias is None else bias.new_empty(bias.shape if need_dbias else (0,))


def formula(
    dy: Tensor,
    x: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
    activation: str,
    need_dx: bool,
    need_dbias: bool,
) -> tuple[Tensor, Tensor]:
    """The gradients of `kernels/backward.py` in PyTorch that autograd can follow."""
    dz = dy.to(torch.promote_types(dy.dtype, torch.float32))
    if dropout_p > 0.0:
        assert seed is not None
        dz = dropout(dz, seed, dropout_p)
    if activation != "identity":
        assert x is not None
        z = x.to(dz.dtype)
        dz = dz * derivative(z if bias is None else z + bias.to(dz.dtype), activation)
    dx = dz.to((dy if x is None else x).dtype)
    # An operator's output is no input of it, which dx would be where nothing is done.
    dx = (dx.clone() if dx is dy else dx) if need_dx else dx.new_empty((0,))
    if bias is None or not need_dbias:
        return dx, (dy if bias is None else bias).new_empty((0,))
    return dx, dz.sum_to_size(bias.shape).to(bias.dtype)


def flops_backward(dy: Any, x: Any, bias: Any, seed: Any, dropout_p: float, activation: str, *_: Any, **__: Any) -> int:
    """Operations of the backward; shapes in the place of tensors."""
    each = 0 if x is None else FLOPS[activation][1] + 1
    each += (bias is not None) + (dropout_p > 0.0)
    return each * torch.Size(dy).numel()


def placements_backward(
    dtensor: Any,
    dy: Any,
    x: Any,
    bias: Any,
    seed: Any,
    dropout_p: float,
    activation: str,
    need_dx: bool,
    need_dbias: bool,
) -> Placed:
    """Where dx, dbias and what goes in may lie."""
    nothing = dtensor.Replicate()  # what is not needed comes back empty, and is the same everywhere
    for rows, of_bias, share in placed_together(dtensor, dy, dropout_p):
        outputs = [rows if need_dx else nothing, share if need_dbias and bias is not None else nothing]
        inputs = (dy, rows), (x, rows), (bias, of_bias), (seed, nothing)
        yield outputs, [None if tensor is None else place for tensor, place in inputs]


bias_act_backward = declare(
    "bias_act_backward(Tensor dy, Tensor? x, Tensor? bias, Tensor? seed, float dropout_p, str activation,"
    " bool need_dx, bool need_dbias) -> (Tensor dx, Tensor dbias)",
    launch=launch_backward,
    fake=fake_backward,
    formula=formula,
    flops=flops_backward,
    sharding=placements_backward,
)


def placed_together(dtensor: Any, x: Any, dropout_p: float) -> Iterator[tuple[Any, Any, Any]]:
    """Placements of x, the bias and its gradient that belong together."""
    replicate, partial, shard = dtensor.Replicate(), dtensor.Partial(), dtensor.Shard
    yield replicate, replicate, replicate
    if dropout_p == 0.0:
        for dimension in range(x.ndim - 1):
            yield shard(dimension), replicate, partial
        yield shard(x.ndim - 1), shard(0), shard(0)
