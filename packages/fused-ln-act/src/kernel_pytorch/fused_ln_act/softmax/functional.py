"""The public function: arguments checked before any kernel starts."""

from __future__ import annotations

import torch
from torch import Tensor

from kernel_pytorch.fused_ln_act._core.arguments import (
    DTYPES,
    check_device,
    check_filled,
    check_number,
    check_tensor,
    shape_of,
)
from kernel_pytorch.fused_ln_act._core.operation import Operation
from kernel_pytorch.fused_ln_act.levels import LADDER


def softmax(x: Tensor, scale: float = 1.0, mask: Tensor | None = None, *, level: str | None = None) -> Tensor:
    """Softmax of scaled and masked scores over the last dimension: `softmax(scale * x + mask)`.

    In float32, rounded once. Differentiable in x and in a mask that is added, any number of times except at level
    "compile" (once).

    Args:
        x: `(..., N)`, float16, bfloat16, float32 or float64, any strides, N at least 1.
        scale: of x, before the mask is added; finite.
        mask: broadcasts to the shape of x, on its device, read where it lies: any of these dtypes, added to the scores
            (-inf for what is masked out), or bool, False for what is masked out. None for no mask.
        level: None for the default of this device, or "reference", "native", "torchscript", "compile", "triton",
            "cuda".

    Returns:
        `(..., N)` in the dtype of x, promoted with that of a mask that is added. With a mask, a row that is masked out
        altogether gives zeros, where PyTorch gives NaN, and gets gradients of zero.

    Raises:
        TypeError: x or mask is no tensor of an allowed dtype.
        ValueError: shapes, devices, scale or level do not fit; the message names the argument.
        RuntimeError: the level asked for cannot run on this device or dtype; the message says why.

    Saved for the backward at levels "triton" and "cuda": y, which is a result anyway, and a mask that is added. On a
    CPU level "cuda" saves y in float32 instead where it has 16 bits, as level "native" does.

    Source: Vaswani et al., "Attention Is All You Need", 2017, section 3.2.1, https://arxiv.org/abs/1706.03762.
    """
    plain = mask is None and isinstance(scale, (int, float)) and scale == 1.0
    if level is None and plain and isinstance(x, Tensor) and x.is_cpu:
        level = "native"  # one operation of PyTorch's own: there is nothing to fuse
    return SOFTMAX(x, scale, mask, level)


def _check(x: Tensor, scale: float, mask: Tensor | None) -> None:
    check_tensor("x", x)
    check_number("scale", scale)
    if mask is not None:
        _check_mask(mask, x)


def _check_mask(mask: Tensor, x: Tensor) -> None:
    if not isinstance(mask, Tensor):
        raise TypeError(f"mask: given {type(mask).__name__}; it must be a torch.Tensor")
    if mask.layout != torch.strided or mask.is_nested:
        given = "nested" if mask.is_nested else mask.layout
        raise TypeError(f"mask: layout is {given}; allowed is torch.strided")
    if mask.dtype not in (torch.bool, *DTYPES):
        allowed = ", ".join(str(dtype) for dtype in (torch.bool, *DTYPES))
        raise TypeError(f"mask: dtype is {mask.dtype}; allowed are {allowed}")
    ends = zip(reversed(mask.shape), reversed(x.shape), strict=False)
    if mask.dim() > x.dim() or any(size not in (1, of_x) for size, of_x in ends):
        raise ValueError(f"mask: shape is {shape_of(mask)}; it must broadcast to that of x, {shape_of(x)}")
    check_device("mask", mask, x)
    check_filled("mask", mask)


SOFTMAX = Operation(LADDER, "softmax", _check)
