"""Gradients of the Triton level, and its functions.

The operators are attached to autograd here: called directly, `torch.ops.kernel_pytorch.norm_act` differentiates like
these functions do. First derivatives run in the Triton kernels. When they are to be differentiated again
(`create_graph=True`) they are computed by `backward_formula`, plain PyTorch that autograd can follow.

Saved for the backward, by every function: what was normalised (x, or h, which is an output already), the parameters,
the seed, and mean and rstd, two float32 a row (one for the RMS norm). The input of the activation and the mask of
dropout are made again.
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
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    eps: float,
    dropout_p: float,
    norm: str,
    activation: str,
    has_residual: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The gradients of `triton_backward.py` in differentiable PyTorch: `(dx, dresidual, dweight, dbias)`."""
    wide = torch.promote_types(h.dtype, torch.float32)
    x_hat, dz = h.to(wide), dy.to(wide)
    if norm == "layer":
        x_hat = x_hat - x_hat.mean(-1, keepdim=True)
    rstd = torch.rsqrt(x_hat.square().mean(-1, keepdim=True) + eps)
    x_hat = x_hat * rstd
    z = x_hat if weight is None else x_hat * weight.to(wide)
    z = z if bias is None else z + bias.to(wide)
    drops = dropout_p > 0.0 and seed is not None
    if drops and not has_residual:
        assert seed is not None
        dz = dropout(dz, seed, dropout_p)
    dz = dz * derivative(z, activation)
    g = dz if weight is None else dz * weight.to(wide)
    dx = g - x_hat * (g * x_hat).mean(-1, keepdim=True)
    if norm == "layer":
        dx = dx - g.mean(-1, keepdim=True)
    dx = dx * rstd
    if dh is not None:
        dx = dx + dh.to(wide)
    dresidual = dx
    if drops and has_residual:
        assert seed is not None
        dx = dropout(dx, seed, dropout_p)
    dweight = None if weight is None else (dz * x_hat).sum_to_size(weight.shape).to(weight.dtype)
    dbias = None if bias is None else dz.sum_to_size(bias.shape).to(bias.dtype)
    return dx.to(h.dtype), dresidual.to(h.dtype), dweight, dbias


def differentiable_backward(
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    statistics: Tensor,
    eps: float,
    dropout_p: float,
    norm: str,
    activation: str,
    has_residual: bool,
    *needs: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The backward operator with gradients of its own: the formula where a graph is wanted, else the kernels."""
    scalars = eps, dropout_p, norm, activation, has_residual
    differentiated = (dy, dh, h, weight, bias)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in differentiated):
        found = backward_formula(dy, dh, h, weight, bias, seed, *scalars)
        # Outputs of an operator are tensors, never one another: what is not there is empty.
        dx, dresidual, dweight, dbias = (
            h.new_empty(0) if gradient is None or not need else gradient
            for gradient, need in zip(found, needs, strict=True)
        )
        return dx, dresidual.clone() if dresidual is dx else dresidual, dweight, dbias
    tensors = (dy, dh, h, weight, bias, seed, statistics)
    return below_autograd(operators.norm_act_backward, launch_backward, tensors, *scalars, *needs)


class NormActFunction(torch.autograd.Function):
    """`(x, residual, weight, bias, seed, ...) -> (y, h, statistics)`; the statistics carry no gradient."""

    @staticmethod
    def forward(
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        seed: Tensor | None,
        eps: float,
        dropout_p: float,
        norm: str,
        activation: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the operator."""
        tensors = (x, residual, weight, bias, seed)
        return below_autograd(operators.norm_act, launch_forward, tensors, eps, dropout_p, norm, activation)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        """Save what was normalised, the parameters, the seed and the statistics."""
        x, residual, weight, bias, seed, *scalars = inputs
        _, h, statistics = output
        ctx.save_for_backward(x if residual is None else h, weight, bias, seed, statistics)
        # Without a residual h is empty; and of tensors that want no gradient neither does the sum.
        adds = residual is not None and any(ctx.needs_input_grad[:2])
        ctx.mark_non_differentiable(*((statistics,) if adds else (h, statistics)))
        # An output that nobody used would otherwise arrive as a tensor of zeros, read for nothing.
        ctx.set_materialize_grads(False)
        ctx.scalars = scalars
        ctx.dtypes = x.dtype, None if residual is None else residual.dtype

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dh: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        """Gradients of x, residual, weight and bias, each only where it is needed."""
        h, weight, bias, seed, statistics = ctx.saved_tensors
        x_dtype, residual_dtype = ctx.dtypes
        need_x, need_residual, need_dweight, need_dbias = ctx.needs_input_grad[:4]
        eps, dropout_p, norm, activation = ctx.scalars
        nothing = (None,) * 5
        if dy is None:
            if dh is None:
                return (None,) * 4 + nothing
            # Only the sum was used.
            need_dweight = need_dbias = False
            if dropout_p == 0.0:
                return (dh.to(x_dtype) if need_x else None, dh.to(residual_dtype) if need_residual else None,
                        None, None, *nothing)  # fmt: skip
            dy = torch.zeros_like(dh)
        # Without dropout the gradients of x and of the residual are the same.
        one = dropout_p == 0.0 or residual_dtype is None
        dx, dresidual, dweight, dbias = differentiable_backward(
            dy, dh, h, weight, bias, seed, statistics, eps, dropout_p, norm, activation, residual_dtype is not None,
            need_x or (one and need_residual), need_residual and not one, need_dweight, need_dbias,
        )  # fmt: skip
        return (
            dx.to(x_dtype) if need_x else None,
            (dx if one else dresidual).to(residual_dtype) if need_residual else None,
            dweight if need_dweight else None,
            dbias if need_dbias else None,
            *nothing,
        )


run_norm_act = differentiable(NormActFunction)
library.impl("norm_act", run_norm_act, "Autograd")
library.impl("norm_act_backward", differentiable_backward, "Autograd")


# The level: one positional signature for each function, shared with reference.py.


def _apply(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    run = operators.norm_act if torch.compiler.is_compiling() else run_norm_act
    found: tuple[Tensor, Tensor, Tensor] = run(*arguments)
    return found


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """`layer_norm` of `reference.py` in one Triton kernel."""
    return _apply(x, None, weight, bias, None, eps, 0.0, "layer", "identity")[0]


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`add_layer_norm` of `reference.py` in one Triton kernel."""
    return _apply(x, residual, weight, bias, seed, eps, dropout_p, "layer", "identity")[:2]


def layer_norm_act(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: str,
    dropout_p: float,
    seed: Tensor | None,
) -> Tensor:
    """`layer_norm_act` of `reference.py` in one Triton kernel."""
    return _apply(x, None, weight, bias, seed, eps, dropout_p, "layer", activation)[0]


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
    """`add_layer_norm_act` of `reference.py` in one Triton kernel."""
    return _apply(x, residual, weight, bias, seed, eps, dropout_p, "layer", activation)[:2]


def rms_norm_act(
    x: Tensor, weight: Tensor | None, eps: float, activation: str, dropout_p: float, seed: Tensor | None
) -> Tensor:
    """`rms_norm_act` of `reference.py` in one Triton kernel."""
    return _apply(x, None, weight, None, seed, eps, dropout_p, "rms", activation)[0]


def add_rms_norm_act(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    activation: str,
    dropout_p: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm_act` of `reference.py` in one Triton kernel."""
    return _apply(x, residual, weight, None, seed, eps, dropout_p, "rms", activation)[:2]
