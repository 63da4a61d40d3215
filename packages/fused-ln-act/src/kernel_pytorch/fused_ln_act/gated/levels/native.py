"""PyTorch's best operators: the activation, then the product, each in a separate kernel.

The activation is rounded to the dtype of gate in between, which the definition does not do. In float16 that could
overflow, forward or backward, where the result is zero: halves in float16 or in different dtypes are widened first.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .reference import halves


def prepare(gate: Tensor, up: Tensor | None, limit: float | None) -> tuple[Tensor, Tensor, torch.dtype]:
    """The halves, clamped, and the dtype of the result."""
    gate, up = halves(gate, up)
    dtype = torch.promote_types(gate.dtype, up.dtype)
    if gate.dtype == torch.float16 or gate.dtype != up.dtype:
        wide = torch.promote_types(dtype, torch.float32)
        gate, up = gate.to(wide), up.to(wide)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate, up, dtype


def swiglu(gate: Tensor, up: Tensor | None, alpha: float, limit: float | None, offset: float) -> Tensor:
    """`swiglu` of `reference.py` through `F.silu`."""
    gate, up, dtype = prepare(gate, up, limit)
    activated = F.silu(gate) if alpha == 1.0 else gate * torch.sigmoid(alpha * gate)
    return (activated * (up if offset == 0.0 else up + offset)).to(dtype)


def geglu(gate: Tensor, up: Tensor | None, approximate: str, limit: float | None) -> Tensor:
    """`geglu` of `reference.py` through `F.gelu`."""
    gate, up, dtype = prepare(gate, up, limit)
    if gate.dtype == torch.bfloat16 and gate.device.type == "cpu":
        gate = gate.float()  # oneDNN's own gelu takes denormals for zero
    return (F.gelu(gate, approximate=approximate) * up).to(dtype)


def reglu(gate: Tensor, up: Tensor | None, limit: float | None) -> Tensor:
    """`reglu` of `reference.py` through `F.relu`."""
    gate, up, dtype = prepare(gate, up, limit)
    return (F.relu(gate) * up).to(dtype)
