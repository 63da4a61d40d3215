"""The operators `torch.ops.kernel_pytorch.{gated, gated_backward}`: one family for all activations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernel_pytorch.fused_ln_act import flops
from kernel_pytorch.fused_ln_act import sharding as registered
from kernel_pytorch.fused_ln_act.direct_calls import check_floats, check_shapes
from kernel_pytorch.fused_ln_act.dispatch import implement, library

from . import sharding

library.define("gated(Tensor gate, Tensor? up, str activation, float alpha, float? limit, float offset) -> Tensor")
library.define(
    "gated_backward(Tensor dy, Tensor gate, Tensor? up, str activation, float alpha, float? limit, float offset,"
    " bool need_dgate, bool need_dup) -> (Tensor dgate, Tensor dup)"
)

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")


def _check(gate: Tensor, up: Tensor | None, activation: str) -> None:
    """Whoever calls an operator directly passes no other check, and a wrong shape would read foreign memory."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: given {activation!r}; allowed are {', '.join(map(repr, ACTIVATIONS))}")
    check_floats(gate=gate, up=up)
    if up is None and gate.shape[-1] % 2:
        raise ValueError(f"gate: shape is {tuple(gate.shape)}; packed, its last dimension must be even")
    if up is not None and up.shape != gate.shape:
        raise ValueError(f"up: shape is {tuple(up.shape)}; it must be that of gate, {tuple(gate.shape)}")


def launch_forward(
    gate: Tensor, up: Tensor | None, activation: str, alpha: float, limit: float | None, offset: float
) -> Tensor:
    """`y` from the Triton kernel."""
    from . import triton_forward

    _check(gate, up, activation)
    return triton_forward.forward(gate, up, activation, alpha, limit, offset)


def launch_backward(
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
    """`(dgate, dup)` from the Triton kernel; what is not needed comes back empty."""
    from . import triton_backward

    _check(gate, up, activation)
    check_floats(dy=dy)
    check_shapes(gate.shape if up is not None else torch.Size((*gate.shape[:-1], gate.shape[-1] // 2)), dy=dy)
    return triton_backward.backward(dy, gate, up, activation, alpha, limit, offset, need_dgate, need_dup)


implement("gated", launch_forward)
implement("gated_backward", launch_backward)


# Fakes: exactly what the launchers allocate, contiguous whatever the strides of the inputs.


@torch.library.register_fake("kernel_pytorch::gated", lib=library)
def _(gate: Tensor, up: Tensor | None, activation: str, alpha: float, limit: float | None, offset: float) -> Tensor:
    if up is None:
        return gate.new_empty((*gate.shape[:-1], gate.shape[-1] // 2))
    return gate.new_empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype))


@torch.library.register_fake("kernel_pytorch::gated_backward", lib=library)
def _(
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
    dgate = gate.new_empty(gate.shape if need_dgate else (0,))
    if up is None:
        return dgate, gate.new_empty((0,))
    return dgate, up.new_empty(up.shape if need_dup else (0,))


def forward_flops(gate: Any, up: Any, activation: str, *_: Any, **__: Any) -> int:
    """Operations of the forward; shapes in the place of tensors."""
    elements = torch.Size(gate).numel() // (2 if up is None else 1)
    return elements * (flops.FLOPS_OF_ACTIVATION[activation][0] + 1)


def backward_flops(dy: Any, gate: Any, up: Any, activation: str, *_: Any, **__: Any) -> int:
    """Operations of the backward, which computes the activation again; shapes in the place of tensors."""
    return torch.Size(dy).numel() * (sum(flops.FLOPS_OF_ACTIVATION[activation]) + 3)


flops.register_when_counted({"gated": forward_flops, "gated_backward": backward_flops})
registered.register_when_distributed(sharding.rules)
