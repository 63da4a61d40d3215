"""Task backward: write the gradient of a norm in a Triton kernel.

    y = x * rstd,  rstd = 1 / sqrt(mean(x^2) + eps)

`rstd` depends on every element of the row, so `dx` has a second term, which is missing here. Derive it, or look it up
on the page about `rmsnorm`. Without a GPU, Triton's interpreter runs it. `kernel-pytorch learn --check backward.py`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

EPS = 1e-6


@triton.jit
def _forward_kernel(x_ptr, y_ptr, rstd_ptr, columns, EPS: tl.constexpr, BLOCK: tl.constexpr):
    """One program, one row. x, y: (rows, columns), contiguous. rstd: (rows,)."""
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    mask = column < columns
    x = tl.load(x_ptr + row * columns + column, mask=mask, other=0.0)
    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / columns + EPS)
    tl.store(rstd_ptr + row, rstd)
    tl.store(y_ptr + row * columns + column, x * rstd, mask=mask)


@triton.jit
def _backward_kernel(dy_ptr, x_ptr, rstd_ptr, dx_ptr, columns, BLOCK: tl.constexpr):
    """One program, one row. dy, x, dx: (rows, columns), contiguous. rstd: (rows,)."""
    row, column = tl.program_id(0), tl.arange(0, BLOCK)
    mask = column < columns
    dy = tl.load(dy_ptr + row * columns + column, mask=mask, other=0.0)
    rstd = tl.load(rstd_ptr + row)
    tl.store(dx_ptr + row * columns + column, dy * rstd, mask=mask)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        rows, columns = x.shape
        y, rstd = torch.empty_like(x), x.new_empty(rows)
        _forward_kernel[(rows,)](x, y, rstd, columns, EPS=EPS, BLOCK=triton.next_power_of_2(columns))
        ctx.save_for_backward(x, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        x, rstd = ctx.saved_tensors
        rows, columns = x.shape
        dx = torch.empty_like(x)
        _backward_kernel[(rows,)](dy.contiguous(), x, rstd, dx, columns, BLOCK=triton.next_power_of_2(columns))
        return dx


def rms_norm(x: Tensor) -> Tensor:
    """`(rows, columns)`, contiguous, float32 or float64."""
    return _RmsNorm.apply(x)
