"""Bias, dropout and residual, `bias_dropout_add`, and its gradients.

    y = residual + dropout(x + bias)

Fused so first by Shoeybi et al., "Megatron-LM", 2019, https://arxiv.org/abs/1909.08053. Everything is computed in
float32 (float64 for float64) and rounded once; the mask is that of `philox.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import rows_sharding
from .differentiable import differentiable
from .operators import DTYPE_NAMES, below_autograd, call, operators, register
from .philox import dropout


def _fake(x: Tensor, bias: Tensor | None, residual: Tensor, seed: Tensor | None, p: float, version: int = 0) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))


def _fake_backward(
    dy: Tensor, bias: Tensor | None, seed: Tensor | None, p: float, x_dtype: str, need_dx: bool, need_dbias: bool
) -> tuple[Tensor, Tensor]:
    dx = dy.new_empty(dy.shape if need_dx else (0,), dtype=getattr(torch, x_dtype))
    return dx, dy.new_empty((0,)) if bias is None else bias.new_empty(bias.shape if need_dbias else (0,))


def _differentiable_backward(
    dy: Tensor, bias: Tensor | None, seed: Tensor | None, p: float, x_dtype: str, need_dx: bool, need_dbias: bool
) -> tuple[Tensor, Tensor]:
    """The backward operator with gradients of its own: plain PyTorch where a graph is wanted, else the kernels."""
    if torch.is_grad_enabled() and dy.requires_grad:
        dz = dropout(dy.to(torch.promote_types(dy.dtype, torch.float32)), seed, p)
        dx = dz.to(getattr(torch, x_dtype))
        # An operator's output is no input of it, which dx would be where nothing is done.
        dx = (dx.clone() if dx is dy else dx) if need_dx else dx.new_empty((0,))
        if bias is None:
            return dx, dy.new_empty((0,))
        return dx, dz.sum_to_size(bias.shape).to(bias.dtype) if need_dbias else bias.new_empty((0,))
    arguments = (dy, bias, seed, p, x_dtype, need_dx, need_dbias)
    return below_autograd(operators.bias_dropout_add_backward.default, *arguments)


class BiasDropoutAddFunction(torch.autograd.Function):
    """`(x, bias, residual, seed) -> y`."""

    @staticmethod
    def forward(
        x: Tensor, bias: Tensor | None, residual: Tensor, seed: Tensor | None, p: float, version: int = 0
    ) -> Tensor:
        """Run the operator."""
        return below_autograd(operators.bias_dropout_add.default, x, bias, residual, seed, p, version)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save bias and seed."""
        x, bias, residual, seed, p = inputs[:5]
        ctx.save_for_backward(bias, seed)
        ctx.p = p
        ctx.dtypes = x.dtype, residual.dtype

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, bias and residual, each only where it is needed."""
        bias, seed = ctx.saved_tensors
        x_dtype, residual_dtype = ctx.dtypes
        need_dx, need_dbias, need_dresidual = ctx.needs_input_grad[:3]
        # Where nothing is done to x, its gradient is there already.
        compute_dx = need_dx and (ctx.p > 0.0 or dy.dtype != x_dtype)
        dx, dbias = dy, None
        if compute_dx or need_dbias:
            arguments = (dy, bias, seed, ctx.p, DTYPE_NAMES[x_dtype], compute_dx, need_dbias)
            found, dbias = _differentiable_backward(*arguments)
            dx = found if compute_dx else dy
        gradients = (
            dx if need_dx else None,
            dbias if need_dbias else None,
            dy.to(residual_dtype) if need_dresidual else None,
        )
        return gradients + (None,) * (len(ctx.needs_input_grad) - 3)


def _forward_flops(x: Any, bias: Any, residual: Any, seed: Any, p: float, *_: Any, **__: Any) -> int:
    return torch.Size(x).numel() * (1 + (bias is not None) + (p > 0.0))


def _backward_flops(dy: Any, bias: Any, seed: Any, p: float, *_: Any, **__: Any) -> int:
    return torch.Size(dy).numel() * ((bias is not None) + (p > 0.0))


run_bias_dropout_add = differentiable(BiasDropoutAddFunction)
register("bias_dropout_add", _fake, run_bias_dropout_add, _forward_flops, rows_sharding.bias_dropout_add)
register(
    "bias_dropout_add_backward",
    _fake_backward,
    _differentiable_backward,
    _backward_flops,
    rows_sharding.bias_dropout_add_backward,
)


def bias_dropout_add(
    x: Tensor, bias: Tensor | None, residual: Tensor, p: float = 0.0, seed: Tensor | None = None
) -> Tensor:
    """Add the bias, drop, add to the residual stream; differentiable in x, bias and residual any number of times.

    Args:
        x: `(..., N)`, float16, bfloat16 or float32, on a CPU float64 too; any strides.
        bias: `(N,)`, any of these dtypes, on the device of x; None for no bias.
        residual: `(..., N)`, on the device of x; its dtype may differ.
        p: the probability that an element of `x + bias` is dropped, from 0 to below 1.
        seed: int64 `()`, on the device of x; None where p is 0.

    Returns:
        `(..., N)` in the promoted dtype of x and residual.

    Raises:
        RuntimeError: the arguments do not fit, or the kernel could not be launched; the message names them.
        TypeError: an argument is not of its kind.
        ValueError: a number is not finite.
    """
    arguments = (x, bias, residual, seed, p)
    return call("bias_dropout_add", operators.bias_dropout_add.default, run_bias_dropout_add, *arguments)
