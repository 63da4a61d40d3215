"""Softmax of scaled and masked scores, `softmax`, and its gradients.

    z = scale * x + mask                                     or -inf where a boolean mask is False
    y = exp(z - max(z)) / sum(exp(z - max(z)))               over the last dimension

What stands between the two products of attention (Vaswani et al., "Attention Is All You Need", 2017, section 3.2.1,
https://arxiv.org/abs/1706.03762). With a mask, a row in which every z is -inf gives zeros, and so does its gradient.
Everything is computed in float32 (float64 for float64) and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import rows_sharding
from ._core.operator import declare, wants_graph
from .operators import call

HALVES = (torch.float16, torch.bfloat16)


def _fake(x: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    if mask is None or mask.dtype == torch.bool:
        return x.new_empty(x.shape)
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, mask.dtype))


def _fake_backward(
    dy: Tensor, y: Tensor, mask: Tensor | None, scale: float, need_dx: bool, need_dmask: bool
) -> tuple[Tensor, Tensor]:
    dx = y.new_empty(y.shape if need_dx else (0,))
    return dx, y.new_empty((0,)) if mask is None else mask.new_empty(mask.shape if need_dmask else (0,))


def _formula(
    dy: Tensor, y: Tensor, mask: Tensor | None, scale: float, need_dx: bool, need_dmask: bool
) -> tuple[Tensor, Tensor]:
    """The gradients in PyTorch that autograd can follow."""
    wide = torch.promote_types(y.dtype, torch.float32)
    p, dy = y.to(wide), dy.to(wide)
    dz = p * (dy - (dy * p).sum(-1, keepdim=True))
    dx = (scale * dz).to(y.dtype) if need_dx else y.new_empty((0,))
    if mask is None or not need_dmask:
        return dx, (y if mask is None else mask).new_empty((0,))
    return dx, dz.sum_to_size(mask.shape).to(mask.dtype)


def _save(y: Tensor, mask: Tensor | None) -> tuple[Tensor | None, ...]:
    return y, mask if mask is not None and mask.is_floating_point() else None  # of which only the shape counts


def _gradient(
    dy: Tensor, saved: tuple[Tensor | None, ...], scale: float, needs: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = run_softmax_backward(dy, *saved, scale, *needs)
    return found


def _forward_flops(x: Any, mask: Any, scale: float, *_: Any, **__: Any) -> int:
    return (6 if mask is None else 7) * torch.Size(x).numel()


def _backward_flops(dy: Any, *_: Any, **__: Any) -> int:
    return 5 * torch.Size(dy).numel()


run_softmax = declare(
    "softmax(Tensor x, Tensor? mask, float scale) -> Tensor",
    fake=_fake,
    gradient=_gradient,
    save=_save,
    flops=_forward_flops,
    sharding=rows_sharding.softmax,
)
run_softmax_backward = declare(
    "softmax_backward(Tensor dy, Tensor y, Tensor? mask, float scale, bool need_dx, bool need_dmask)"
    " -> (Tensor dx, Tensor dmask)",
    fake=_fake_backward,
    formula=_formula,
    flops=_backward_flops,
    sharding=rows_sharding.softmax_backward,
)


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
    widens = isinstance(x, Tensor) and x.device.type == "cpu" and x.dtype in HALVES and wants_graph(x, mask)
    if not widens:
        return call("softmax", run_softmax, x, mask, scale)
    # y has the same bits, and what is saved of it is not rounded, as by the operators of PyTorch that this stands for.
    # A gradient made of what was rounded has half as large an error again, and one many times as large where a row of
    # dy has much in common.
    adds = isinstance(mask, Tensor) and mask.dtype != torch.bool
    return call("softmax", run_softmax, x.float(), mask, scale).to(
        torch.promote_types(x.dtype, mask.dtype) if adds else x.dtype  # type: ignore[union-attr]
    )
