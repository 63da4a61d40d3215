"""Bias, dropout and residual, `bias_dropout_add`, and its gradients.

    y = residual + dropout(x + bias)

Fused so first by Shoeybi et al., "Megatron-LM", 2019, https://arxiv.org/abs/1909.08053. Everything is computed in
float32 (float64 for float64) and rounded once; the mask is that of `philox.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import rows_sharding
from ._core.operator import declare
from .operators import DTYPE_NAMES, call
from .philox import dropout


def _fake(x: Tensor, bias: Tensor | None, residual: Tensor, seed: Tensor | None, p: float) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))


def _fake_backward(
    dy: Tensor, bias: Tensor | None, seed: Tensor | None, p: float, x_dtype: str, need_dx: bool, need_dbias: bool
) -> tuple[Tensor, Tensor]:
    dx = dy.new_empty(dy.shape if need_dx else (0,), dtype=getattr(torch, x_dtype))
    return dx, dy.new_empty((0,)) if bias is None else bias.new_empty(bias.shape if need_dbias else (0,))


def _formula(
    dy: Tensor, bias: Tensor | None, seed: Tensor | None, p: float, x_dtype: str, need_dx: bool, need_dbias: bool
) -> tuple[Tensor, Tensor]:
    """The gradients in PyTorch that autograd can follow."""
    dz = dropout(dy.to(torch.promote_types(dy.dtype, torch.float32)), seed, p)
    dx = dz.to(getattr(torch, x_dtype))
    # An operator's output is no input of it, which dx would be where nothing is done.
    dx = (dx.clone() if dx is dy else dx) if need_dx else dx.new_empty((0,))
    if bias is None:
        return dx, dy.new_empty((0,))
    return dx, dz.sum_to_size(bias.shape).to(bias.dtype) if need_dbias else bias.new_empty((0,))


def _gradient(
    dy: Tensor,
    bias: Tensor | None,
    seed: Tensor | None,
    p: float,
    dtypes: Sequence[torch.dtype],
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor | None, Tensor, None]:
    need_dx, need_dbias, _, _ = needs
    # Where nothing is done to x, its gradient is there already.
    compute_dx = need_dx and (p > 0.0 or dy.dtype != dtypes[0])
    if not compute_dx and not need_dbias:
        return dy, None, dy, None
    dx, dbias = run_bias_dropout_add_backward(dy, bias, seed, p, DTYPE_NAMES[dtypes[0]], compute_dx, need_dbias)
    return dx if compute_dx else dy, dbias, dy, None


def _forward_flops(x: Any, bias: Any, residual: Any, seed: Any, p: float, *_: Any, **__: Any) -> int:
    return torch.Size(x).numel() * (1 + (bias is not None) + (p > 0.0))


def _backward_flops(dy: Any, bias: Any, seed: Any, p: float, *_: Any, **__: Any) -> int:
    return torch.Size(dy).numel() * ((bias is not None) + (p > 0.0))


run_bias_dropout_add = declare(
    "bias_dropout_add(Tensor x, Tensor? bias, Tensor residual, Tensor? seed, float p) -> Tensor",
    fake=_fake,
    gradient=_gradient,
    flops=_forward_flops,
    sharding=rows_sharding.bias_dropout_add,
)
run_bias_dropout_add_backward = declare(
    "bias_dropout_add_backward(Tensor dy, Tensor? bias, Tensor? seed, float p, str x_dtype, bool need_dx,"
    " bool need_dbias) -> (Tensor dx, Tensor dbias)",
    fake=_fake_backward,
    formula=_formula,
    flops=_backward_flops,
    sharding=rows_sharding.bias_dropout_add_backward,
)


def bias_dropout_add(
    x: Tensor, bias: Tensor | None, residual: Tensor, p: float = 0.0, seed: Tensor | None = None
) -> Tensor:
    """Add the bias, drop, add to the residual stream; differentiable in x, bias and residual any number of times.

    Args:
        x: `(..., N)`, float16, bfloat16 or float32, on a CPU float64 too; any strides.
        bias: `(N,)`, any of these dtypes, on the device of x; None for no bias.
        residual: `(..., N)`, on the device of x; its dtype may differ.
        p: the probability that an element of `x + bias` is dropped, from 0 to below 1.
        seed: int64 `()`, on the device of x; None where p is 0.

    Returns:
        `(..., N)` in the promoted dtype of x and residual.

    Raises:
        RuntimeError: the arguments do not fit, or the kernel could not be launched; the message names them.
        TypeError: an argument is not of its kind.
        ValueError: a number is not finite.
    """
    return call("bias_dropout_add", run_bias_dropout_add, x, bias, residual, seed, p)
