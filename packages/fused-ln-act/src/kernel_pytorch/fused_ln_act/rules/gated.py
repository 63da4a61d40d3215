"""`gated` and its gradient: one pair for all activations.

    y = activation(gate) * (up + offset)

Saved for the backward: gate and up, or what packs them, as they came in; nothing else.

The operation is elementwise, so DTensor may shard two tensors the same way over every dimension, including the last:
the output of a column-parallel projection is a valid input. A packed input may not be sharded over its last dimension,
which would separate gate and up. Nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._core.gradients import asks
from .._core.operator import Rules
from .._core.sharding import Shardings
from .activations import FLOPS, activate, derivative


def fake(gate: Tensor, up: Tensor | None, activation: str, alpha: float, limit: float | None, offset: float) -> Tensor:
    """What it allocates."""
    if up is None:
        return gate.new_empty((*gate.shape[:-1], gate.shape[-1] // 2))
    return gate.new_empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype))


@asks("backward dy gate up activation alpha limit offset needs")
def gradient(backward: Callable[..., Any], *given: Any) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up, or of the tensor that packs them."""
    *inputs, needs = given
    return backward(*inputs, *needs)


def flops(gate: Any, up: Any, activation: str, *_: Any, **__: Any) -> int:
    """Operations of the forward; shapes in the place of tensors."""
    return torch.Size(gate).numel() // (2 if up is None else 1) * (FLOPS[activation][0] + 1)


def sharding(placements: Any, a: Any) -> Shardings:
    """Where tensors may lie: all of them in one way."""
    dimensions = a.gate.ndim - 1 if a.up is None else a.gate.ndim
    for place in (placements.Replicate(), *map(placements.Shard, range(dimensions))):
        yield dict.fromkeys(("y", "gate", "up", "dy", "dgate", "dup"), place)


GATED_RULES: Rules = {
    "schema": "gated(Tensor gate, Tensor? up, str activation, float alpha, float? limit, float offset) -> Tensor",
    "fake": fake,
    "gradient": gradient,
    "flops": flops,
    "sharding": sharding,
}


# The gradient.


def fake_backward(a: Any) -> tuple[Tensor, Tensor]:
    """What it allocates; what is not needed comes back empty."""
    dgate = a.gate.new_empty(a.gate.shape if a.need_dgate else (0,))
    return dgate, a.gate.new_empty((0,)) if a.up is None else a.up.new_empty(a.up.shape if a.need_dup else (0,))


def formula(a: Any) -> tuple[Tensor, Tensor]:
    """The gradients in PyTorch that autograd can follow."""
    given_gate, given_up = a.gate.chunk(2, -1) if a.up is None else (a.gate, a.up)
    wide = torch.promote_types(torch.promote_types(given_gate.dtype, given_up.dtype), torch.float32)
    z, factor, dy = given_gate.to(wide), given_up.to(wide), a.dy.to(wide)
    if a.limit is not None:
        z, factor = z.clamp(max=a.limit), factor.clamp(-a.limit, a.limit)
    if a.activation == "silu":
        s = torch.sigmoid(a.alpha * z)
        value, slope = z * s, s + a.alpha * z * s * (1.0 - s)
    else:
        value, slope = activate(z, a.activation), derivative(z, a.activation)
    dgate, dup = dy * (factor + a.offset) * slope, dy * value
    if a.limit is not None:
        dgate = dgate.masked_fill(given_gate > a.limit, 0.0)
        dup = dup.masked_fill(given_up.abs() > a.limit, 0.0)
    if a.up is None:
        packed = torch.cat([dgate, dup], -1).to(a.gate.dtype) if a.need_dgate else a.gate.new_empty((0,))
        return packed, a.gate.new_empty((0,))
    return (
        dgate.to(a.gate.dtype) if a.need_dgate else a.gate.new_empty((0,)),
        dup.to(a.up.dtype) if a.need_dup else a.up.new_empty((0,)),
    )


def flops_backward(dy: Any, gate: Any, up: Any, activation: str, *_: Any, **__: Any) -> int:
    """Operations of the backward, which computes the activation again; shapes in the place of tensors."""
    return torch.Size(dy).numel() * (sum(FLOPS[activation]) + 3)


GATED_BACKWARD_RULES: Rules = {
    "schema": "gated_backward(Tensor dy, Tensor gate, Tensor? up, str activation, float alpha, float? limit,"
    " float offset, bool need_dgate, bool need_dup) -> (Tensor dgate, Tensor dup)",
    "fake": fake_backward,
    "formula": formula,
    "flops": flops_backward,
    "sharding": sharding,
}
