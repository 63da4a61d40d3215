"""Gradients of the Triton level, and its functions.

The operators are attached to autograd here: called directly, `torch.ops.kernel_pytorch.bias_act` differentiates like
these functions do. First derivatives run in the Triton kernels. When they are to be differentiated again
(`create_graph=True`) they are computed by `backward_formula`, plain PyTorch that autograd can follow.

Saved for the backward: x, where there is an activation; bias and seed. Never the sum, its activation, or the mask.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernel_pytorch.fused_ln_act.activations import derivative
from kernel_pytorch.fused_ln_act.differentiable import differentiable
from kernel_pytorch.fused_ln_act.dispatch import below_autograd, library
from kernel_pytorch.fused_ln_act.philox import dropout

from .ops import launch_backward, launch_forward

operators = torch.ops.kernel_pytorch


def backward_formula(
    dy: Tensor, x: Tensor | None, bias: Tensor | None, seed: Tensor | None, dropout_p: float, activation: str
) -> tuple[Tensor, Tensor | None]:
    """The gradients of `triton_backward.py` in differentiable PyTorch: `(dx, dbias)`."""
    dz = dy.to(torch.promote_types(dy.dtype, torch.float32))
    if dropout_p > 0.0:
        assert seed is not None
        dz = dropout(dz, seed, dropout_p)
    if activation != "identity":
        assert x is not None
        z = x.to(dz.dtype)
        dz = dz * derivative(z if bias is None else z + bias.to(dz.dtype), activation)
    dbias = None if bias is None else dz.sum_to_size(bias.shape).to(bias.dtype)
    return dz.to((dy if x is None else x).dtype), dbias


def differentiable_backward(
    dy: Tensor,
    x: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
    activation: str,
    need_dx: bool,
    need_dbias: bool,
) -> tuple[Tensor, Tensor]:
    """The backward operator with gradients of its own: the formula where a graph is wanted, else the kernels."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (dy, x, bias)):
        dx, dbias = backward_formula(dy, x, bias, seed, dropout_p, activation)
        nothing_like_bias = (dy if bias is None else bias).new_empty((0,))
        # An operator's output is no input of it, which dx would be where nothing is done.
        dx = (dx.clone() if dx is dy else dx) if need_dx else dx.new_empty((0,))
        return dx, dbias if need_dbias and dbias is not None else nothing_like_bias
    scalars = (dropout_p, activation, need_dx, need_dbias)
    return below_autograd(operators.bias_act_backward, launch_backward, (dy, x, bias, seed), *scalars)


class BiasActFunction(torch.autograd.Function):
    """`(x, bias, residual, seed) -> y`."""

    @staticmethod
    def forward(
        x: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor | None, dropout_p: float, activation: str
    ) -> Tensor:
        """Run the operator."""
        tensors = (x, bias, residual, seed)
        return below_autograd(operators.bias_act, launch_forward, tensors, dropout_p, activation)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save x where its activation has a derivative, bias and seed."""
        x, bias, residual, seed, dropout_p, activation = inputs
        ctx.save_for_backward(None if activation == "identity" else x, bias, seed)
        ctx.scalars = dropout_p, activation
        ctx.dtypes = x.dtype, None if residual is None else residual.dtype

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x, bias and residual, each only where it is needed."""
        x, bias, seed = ctx.saved_tensors
        x_dtype, residual_dtype = ctx.dtypes
        need_dx, need_dbias, need_dresidual = ctx.needs_input_grad[:3]
        dresidual = dy.to(residual_dtype) if need_dresidual else None
        dropout_p, activation = ctx.scalars
        # Where nothing is done to x, its gradient is there already.
        compute_dx = need_dx and (dropout_p > 0.0 or activation != "identity")
        dx, dbias = dy, None
        if compute_dx or need_dbias:
            found, dbias = differentiable_backward(dy, x, bias, seed, dropout_p, activation, compute_dx, need_dbias)
            dx = found if compute_dx else dy
        return dx.to(x_dtype) if need_dx else None, dbias if need_dbias else None, dresidual, None, None, None


run_bias_act = differentiable(BiasActFunction)
library.impl("bias_act", run_bias_act, "Autograd")
library.impl("bias_act_backward", differentiable_backward, "Autograd")


# The level: one positional signature for each function, shared with reference.py.


def _apply(*arguments: Any) -> Tensor:
    run = operators.bias_act if torch.compiler.is_compiling() else run_bias_act
    found: Tensor = run(*arguments)
    return found


def bias_act(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """`bias_act` of `reference.py` in one Triton kernel."""
    return _apply(x, bias, None, None, 0.0, activation)


def bias_dropout_add(x: Tensor, bias: Tensor | None, residual: Tensor, p: float, seed: Tensor | None) -> Tensor:
    """`bias_dropout_add` of `reference.py` in one Triton kernel."""
    return _apply(x, bias, residual, seed, p, "identity")
