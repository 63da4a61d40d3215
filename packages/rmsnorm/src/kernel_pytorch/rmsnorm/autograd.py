"""Gradients of the Triton level, and its functions.

The operators are attached to autograd here: called directly, `torch.ops.kernel_pytorch.*` differentiate like these
functions do. First derivatives run in the Triton kernels. When they are to be differentiated again
(`create_graph=True`) they are computed by `backward_formula`, plain PyTorch that autograd can follow.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import flops
from .differentiable import differentiable
from .ops import below_autograd, launch_add_forward, launch_backward, launch_forward, library

operators = torch.ops.kernel_pytorch


def backward_formula(
    dy: Tensor, dh: Tensor | None, h: Tensor, weight: Tensor | None, eps: float, offset: float
) -> tuple[Tensor, Tensor | None]:
    """The gradients of `triton_backward.py` in differentiable PyTorch: `(dx, dweight)`."""
    wide = torch.promote_types(h.dtype, torch.float32)
    x, dy = h.to(wide), dy.to(wide)
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    x_hat = x * rstd
    g = dy if weight is None else dy * (offset + weight.to(wide))
    dx = rstd * (g - x_hat * (g * x_hat).mean(-1, keepdim=True))
    if dh is not None:
        dx = dx + dh.to(wide)
    dweight = None if weight is None else (dy * x_hat).sum_to_size(weight.shape).to(weight.dtype)
    return dx.to(h.dtype), dweight


def differentiable_backward(
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    eps: float,
    offset: float,
    need_dx: bool,
    need_dweight: bool,
) -> tuple[Tensor, Tensor]:
    """The backward operator with gradients of its own: the formula where a graph is wanted, else the kernels."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (dy, dh, h, weight)):
        dx, dweight = backward_formula(dy, dh, h, weight, eps, offset)
        nothing = h.new_empty((0,))
        return dx if need_dx else nothing, dweight if need_dweight and dweight is not None else nothing.clone()
    tensors = (dy, dh, h, weight, rstd)
    return below_autograd(operators.rms_norm_backward, launch_backward, tensors, eps, offset, need_dx, need_dweight)


class RMSNormFunction(torch.autograd.Function):
    """`(x, weight) -> (y, rstd)`; rstd carries no gradient."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str) -> tuple[Tensor, Tensor]:
        """Run the operator."""
        return below_autograd(operators.rms_norm, launch_forward, (x, weight), eps, offset, casting)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Save x, weight and one float32 a row."""
        x, weight, eps, offset, _ = inputs
        _, rstd = output
        ctx.save_for_backward(x, weight, rstd)
        ctx.mark_non_differentiable(rstd)
        # rstd has no gradient, and would otherwise get a tensor of zeros.
        ctx.set_materialize_grads(False)
        ctx.scalars = eps, offset

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, _drstd: Any) -> tuple[Tensor | None, ...]:
        """Gradients of x and weight, each only where it is needed."""
        if dy is None:
            return None, None, None, None, None
        x, weight, rstd = ctx.saved_tensors
        need_dx, need_dweight = ctx.needs_input_grad[:2]
        eps, offset = ctx.scalars
        dx, dweight = differentiable_backward(dy, None, x, weight, rstd, eps, offset, need_dx, need_dweight)
        return dx if need_dx else None, dweight if need_dweight else None, None, None, None


class AddRMSNormFunction(torch.autograd.Function):
    """`(x, residual, weight) -> (y, h, rstd)`; rstd carries no gradient."""

    @staticmethod
    def forward(
        x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the operator."""
        tensors = (x, residual, weight)
        return below_autograd(operators.add_rms_norm, launch_add_forward, tensors, eps, offset, casting)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        """Save h, weight and one float32 a row."""
        x, residual, weight, eps, offset, _ = inputs
        _, h, rstd = output
        ctx.save_for_backward(h, weight, rstd)
        # Of tensors that want no gradient the sum wants none.
        ctx.mark_non_differentiable(*((rstd,) if any(ctx.needs_input_grad[:2]) else (h, rstd)))
        # An output that nobody used would otherwise arrive as a tensor of zeros, read for nothing.
        ctx.set_materialize_grads(False)
        ctx.scalars = eps, offset
        ctx.dtypes = x.dtype, residual.dtype

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dh: Tensor | None, _drstd: Any) -> tuple[Tensor | None, ...]:
        """Gradients of x, residual and weight, each only where it is needed."""
        h, weight, rstd = ctx.saved_tensors
        need_x, need_residual, need_dweight = ctx.needs_input_grad[:3]
        eps, offset = ctx.scalars
        if dy is None:
            dx, dweight = dh, None
        else:
            dx, dweight = differentiable_backward(
                dy, dh, h, weight, rstd, eps, offset, need_x or need_residual, need_dweight
            )
        x_dtype, residual_dtype = ctx.dtypes
        return (
            dx.to(x_dtype) if need_x and dx is not None else None,
            dx.to(residual_dtype) if need_residual and dx is not None else None,
            dweight if need_dweight else None,
            None,
            None,
            None,
        )


flops.register_when_counted()
run_rms_norm, run_add_rms_norm = differentiable(RMSNormFunction), differentiable(AddRMSNormFunction)
library.impl("rms_norm", run_rms_norm, "Autograd")
library.impl("add_rms_norm", run_add_rms_norm, "Autograd")
library.impl("rms_norm_backward", differentiable_backward, "Autograd")


# The level: one positional signature, shared with reference.py.


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str) -> Tensor:
    """`rms_norm` of `reference.py` in one Triton kernel. While torch.compile or export traces: one operator."""
    run = operators.rms_norm if torch.compiler.is_compiling() else run_rms_norm
    return run(x, weight, eps, offset, casting)[0]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` of `reference.py` in one Triton kernel."""
    run = operators.add_rms_norm if torch.compiler.is_compiling() else run_add_rms_norm
    y, h, _ = run(x, residual, weight, eps, offset, casting)
    return y, h


def head_rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, casting: str) -> Tensor:
    """`head_rms_norm` of `reference.py` in one Triton kernel."""
    return rms_norm(x, weight, eps, offset, casting)
