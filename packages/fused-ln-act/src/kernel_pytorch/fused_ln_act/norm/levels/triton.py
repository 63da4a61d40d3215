"""Triton: one kernel for all functions. First derivatives are kernels too, second ones PyTorch's."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kernel_pytorch.fused_ln_act._core.operation import calls, first, first_two
from kernel_pytorch.fused_ln_act.norm import operators


@calls(operators.norm_act, first)
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Any, ...]:
    """`layer_norm` of `reference.py`."""
    return x, None, weight, bias, None, eps, 0.0, "layer", "identity"


@calls(operators.norm_act, first_two)
def add_layer_norm(x: Tensor, residual: Tensor, *others: Any) -> tuple[Any, ...]:
    """`add_layer_norm` of `reference.py`."""
    weight, bias, eps, dropout_p, seed = others
    return x, residual, weight, bias, seed, eps, dropout_p, "layer", "identity"


@calls(operators.norm_act, first)
def layer_norm_act(x: Tensor, *others: Any) -> tuple[Any, ...]:
    """`layer_norm_act` of `reference.py`."""
    weight, bias, eps, activation, dropout_p, seed = others
    return x, None, weight, bias, seed, eps, dropout_p, "layer", activation


@calls(operators.norm_act, first_two)
def add_layer_norm_act(x: Tensor, residual: Tensor, *others: Any) -> tuple[Any, ...]:
    """`add_layer_norm_act` of `reference.py`."""
    weight, bias, eps, activation, dropout_p, seed = others
    return x, residual, weight, bias, seed, eps, dropout_p, "layer", activation


@calls(operators.norm_act, first)
def rms_norm_act(
    x: Tensor, weight: Tensor | None, eps: float, activation: str, dropout_p: float, seed: Tensor | None
) -> tuple[Any, ...]:
    """`rms_norm_act` of `reference.py`."""
    return x, None, weight, None, seed, eps, dropout_p, "rms", activation


@calls(operators.norm_act, first_two)
def add_rms_norm_act(x: Tensor, residual: Tensor, *others: Any) -> tuple[Any, ...]:
    """`add_rms_norm_act` of `reference.py`."""
    weight, eps, activation, dropout_p, seed = others
    return x, residual, weight, None, seed, eps, dropout_p, "rms", activation
