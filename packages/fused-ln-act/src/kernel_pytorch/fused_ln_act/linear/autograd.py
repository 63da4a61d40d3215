"""Gradients of the Triton level, and its functions.

The operators are attached to autograd here: called directly, `torch.ops.kernel_pytorch.linear_act` differentiates like
these functions do. What is elementwise in the backward runs in the Triton kernels, the products for the gradients of x
and of the weights are PyTorch's (cuBLAS). Where the gradients are to be differentiated again (`create_graph=True`)
plain PyTorch that autograd can follow stands in for the kernels.

Saved for the backward, beside x and the weights:

- linear_act: the result for relu, tanh and sigmoid, whose derivative follows from it; nothing for identity; else the
  pre-activation, `(..., N)`, or nothing where it is to be computed again.
- gated_mlp: nothing where gate and up are to be computed again, else both, `(..., 2I)`; h is made again in either case.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernel_pytorch.fused_ln_act.activations import activate, derivative
from kernel_pytorch.fused_ln_act.differentiable import differentiable, wants_graph
from kernel_pytorch.fused_ln_act.dispatch import below_autograd, library

from .ops import (
    FROM_RESULT,
    NOTHING_SAVED,
    launch_gated_mlp,
    launch_gated_mlp_backward,
    launch_linear_act,
    launch_linear_act_backward,
)

operators = torch.ops.kernel_pytorch


def linear_act_backward(
    dy: Tensor,
    saved: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    need_dz: bool,
    need_dbias: bool,
) -> tuple[Tensor, Tensor]:
    """The backward operator with gradients of its own: the formula where a graph is wanted, else the kernels."""
    if not wants_graph(dy, x, weight, bias):
        tensors, scalars = (dy, saved, x, weight, bias), (activation, need_dz, need_dbias)
        return below_autograd(operators.linear_act_backward, launch_linear_act_backward, tensors, *scalars)
    wide = torch.promote_types(x.dtype, torch.float32)
    z = x.to(wide) @ weight.to(wide).t()
    z = z if bias is None else z + bias.to(wide)
    dz = dy.to(wide) * derivative(z, activation)
    need_dz = need_dz and activation != "identity"
    dbias = None if bias is None or not need_dbias else dz.sum_to_size(bias.shape).to(bias.dtype)
    nothing = (dy if bias is None else bias).new_empty(0)
    return dz.to(dy.dtype) if need_dz else dy.new_empty(0), nothing if dbias is None else dbias


def gated_mlp_backward(
    dh: Tensor, saved: Tensor | None, x: Tensor, w_gate_up: Tensor, activation: str, need_h: bool, need_dz: bool
) -> tuple[Tensor, Tensor]:
    """The backward operator with gradients of its own: the formula where a graph is wanted, else the kernel."""
    if not wants_graph(dh, x, w_gate_up):
        tensors, scalars = (dh, saved, x, w_gate_up), (activation, need_h, need_dz)
        return below_autograd(operators.gated_mlp_backward, launch_gated_mlp_backward, tensors, *scalars)
    wide = torch.promote_types(x.dtype, torch.float32)
    gate, up = (x.to(wide) @ w_gate_up.to(wide).t()).chunk(2, -1)
    activated, incoming = activate(gate, activation), dh.to(wide)
    dz = torch.cat([incoming * up * derivative(gate, activation), incoming * activated], -1)
    return (
        (activated * up).to(dh.dtype) if need_h else dh.new_empty(0),
        dz.to(dh.dtype) if need_dz else dh.new_empty(0),
    )


def gradient_of_input(dz: Tensor, weight: Tensor) -> Tensor:
    """`dz @ weight`: of the input of `input @ weight.T`."""
    return dz @ weight


def gradient_of_weight(dz: Tensor, x: Tensor) -> Tensor:
    """`dz.T @ x` over all rows: of the weight of `x @ weight.T`."""
    return dz.flatten(0, -2).t() @ x.flatten(0, -2)


class LinearActFunction(torch.autograd.Function):
    """`(x, weight, bias, ...) -> (y, preactivation)`; the pre-activation carries no gradient."""

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_preactivation: bool
    ) -> tuple[Tensor, Tensor]:
        """Run the operator."""
        tensors, scalars = (x, weight, bias), (activation, save_preactivation)
        return below_autograd(operators.linear_act, launch_linear_act, tensors, *scalars)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Save x, the parameters, and what the derivative is computed of."""
        x, weight, bias, activation, save_preactivation = inputs
        y, preactivation = output
        saved = y if activation in FROM_RESULT else preactivation if save_preactivation else None
        ctx.save_for_backward(saved, x, weight, bias)
        ctx.mark_non_differentiable(preactivation)
        ctx.set_materialize_grads(False)
        ctx.activation = activation

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        """Gradients of x, weight and bias, each only where it is needed."""
        need_dx, need_dweight, need_dbias = ctx.needs_input_grad[:3]
        if dy is None:
            return (None,) * 5
        saved, x, weight, bias = ctx.saved_tensors
        if ctx.activation == "identity":
            saved = None
        need_dz = need_dx or need_dweight
        dz, dbias = dy, None
        if need_dbias or ctx.activation != "identity":
            dz, dbias = linear_act_backward(dy, saved, x, weight, bias, ctx.activation, need_dz, need_dbias)
        dz = dy if ctx.activation == "identity" else dz
        return (
            gradient_of_input(dz, weight) if need_dx else None,
            gradient_of_weight(dz, x) if need_dweight else None,
            dbias if need_dbias else None,
            None,
            None,
        )


class GatedMLPFunction(torch.autograd.Function):
    """`(x, w_gate_up, w_down, ...) -> (y, preactivation)`; the pre-activation carries no gradient."""

    @staticmethod
    def forward(
        x: Tensor, w_gate_up: Tensor, w_down: Tensor, activation: str, save_preactivation: bool
    ) -> tuple[Tensor, Tensor]:
        """Run the operator."""
        tensors, scalars = (x, w_gate_up, w_down), (activation, save_preactivation)
        return below_autograd(operators.gated_mlp, launch_gated_mlp, tensors, *scalars)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Save x and the weights, and gate and up where they are not to be computed again."""
        x, w_gate_up, w_down, activation, save_preactivation = inputs
        _, preactivation = output
        ctx.save_for_backward(preactivation if save_preactivation else None, x, w_gate_up, w_down)
        ctx.mark_non_differentiable(preactivation)
        ctx.set_materialize_grads(False)
        ctx.activation = activation

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
        """Gradients of x and both weights, each only where it is needed."""
        need_dx, need_first, need_second = ctx.needs_input_grad[:3]
        if dy is None:
            return (None,) * 5
        saved, x, w_gate_up, w_down = ctx.saved_tensors
        need_dz = need_dx or need_first
        dh = gradient_of_input(dy, w_down)
        h, dz = gated_mlp_backward(dh, saved, x, w_gate_up, ctx.activation, need_second, need_dz)
        return (
            gradient_of_input(dz, w_gate_up) if need_dx else None,
            gradient_of_weight(dz, x) if need_first else None,
            gradient_of_weight(dy, h) if need_second else None,
            None,
            None,
        )


run_linear_act = differentiable(LinearActFunction)
library.impl("linear_act", run_linear_act, "Autograd")
library.impl("linear_act_backward", linear_act_backward, "Autograd")
run_gated_mlp = differentiable(GatedMLPFunction)
library.impl("gated_mlp", run_gated_mlp, "Autograd")
library.impl("gated_mlp_backward", gated_mlp_backward, "Autograd")


# The level: one positional signature for each function, shared with reference.py.


def linear_act(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_preactivation: bool) -> Tensor:
    """`linear_act` of `reference.py` in one Triton kernel. While torch.compile or export traces: one operator."""
    # Without a backward nothing is written for it.
    save = save_preactivation and activation not in NOTHING_SAVED and wants_graph(x, weight, bias)
    run = operators.linear_act if torch.compiler.is_compiling() else run_linear_act
    found: tuple[Tensor, Tensor] = run(x, weight.to(x.dtype), bias, activation, save)
    return found[0]


def gated_mlp(x: Tensor, w_gate_up: Tensor, w_down: Tensor, activation: str, recompute: bool) -> Tensor:
    """`gated_mlp` of `reference.py` in two Triton kernels, one for each product."""
    save = not recompute and wants_graph(x, w_gate_up, w_down)
    weights = w_gate_up.to(x.dtype), w_down.to(x.dtype)
    run = operators.gated_mlp if torch.compiler.is_compiling() else run_gated_mlp
    found: tuple[Tensor, Tensor] = run(x, *weights, activation, save)
    return found[0]
