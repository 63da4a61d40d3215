"""Softmax of scaled and masked scores, `softmax`, and its gradients.

    z = scale * x + mask                                     or -inf where a boolean mask is False
    y = exp(z - max(z)) / sum(exp(z - max(z)))               over the last dimension

What stands between the two products of attention (Vaswani et al., "Attention Is All You Need", 2017, section 3.2.1,
https://arxiv.org/abs/1706.03762). With a mask, a row in which every z is -inf gives zeros, and so does its gradient.
Everything is computed in float32 (float64 for float64) and rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import rows_sharding
from .differentiable import differentiable, wants_graph
from .operators import below_autograd, call, operators, register

HALVES = (torch.float16, torch.bfloat16)


def _fake(x: Tensor, mask: Tensor | None, scale: float, version: int = 0) -> Tensor:
    if mask is None or mask.dtype == torch.bool:
        return x.new_empty(x.shape)
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, mask.dtype))


def _fake_backward(
    dy: Tensor, y: Tensor, mask: Tensor | None, scale: float, need_dx: bool, need_dmask: bool
) -> tuple[Tensor, Tensor]:
    dx = y.new_empty(y.shape if need_dx else (0,))
    return dx, y.new_empty((0,)) if mask is None else mask.new_empty(mask.shape if need_dmask else (0,))


def backward_formula(dy: Tensor, y: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor | None]:
    """The gradients in PyTorch that autograd can follow: `(dx, dmask)`."""
    wide = torch.promote_types(y.dtype, torch.float32)
    p, dy = y.to(wide), dy.to(wide)
    dz = p * (dy - (dy * p).sum(-1, keepdim=True))
    dmask = None if mask is None else dz.sum_to_size(mask.shape).to(mask.dtype)
    return (scale * dz).to(y.dtype), dmask


def _differentiable_backward(
    dy: Tensor, y: Tensor, mask: Tensor | None, scale: float, need_dx: bool, need_dmask: bool
) -> tuple[Tensor, Tensor]:
    """The backward operator with gradients of its own: the formula where a graph is wanted, else the kernels."""
    if torch.is_grad_enabled() and (dy.requires_grad or y.requires_grad):
        dx, dmask = backward_formula(dy, y, mask, scale)
        nothing = (y if mask is None else mask).new_empty((0,))
        return dx if need_dx else y.new_empty((0,)), dmask if need_dmask and dmask is not None else nothing
    return below_autograd(operators.softmax_backward.default, dy, y, mask, scale, need_dx, need_dmask)


class SoftmaxFunction(torch.autograd.Function):
    """`(x, mask) -> y`."""

    @staticmethod
    def forward(x: Tensor, mask: Tensor | None, scale: float, version: int = 0) -> Tensor:
        """Run the operator."""
        return below_autograd(operators.softmax.default, x, mask, scale, version)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save y, and a mask that may want a gradient, of which only the shape counts."""
        x, mask, ctx.scale = inputs[:3]
        ctx.dtype = x.dtype
        ctx.save_for_backward(output, mask if mask is not None and mask.is_floating_point() else None)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of x and of the mask, each only where it is needed."""
        y, mask = ctx.saved_tensors
        need_dx, need_dmask = ctx.needs_input_grad[:2]
        dx, dmask = _differentiable_backward(dy, y, mask, ctx.scale, need_dx, need_dmask)
        found = dx.to(ctx.dtype) if need_dx else None, dmask if need_dmask else None
        return found + (None,) * (len(ctx.needs_input_grad) - 2)


def _forward_flops(x: Any, mask: Any, scale: float, *_: Any, **__: Any) -> int:
    return (6 if mask is None else 7) * torch.Size(x).numel()


def _backward_flops(dy: Any, *_: Any, **__: Any) -> int:
    return 5 * torch.Size(dy).numel()


_run = differentiable(SoftmaxFunction)


def run_softmax(x: Tensor, mask: Tensor | None, scale: float, version: int = 0) -> Tensor:
    """The operator with its gradient.

    On a CPU, 16 bits are widened in front of it and rounded behind it: y has the same bits, and what is saved of it is
    not rounded, as by the operators of PyTorch that this stands for. A gradient made of what was rounded has half
    as large an error again, and one many times as large where a row of dy has much in common.
    """
    if x.device.type != "cpu" or x.dtype not in HALVES or not wants_graph(x, mask):
        return _run(x, mask, scale, version)
    dtype = x.dtype if mask is None or mask.dtype == torch.bool else torch.promote_types(x.dtype, mask.dtype)
    return _run(x.float(), mask, scale, version).to(dtype)


register("softmax", _fake, run_softmax, _forward_flops, rows_sharding.softmax)
register("softmax_backward", _fake_backward, _differentiable_backward, _backward_flops, rows_sharding.softmax_backward)


def softmax(x: Tensor, scale: float = 1.0, mask: Tensor | None = None) -> Tensor:
    """Normalise the exponentials of the last dimension of `scale * x + mask`, differentiable any number of times.

    Args:
        x: `(..., N)`, float16, bfloat16 or float32, on a CPU float64 too; any strides.
        scale: of x, before the mask.
        mask: broadcasts to the shape of x, on its device; any of these dtypes, added, or bool, False for what is
            masked out; or None.

    Returns:
        `(..., N)` in the dtype of x, promoted with that of a mask that is added. Saved for the backward is the result;
        on a CPU, of 16 bits, in float32.

    Raises:
        RuntimeError: the arguments do not fit, or the kernel could not be launched; the message names them.
        TypeError: an argument is not of its kind.
        ValueError: a number is not finite.
    """
    return call("softmax", operators.softmax.default, run_softmax, x, mask, scale)
