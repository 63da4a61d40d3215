"""The operators `torch.ops.kernel_pytorch.{softmax, softmax_backward}`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernel_pytorch.fused_ln_act import flops
from kernel_pytorch.fused_ln_act import sharding as registered
from kernel_pytorch.fused_ln_act.direct_calls import check_floats, check_memory
from kernel_pytorch.fused_ln_act.dispatch import implement, library

from . import sharding
from .reference import score_dtype

library.define("softmax(Tensor x, Tensor? mask, float scale) -> Tensor")
library.define(
    "softmax_backward(Tensor dy, Tensor y, Tensor? mask, float scale, bool need_dx, bool need_dmask)"
    " -> (Tensor dx, Tensor dmask)"
)


def _check(x: Tensor, mask: Tensor | None) -> None:
    """Whoever calls an operator directly passes no other check, and a wrong shape would read foreign memory."""
    check_floats(x=x)
    if mask is None:
        return
    if mask.dtype != torch.bool and (not mask.is_floating_point() or mask.dtype.itemsize < 2):
        raise TypeError(f"mask: dtype is {mask.dtype}; allowed are bool, float16, bfloat16, float32, float64")
    check_memory("mask", mask)
    ends = zip(reversed(mask.shape), reversed(x.shape), strict=False)
    if mask.dim() > x.dim() or any(size not in (1, of_x) for size, of_x in ends):
        raise ValueError(f"mask: shape is {tuple(mask.shape)}; it must broadcast to that of x, {tuple(x.shape)}")


def launch_forward(x: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """`y` from the Triton kernel."""
    from . import triton_forward

    _check(x, mask)
    return triton_forward.forward(x, mask, scale)


def launch_backward(
    dy: Tensor, y: Tensor, mask: Tensor | None, scale: float, need_dx: bool, need_dmask: bool
) -> tuple[Tensor, Tensor]:
    """`(dx, dmask)` from the Triton kernels; what is not needed comes back empty."""
    from . import triton_backward

    _check(y, mask)
    check_floats(dy=dy)
    if dy.shape != y.shape:
        raise ValueError(f"dy: shape is {tuple(dy.shape)}; it must be that of y, {tuple(y.shape)}")
    return triton_backward.backward(dy, y, mask, scale, need_dx, need_dmask)


implement("softmax", launch_forward)
implement("softmax_backward", launch_backward)


# Fakes: exactly what the launchers allocate, contiguous whatever the strides of the inputs.


@torch.library.register_fake("kernel_pytorch::softmax", lib=library)
def _(x: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    return x.new_empty(x.shape, dtype=score_dtype(x, mask))


@torch.library.register_fake("kernel_pytorch::softmax_backward", lib=library)
def _(
    dy: Tensor, y: Tensor, mask: Tensor | None, scale: float, need_dx: bool, need_dmask: bool
) -> tuple[Tensor, Tensor]:
    dx = y.new_empty(y.shape if need_dx else (0,))
    if mask is None:
        return dx, y.new_empty((0,))
    return dx, mask.new_empty(mask.shape if need_dmask else (0,))


def forward_flops(x: Any, mask: Any, scale: float, **_: Any) -> int:
    """Scale, maximum, difference, exponential, sum, product; shapes in the place of tensors."""
    return (6 if mask is None else 7) * torch.Size(x).numel()


def backward_flops(dy: Any, y: Any, *_: Any, **__: Any) -> int:
    """Product, sum, difference, product, scale; shapes in the place of tensors."""
    return 5 * torch.Size(y).numel()


flops.register_when_counted({"softmax": forward_flops, "softmax_backward": backward_flops})
registered.register_when_distributed(sharding.rules)
