"""Gradients of the Triton level, and its functions.

The operators are attached to autograd here: called directly, `torch.ops.kernel_pytorch.gated` differentiates like these
functions do. First derivatives run in the Triton kernel. When they are to be differentiated again (`create_graph=True`)
they are computed by `backward_formula`, plain PyTorch that autograd can follow.

Saved for the backward: gate and up, or what packs them, as they came in; nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernel_pytorch.fused_ln_act.activations import activate, derivative
from kernel_pytorch.fused_ln_act.differentiable import differentiable
from kernel_pytorch.fused_ln_act.dispatch import below_autograd, library

from .ops import launch_backward, launch_forward
from .reference import halves, widen_and_clamp

operators = torch.ops.kernel_pytorch


def backward_formula(
    dy: Tensor, gate: Tensor, up: Tensor | None, activation: str, alpha: float, limit: float | None, offset: float
) -> tuple[Tensor, Tensor | None]:
    """The gradients of `triton_backward.py` in differentiable PyTorch: `(dgate, dup)`, or packed with None."""
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
        return torch.cat([dgate, dup], -1).to(gate.dtype), None
    return dgate.to(gate.dtype), dup.to(up.dtype)


def differentiable_backward(
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
    """The backward operator with gradients of its own: the formula where a graph is wanted, else the kernel."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (dy, gate, up)):
        dgate, dup = backward_formula(dy, gate, up, activation, alpha, limit, offset)
        if not need_dgate:
            dgate = gate.new_empty((0,))
        return dgate, dup if need_dup and dup is not None else (gate if up is None else up).new_empty((0,))
    scalars = (activation, alpha, limit, offset, need_dgate, need_dup)
    return below_autograd(operators.gated_backward, launch_backward, (dy, gate, up), *scalars)


class GatedFunction(torch.autograd.Function):
    """`(gate, up) -> y`."""

    @staticmethod
    def forward(
        gate: Tensor, up: Tensor | None, activation: str, alpha: float, limit: float | None, offset: float
    ) -> Tensor:
        """Run the operator."""
        return below_autograd(operators.gated, launch_forward, (gate, up), activation, alpha, limit, offset)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save gate and up, as they came in."""
        gate, up, *scalars = inputs
        ctx.save_for_backward(gate, up)
        ctx.scalars = scalars

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of gate and up, each only where it is needed."""
        gate, up = ctx.saved_tensors
        need_dgate, need_dup = ctx.needs_input_grad[:2]
        activation, alpha, limit, offset = ctx.scalars
        dgate, dup = differentiable_backward(dy, gate, up, activation, alpha, limit, offset, need_dgate, need_dup)
        return dgate if need_dgate else None, dup if need_dup else None, None, None, None, None


run_gated = differentiable(GatedFunction)
library.impl("gated", run_gated, "Autograd")
library.impl("gated_backward", differentiable_backward, "Autograd")


# The level: one positional signature for each function, shared with reference.py.


def _apply(*arguments: Any) -> Tensor:
    run = operators.gated if torch.compiler.is_compiling() else run_gated
    found: Tensor = run(*arguments)
    return found


def swiglu(gate: Tensor, up: Tensor | None, alpha: float, limit: float | None, offset: float) -> Tensor:
    """`swiglu` of `reference.py` in one Triton kernel."""
    return _apply(gate, up, "silu", alpha, limit, offset)


def geglu(gate: Tensor, up: Tensor | None, approximate: str, limit: float | None) -> Tensor:
    """`geglu` of `reference.py` in one Triton kernel."""
    return _apply(gate, up, "gelu" if approximate == "none" else "gelu_tanh", 1.0, limit, 0.0)


def reglu(gate: Tensor, up: Tensor | None, limit: float | None) -> Tensor:
    """`reglu` of `reference.py` in one Triton kernel."""
    return _apply(gate, up, "relu", 1.0, limit, 0.0)
