"""Bias and activation, `bias_act`, and its gradients.

    y = activation(x + bias)

Fused so first by Shoeybi et al., "Megatron-LM", 2019, https://arxiv.org/abs/1909.08053. Everything is computed in
float32 (float64 for float64) and rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import rows_sharding
from .activations import FLOPS, activate
from .differentiable import differentiable
from .operators import below_autograd, call, operators, register


def _fake(x: Tensor, bias: Tensor | None, activation: str, version: int = 0) -> Tensor:
    return x.new_empty(x.shape)


def _fake_backward(
    dy: Tensor, x: Tensor | None, bias: Tensor | None, activation: str, need_dx: bool, need_dbias: bool
) -> tuple[Tensor, Tensor]:
    like = dy if x is None else x
    dx = like.new_empty(dy.shape if need_dx else (0,))
    return dx, like.new_empty((0,)) if bias is None else bias.new_empty(bias.shape if need_dbias else (0,))


def backward_formula(
    dy: Tensor, x: Tensor | None, bias: Tensor | None, activation: str
) -> tuple[Tensor, Tensor | None]:
    """The gradients in PyTorch that autograd can follow: `(dx, dbias)`."""
    like = dy if x is None else x
    dz = dy.to(torch.promote_types(like.dtype, torch.float32))
    if activation != "identity":
        assert x is not None
        z = x.to(dz.dtype)
        dz = dz * activate(z if bias is None else z + bias.to(dz.dtype), activation)[1]
    dbias = None if bias is None else dz.sum_to_size(bias.shape).to(bias.dtype)
    return dz.to(like.dtype), dbias


def _differentiable_backward(
    dy: Tensor, x: Tensor | None, bias: Tensor | None, activation: str, need_dx: bool, need_dbias: bool
) -> tuple[Tensor, Tensor]:
    """The backward operator with gradients of its own: the formula where a graph is wanted, else the kernels."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (dy, x, bias)):
        dx, dbias = backward_formula(dy, x, bias, activation)
        # An operator's output is no input of it, which dx would be where nothing is done.
        dx = (dx.clone() if dx is dy else dx) if need_dx else dx.new_empty((0,))
        like = bias if bias is not None else dy if x is None else x
        return dx, dbias if need_dbias and dbias is not None else like.new_empty((0,))
    arguments = (dy, x, bias, activation, need_dx, need_dbias)
    return below_autograd(operators.bias_act_backward.default, *arguments)


class BiasActFunction(torch.autograd.Function):
    """`(x, bias) -> y`."""

    @staticmethod
    def forward(x: Tensor, bias: Tensor | None, activation: str, version: int = 0) -> Tensor:
        """Run the operator."""
        return below_autograd(operators.bias_act.default, x, bias, activation, version)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save x where its activation has a derivative, and bias."""
        x, bias, activation = inputs[:3]
        ctx.save_for_backward(None if activation == "identity" else x, bias)
        ctx.activation = activation

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x and bias, each only where it is needed."""
        x, bias = ctx.saved_tensors
        need_dx, need_dbias = ctx.needs_input_grad[:2]
        # Where nothing is done to x, its gradient is there already.
        compute_dx = need_dx and ctx.activation != "identity"
        dx: Tensor | None = dy if need_dx else None
        dbias = None
        if compute_dx or need_dbias:
            found, found_bias = _differentiable_backward(dy, x, bias, ctx.activation, compute_dx, need_dbias)
            dx = found if compute_dx else dx
            dbias = found_bias if need_dbias else None
        return (dx, dbias) + (None,) * (len(ctx.needs_input_grad) - 2)


def _forward_flops(x: Any, bias: Any, activation: str, *_: Any, **__: Any) -> int:
    return torch.Size(x).numel() * (FLOPS[activation][0] + (bias is not None))


def _backward_flops(dy: Any, x: Any, bias: Any, activation: str, *_: Any, **__: Any) -> int:
    return torch.Size(dy).numel() * (FLOPS[activation][1] + 1 + 2 * (bias is not None))


run_bias_act = differentiable(BiasActFunction)
register("bias_act", _fake, run_bias_act, _forward_flops, rows_sharding.bias_act)
register(
    "bias_act_backward", _fake_backward, _differentiable_backward, _backward_flops, rows_sharding.bias_act_backward
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
    return call("bias_act", operators.bias_act.default, run_bias_act, x, bias, activation)
