"""Triton: one kernel. First derivatives are kernels too, second ones PyTorch's."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kernel_pytorch.fused_ln_act._core.operation import calls
from kernel_pytorch.fused_ln_act.softmax import operators


@calls(operators.softmax)
def softmax(x: Tensor, scale: float, mask: Tensor | None) -> tuple[Any, ...]:
    """`softmax` of `reference.py`."""
    return x, mask, scale
