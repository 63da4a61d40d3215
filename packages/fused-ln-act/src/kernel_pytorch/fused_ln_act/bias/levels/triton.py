"""Triton: one kernel for both functions. First derivatives are kernels too, second ones PyTorch's."""

from __future__ import annotations

from torch import Tensor

from kernel_pytorch.fused_ln_act.bias import operators

bias_act = operators.bias_act


def bias_dropout_add(x: Tensor, bias: Tensor | None, residual: Tensor, p: float, seed: Tensor | None) -> Tensor:
    """`bias_dropout_add` of `reference.py`."""
    y: Tensor = operators.bias_dropout_add(x, bias, residual, seed, p)
    return y
