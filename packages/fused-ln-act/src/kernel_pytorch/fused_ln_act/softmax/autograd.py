"""Gradients of the Triton level, and its function.

The operators are attached to autograd here: called directly, `torch.ops.kernel_pytorch.softmax` differentiates like
this function does. First derivatives run in the Triton kernels. When they are to be differentiated again
(`create_graph=True`) they are computed by `backward_formula`, plain PyTorch that autograd can follow.

Saved for the backward: y, which is a result anyway, and a mask that is added, of which only the shape counts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernel_pytorch.fused_ln_act.differentiable import differentiable
from kernel_pytorch.fused_ln_act.dispatch import below_autograd, library

from .ops import launch_backward, launch_forward

operators = torch.ops.kernel_pytorch


def backward_formula(dy: Tensor, y: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor | None]:
    """The gradients of `triton_backward.py` in differentiable PyTorch: `(dx, dmask)`."""
    wide = torch.promote_types(y.dtype, torch.float32)
    p, dy = y.to(wide), dy.to(wide)
    dz = p * (dy - (dy * p).sum(-1, keepdim=True))
    dmask = None if mask is None else dz.sum_to_size(mask.shape).to(mask.dtype)
    return (scale * dz).to(y.dtype), dmask


def differentiable_backward(
    dy: Tensor, y: Tensor, mask: Tensor | None, scale: float, need_dx: bool, need_dmask: bool
) -> tuple[Tensor, Tensor]:
    """The backward operator with gradients of its own: the formula where a graph is wanted, else the kernels."""
    if torch.is_grad_enabled() and any(t.requires_grad for t in (dy, y)):
        dx, dmask = backward_formula(dy, y, mask, scale)
        nothing_like_mask = (y if mask is None else mask).new_empty((0,))
        return (
            dx if need_dx else y.new_empty((0,)),
            dmask if need_dmask and dmask is not None else nothing_like_mask,
        )
    scalars = (scale, need_dx, need_dmask)
    return below_autograd(operators.softmax_backward, launch_backward, (dy, y, mask), *scalars)


class SoftmaxFunction(torch.autograd.Function):
    """`(x, mask) -> y`."""

    @staticmethod
    def forward(x: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        """Run the operator."""
        return below_autograd(operators.softmax, launch_forward, (x, mask), scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save y, and a mask that may want a gradient."""
        x, mask, ctx.scale = inputs
        ctx.dtype = x.dtype
        ctx.save_for_backward(output, mask if mask is not None and mask.is_floating_point() else None)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x and of the mask, each only where it is needed."""
        y, mask = ctx.saved_tensors
        need_dx, need_dmask = ctx.needs_input_grad[:2]
        dx, dmask = differentiable_backward(dy, y, mask, ctx.scale, need_dx, need_dmask)
        return dx.to(ctx.dtype) if need_dx else None, dmask if need_dmask else None, None


run_softmax = differentiable(SoftmaxFunction)
library.impl("softmax", run_softmax, "Autograd")
library.impl("softmax_backward", differentiable_backward, "Autograd")


# The level: the positional signature of reference.py.


def softmax(x: Tensor, scale: float, mask: Tensor | None) -> Tensor:
    """`softmax` of `reference.py` in one Triton kernel. While torch.compile or export traces: one operator."""
    run = operators.softmax if torch.compiler.is_compiling() else run_softmax
    found: Tensor = run(x, mask, scale)
    return found
