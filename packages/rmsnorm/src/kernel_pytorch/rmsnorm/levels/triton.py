"""Triton: one kernel for each function. First derivatives are kernels too, second ones PyTorch's."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kernel_pytorch.rmsnorm import operators
from kernel_pytorch.rmsnorm._core.operation import calls, first, first_two


@calls(operators.rms_norm, first)
def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str) -> tuple[Any, ...]:
    """`rms_norm` of `reference.py`."""
    return x, weight, eps, offset, casting


@calls(operators.add_rms_norm, first_two)
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str
) -> tuple[Any, ...]:
    """`add_rms_norm` of `reference.py`."""
    return x, residual, weight, eps, offset, casting


head_rms_norm = rms_norm
