"""Triton: one kernel for all activations. First derivatives are a kernel too, second ones PyTorch's."""

from __future__ import annotations

from torch import Tensor

from kernel_pytorch.fused_ln_act.gated import operators


def swiglu(gate: Tensor, up: Tensor | None, alpha: float, limit: float | None, offset: float) -> Tensor:
    """`swiglu` of `reference.py`."""
    y: Tensor = operators.gated(gate, up, "silu", alpha, limit, offset)
    return y


def geglu(gate: Tensor, up: Tensor | None, approximate: str, limit: float | None) -> Tensor:
    """`geglu` of `reference.py`."""
    y: Tensor = operators.gated(gate, up, "gelu" if approximate == "none" else "gelu_tanh", 1.0, limit, 0.0)
    return y


def reglu(gate: Tensor, up: Tensor | None, limit: float | None) -> Tensor:
    """`reglu` of `reference.py`."""
    y: Tensor = operators.gated(gate, up, "relu", 1.0, limit, 0.0)
    return y
