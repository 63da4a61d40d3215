"""Triton: one kernel for each function. First derivatives are kernels too, second ones PyTorch's."""

from __future__ import annotations

from torch import Tensor

from kernel_pytorch.rmsnorm import operators


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str) -> Tensor:
    """`rms_norm` of `reference.py`."""
    y: Tensor = operators.rms_norm(x, weight, eps, offset, casting)[0]
    return y


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` of `reference.py`."""
    y, h, _ = operators.add_rms_norm(x, residual, weight, eps, offset, casting)
    return y, h


def head_rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, casting: str) -> Tensor:
    """`head_rms_norm` of `reference.py`."""
    return rms_norm(x, weight, eps, offset, casting)
