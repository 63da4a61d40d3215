"""Triton: one kernel for all functions. First derivatives are kernels too, second ones PyTorch's."""

from __future__ import annotations

from torch import Tensor

from kernel_pytorch.fused_ln_act.norm import operators


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """`layer_norm` of `reference.py`."""
    y: Tensor = operators.norm_act(x, None, weight, bias, None, eps, 0.0, "layer", "identity")[0]
    return y


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`add_layer_norm` of `reference.py`."""
    y, h, _ = operators.norm_act(x, residual, weight, bias, seed, eps, dropout_p, "layer", "identity")
    return y, h


def layer_norm_act(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str,
    dropout_p: float,
    seed: Tensor | None,
) -> Tensor:
    """`layer_norm_act` of `reference.py`."""
    y: Tensor = operators.norm_act(x, None, weight, bias, seed, eps, dropout_p, "layer", activation)[0]
    return y


def add_layer_norm_act(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`add_layer_norm_act` of `reference.py`."""
    y, h, _ = operators.norm_act(x, residual, weight, bias, seed, eps, dropout_p, "layer", activation)
    return y, h


def rms_norm_act(
    x: Tensor, weight: Tensor | None, eps: float, activation: str, dropout_p: float, seed: Tensor | None
) -> Tensor:
    """`rms_norm_act` of `reference.py`."""
    y: Tensor = operators.norm_act(x, None, weight, None, seed, eps, dropout_p, "rms", activation)[0]
    return y


def add_rms_norm_act(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    activation: str,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm_act` of `reference.py`."""
    y, h, _ = operators.norm_act(x, residual, weight, None, seed, eps, dropout_p, "rms", activation)
    return y, h
