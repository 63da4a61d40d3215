"""Gated linear units: `swiglu`, `geglu`, `reglu`, and their gradients.

    y = activation(gate) * (up + offset)

Shazeer, "GLU Variants Improve Transformer", 2020, https://arxiv.org/abs/2002.05202. Everything is computed in float32
(float64 for float64) and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import rows_sharding
from ._core.operator import declare
from .activations import FLOPS, activate
from .operators import call


def _fake(
    gate: Tensor,
    up: Tensor | None,
    activation: str,
    alpha: float,
    limit: float | None,
    offset: float,
) -> Tensor:
    if up is None:
        return gate.new_empty((*gate.shape[:-1], gate.shape[-1] // 2))
    return gate.new_empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype))


def _fake_backward(
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
    return dgate, gate.new_empty((0,)) if up is None else up.new_empty(up.shape if need_dup else (0,))


def _formula(
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
    """The gradients in PyTorch that autograd can follow."""
    given_gate, given_up = gate.chunk(2, -1) if up is None else (gate, up)
    wide = torch.promote_types(torch.promote_types(given_gate.dtype, given_up.dtype), torch.float32)
    z, factor, dy = given_gate.to(wide), given_up.to(wide), dy.to(wide)
    if limit is not None:
        z, factor = z.clamp(max=limit), factor.clamp(-limit, limit)
    value, slope = activate(z, activation, alpha)
    dgate, dup = dy * (factor + offset) * slope, dy * value
    if limit is not None:
        dgate = dgate.masked_fill(given_gate > limit, 0.0)
        dup = dup.masked_fill(given_up.abs() > limit, 0.0)
    if up is None:
        packed = torch.cat([dgate, dup], -1).to(gate.dtype) if need_dgate else gate.new_empty((0,))
        return packed, gate.new_empty((0,))
    return (
        dgate.to(gate.dtype) if need_dgate else gate.new_empty((0,)),
        dup.to(up.dtype) if need_dup else up.new_empty((0,)),
    )


def _gradient(
    dy: Tensor,
    gate: Tensor,
    up: Tensor | None,
    activation: str,
    alpha: float,
    limit: float | None,
    offset: float,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = run_gated_backward(dy, gate, up, activation, alpha, limit, offset, *needs)
    return found


def _forward_flops(gate: Any, up: Any, activation: str, *_: Any, **__: Any) -> int:
    elements = torch.Size(gate).numel() // (2 if up is None else 1)
    return elements * (FLOPS[activation][0] + 1)


def _backward_flops(dy: Any, gate: Any, up: Any, activation: str, *_: Any, **__: Any) -> int:
    return torch.Size(dy).numel() * (sum(FLOPS[activation]) + 3)


run_gated = declare(
    "gated(Tensor gate, Tensor? up, str activation, float alpha, float? limit, float offset) -> Tensor",
    fake=_fake,
    gradient=_gradient,
    flops=_forward_flops,
    sharding=rows_sharding.gated,
)
run_gated_backward = declare(
    "gated_backward(Tensor dy, Tensor gate, Tensor? up, str activation, float alpha, float? limit, float offset,"
    " bool need_dgate, bool need_dup) -> (Tensor dgate, Tensor dup)",
    fake=_fake_backward,
    formula=_formula,
    flops=_backward_flops,
    sharding=rows_sharding.gated_backward,
)


def swiglu(
    gate: Tensor, up: Tensor | None = None, alpha: float = 1.0, limit: float | None = None, offset: float = 0.0
) -> Tensor:
    """Gate by SiLU: `y = gate * sigmoid(alpha * gate) * (up + offset)`, differentiable any number of times.

    Args:
        gate: `(..., I)`, float16, bfloat16 or float32, on a CPU float64 too; any strides; packed with up `(..., 2I)`.
        up: `(..., I)`, any of these dtypes, on the device of gate; None where gate is packed.
        alpha: the slope of the sigmoid.
        limit: gate is clamped to at most this, up to at most this far from zero; positive, or None. The gradient of
            what is clamped is 0.
        offset: added to up.

    Returns:
        `(..., I)` in the promoted dtype of gate and up.

    Raises:
        RuntimeError: the arguments do not fit, or the kernel could not be launched; the message names them.
        TypeError: an argument is not of its kind.
        ValueError: a number is not finite.
    """
    return call("swiglu", run_gated, gate, up, "silu", alpha, limit, offset)


def geglu(gate: Tensor, up: Tensor | None = None, approximate: str = "none", limit: float | None = None) -> Tensor:
    """Gate by GELU: exactly, or with `approximate="tanh"` by its approximation; otherwise as `swiglu`."""
    activation = {"none": "gelu", "tanh": "gelu_tanh"}.get(approximate)
    if activation is None:
        raise RuntimeError(f"geglu: approximate: given {approximate!r}; allowed are 'none', 'tanh'")
    return call("geglu", run_gated, gate, up, activation, 1.0, limit, 0.0)


def reglu(gate: Tensor, up: Tensor | None = None, limit: float | None = None) -> Tensor:
    """Gate by ReLU; otherwise as `swiglu`."""
    return call("reglu", run_gated, gate, up, "relu", 1.0, limit, 0.0)
