"""The operators of the Triton level, `gated` and its gradient: one pair for all activations.

Saved for the backward: gate and up, or what packs them, as they came in; nothing else.

Nothing crosses an element, so DTensor may shard two tensors alike over every dimension, the last one too: what a
column-parallel projection leaves behind goes in as it is. A packed input may not be cut across its last dimension,
where gate and up would part. Nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kernel_pytorch.fused_ln_act._core.operator import declare
from kernel_pytorch.fused_ln_act.activations import FLOPS, activate, derivative

from .levels.reference import halves, widen_and_clamp

Placed = Iterator[tuple[list[Any], list[Any]]]


def launch() -> Callable[..., Any]:
    """The launcher."""
    from .kernels import forward

    return forward.gated


def fake(gate: Tensor, up: Tensor | None, activation: str, alpha: float, limit: float | None, offset: float) -> Tensor:
    """What it allocates."""
    if up is None:
        return gate.new_empty((*gate.shape[:-1], gate.shape[-1] // 2))
    return gate.new_empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype))


def gradient(
    dy: Tensor,
    gate: Tensor,
    up: Tensor | None,
    activation: str,
    alpha: float,
    limit: float | None,
    offset: float,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    """Of gate and up, or of what packs them."""
    found: tuple[Tensor, Tensor] = gated_backward(dy, gate, up, activation, alpha, limit, offset, *needs)
    return found


def flops(gate: Any, up: Any, activation: str, *_: Any, **__: Any) -> int:
    """Operations of the forward; shapes in the place of tensors."""
    return torch.Size(gate).numel() // (2 if up is None else 1) * (FLOPS[activation][0] + 1)


def placements(dtensor: Any, gate: Any, up: Any, *scalars: Any) -> Placed:
    """Where y, gate and up may lie."""
    for place in places(dtensor, gate, up):
        yield [place], [place, None if up is None else place]


gated = declare(
    "gated(Tensor gate, Tensor? up, str activation, float alpha, float? limit, float offset) -> Tensor",
    launch=launch,
    fake=fake,
    gradient=gradient,
    flops=flops,
    sharding=placements,
)


# The gradient.


def launch_backward() -> Callable[..., Any]:
    """The launcher."""
    from .kernels import backward

    return backward.gated_backward


def fake_backward(
    dy: Tensor,
    gate: Tensor,
    up: Tensor | None,
    activation: str,
    alpha: float,
    limit: float | None,
    offset: float,
    need_dgate: bool,
    need_dup: bool,
) -> tuple[Tensor, Tensor]:
    """What it allocates; what is not needed comes back empty."""
    dgate = gate.new_empty(gate.shape if need_dgate else (0,))
    return dgate, gate.new_empty((0,)) if up is None else up.new_empty(up.shape if need_dup else (0,))


def formula(
    dy: Tensor,
    gate: Tensor,
    up: Tensor | None,
    activation: str,
    alpha: float,
    limit: float | None,
    offset: float,
    need_dgate: bool,
    need_dup: bool,
) -> tuple[Tensor, Tensor]:
    """The gradients of `kernels/backward.py` in PyTorch that autograd can follow."""
    given_gate, given_up = halves(gate, up)
    clamped, factor = widen_and_clamp(given_gate, given_up, limit)
    dy = dy.to(clamped.dtype)
    if activation == "silu":
        s = torch.sigmoid(alpha * clamped)
        value, slope = clamped * s, s + alpha * clamped * s * (1.0 - s)
    else:
        value, slope = activate(clamped, activation), derivative(clamped, activation)
    dgate, dup = dy * (factor + offset) * slope, dy * value
    if limit is not None:
        dgate = dgate.masked_fill(given_gate > limit, 0.0)
        dup = dup.masked_fill(given_up.abs() > limit, 0.0)
    if up is None:
        dgate = torch.cat([dgate, dup], -1)
    nothing = (gate if up is None else up).new_empty((0,))
    return (
        dgate.to(gate.dtype) if need_dgate else gate.new_empty((0,)),
        dup.to(up.dtype) if need_dup and up is not None else nothing,
    )


def flops_backward(dy: Any, gate: Any, up: Any, activation: str, *_: Any, **__: Any) -> int:
    """Operations of the backward, which computes the activation again; shapes in the place of tensors."""
    return torch.Size(dy).numel() * (sum(FLOPS[activation]) + 3)


def placements_backward(dtensor: Any, dy: Any, gate: Any, up: Any, *scalars: Any) -> Placed:
    """Where dgate, dup and what goes in may lie."""
    nothing = dtensor.Replicate()  # what is not needed comes back empty, and is the same everywhere
    needed = (scalars[-2], scalars[-1] and up is not None)
    for place in places(dtensor, gate, up):
        yield [place if need else nothing for need in needed], [place, place, None if up is None else place]


gated_backward = declare(
    "gated_backward(Tensor dy, Tensor gate, Tensor? up, str activation, float alpha, float? limit, float offset,"
    " bool need_dgate, bool need_dup) -> (Tensor dgate, Tensor dup)",
    launch=launch_backward,
    fake=fake_backward,
    formula=formula,
    flops=flops_backward,
    sharding=placements_backward,
)


def places(dtensor: Any, gate: Any, up: Any) -> list[Any]:
    """Where everything may lie alike."""
    return [dtensor.Replicate(), *(dtensor.Shard(d) for d in range(gate.ndim - 1 if up is None else gate.ndim))]
