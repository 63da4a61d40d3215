"""Triton: one kernel for all activations. First derivatives are a kernel too, second ones PyTorch's."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kernel_pytorch.fused_ln_act._core.operation import calls
from kernel_pytorch.fused_ln_act.gated import operators


@calls(operators.gated)
def swiglu(gate: Tensor, up: Tensor | None, alpha: float, limit: float | None, offset: float) -> tuple[Any, ...]:
    """`swiglu` of `reference.py`."""
    return gate, up, "silu", alpha, limit, offset


@calls(operators.gated)
def geglu(gate: Tensor, up: Tensor | None, approximate: str, limit: float | None) -> tuple[Any, ...]:
    """`geglu` of `reference.py`."""
    return gate, up, "gelu" if approximate == "none" else "gelu_tanh", 1.0, limit, 0.0


@calls(operators.gated)
def reglu(gate: Tensor, up: Tensor | None, limit: float | None) -> tuple[Any, ...]:
    """`reglu` of `reference.py`."""
    return gate, up, "relu", 1.0, limit, 0.0
