"""Triton: the product and what follows it in one kernel. What is elementwise in the backward is Triton's too."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kernel_pytorch.fused_ln_act._core.call_kinds import needs_grad
from kernel_pytorch.fused_ln_act._core.operation import calls, first
from kernel_pytorch.fused_ln_act.linear import operators


@calls(operators.linear_act, first)
def linear_act(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_preactivation: bool
) -> tuple[Any, ...]:
    """`linear_act` of `reference.py`."""
    # Without a backward nothing is written for it.
    save = save_preactivation and activation not in operators.NOTHING_SAVED and needs_grad(x, weight, bias)
    return x, weight.to(x.dtype), bias, activation, save


@calls(operators.gated_mlp, first)
def gated_mlp(x: Tensor, w_gate_up: Tensor, w_down: Tensor, activation: str, recompute: bool) -> tuple[Any, ...]:
    """`gated_mlp` of `reference.py`, a kernel for each of its two products."""
    save = not recompute and needs_grad(x, w_gate_up, w_down)
    return x, w_gate_up.to(x.dtype), w_down.to(x.dtype), activation, save
