"""Bias and activation, `bias_act`, and its gradients.

    y = activation(x + bias)

Fused so first by Shoeybi et al., "Megatron-LM", 2019, https://arxiv.org/abs/1909.08053. Everything is computed in
float32 (float64 for float64) and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import rows_sharding
from ._core.operator import declare
from .activations import FLOPS, activate
from .operators import call


def _fake(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    return x.new_empty(x.shape)


def _fake_backward(
    dy: Tensor, x: Tensor | None, bias: Tensor | None, activation: str, need_dx: bool, need_dbias: bool
) -> tuple[Tensor, Tensor]:
    like = dy if x is None else x
    dx = like.new_empty(dy.shape if need_dx else (0,))
    return dx, like.new_empty((0,)) if bias is None else bias.new_empty(bias.shape if need_dbias else (0,))


def _formula(
    dy: Tensor, x: Tensor | None, bias: Tensor | None, activation: str, need_dx: bool, need_dbias: bool
) -> tuple[Tensor, Tensor]:
    """The gradients in PyTorch that autograd can follow."""
    like = dy if x is None else x
    dz = dy.to(torch.promote_types(like.dtype, torch.float32))
    if activation != "identity":
        assert x is not None
        z = x.to(dz.dtype)
        dz = dz * activate(z if bias is None else z + bias.to(dz.dtype), activation)[1]
    dx = dz.to(like.dtype)
    # An operator's output is no input of it, which dx would be where nothing is done.
    dx = (dx.clone() if dx is dy else dx) if need_dx else dx.new_empty((0,))
    if bias is None or not need_dbias:
        return dx, (like if bias is None else bias).new_empty((0,))
    return dx, dz.sum_to_size(bias.shape).to(bias.dtype)


def _save(x: Tensor, bias: Tensor | None, activation: str) -> tuple[Tensor | None, ...]:
    return None if activation == "identity" else x, bias  # without a derivative x is not needed


def _gradient(
    dy: Tensor, saved: tuple[Tensor | None, ...], activation: str, needs: Sequence[bool]
) -> tuple[Tensor, Tensor | None]:
    need_dx, need_dbias = needs
    # Where nothing is done to x, its gradient is there already.
    compute_dx = need_dx and activation != "identity"
    if not compute_dx and not need_dbias:
        return dy, None
    dx, dbias = run_bias_act_backward(dy, *saved, activation, compute_dx, need_dbias)
    return dx if compute_dx else dy, dbias


def _forward_flops(x: Any, bias: Any, activation: str, *_: Any, **__: Any) -> int:
    return torch.Size(x).numel() * (FLOPS[activation][0] + (bias is not None))


def _backward_flops(dy: Any, x: Any, bias: Any, activation: str, *_: Any, **__: Any) -> int:
    return torch.Size(dy).numel() * (FLOPS[activation][1] + 1 + 2 * (bias is not None))


run_bias_act = declare(
    "bias_act(Tensor x, Tensor? bias, str activation) -> Tensor",
    fake=_fake,
    gradient=_gradient,
    save=_save,
    flops=_forward_flops,
    sharding=rows_sharding.bias_act,
)
run_bias_act_backward = declare(
    "bias_act_backward(Tensor dy, Tensor? x, Tensor? bias, str activation, bool need_dx, bool need_dbias)"
    " -> (Tensor dx, Tensor dbias)",
    fake=_fake_backward,
    formula=_formula,
    flops=_backward_flops,
    sharding=rows_sharding.bias_act_backward,
)


def bias_act(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """Add the bias, then activate, differentiable in x and bias any number of times.

    Args:
        x: `(..., N)`, float16, bfloat16 or float32, on a CPU float64 too; any strides.
        bias: `(N,)`, any of these dtypes, on the device of x; None for the activation alone.
        activation: "gelu", "gelu_tanh", "silu", "relu", "relu_squared", "quick_gelu", "tanh", "sigmoid" or "identity".

    Returns:
        `(..., N)` in the dtype of x.

    Raises:
        RuntimeError: the arguments do not fit, or the kernel could not be launched; the message names them.
        TypeError: an argument is not of its kind.
    """
    return call("bias_act", run_bias_act, x, bias, activation)
