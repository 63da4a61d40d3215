"""Norm, residual, dropout and activation: `layer_norm`, `add_layer_norm`, `layer_norm_act`, ..., and their gradients.

    h = residual + dropout(x)                        with a residual, else h = x
    y = activation(norm(h))                          with a residual, else y = dropout(activation(norm(h)))

Ba, Kiros and Hinton, "Layer Normalization", 2016, https://arxiv.org/abs/1607.06450; Zhang and Sennrich, "Root Mean
Square Layer Normalization", 2019, https://arxiv.org/abs/1910.07467. Everything is computed in float32 (float64 for
float64) and rounded to the dtype of h: h once, before it is normalised, and y once. The mask is that of `philox.py`.

Saved for the backward: what was normalised (x, or h, which is a result anyway), the parameters, the seed, and mean and
rstd, two numbers a row (one for the RMS norm). The input of the activation and the mask are made again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import rows_sharding
from ._core.operator import declare
from .activations import FLOPS, activate
from .arguments import check_tensor
from .operators import DTYPE_NAMES, call
from .philox import dropout


def _fake(
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
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    shape = (2 if norm == "layer" else 1, *x.shape[:-1])
    return (
        x.new_empty(x.shape, dtype=dtype),
        x.new_empty((0,) if residual is None else x.shape, dtype=dtype),
        x.new_empty(shape, dtype=torch.promote_types(dtype, torch.float32)),
    )


def _fake_backward(
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
    x_dtype: str,
    residual_dtype: str,
    need_dx: bool,
    need_dresidual: bool,
    need_dweight: bool,
    need_dbias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    nothing: tuple[int, ...] = (0,)
    of_x, of_residual = getattr(torch, x_dtype), getattr(torch, residual_dtype or x_dtype)
    return (
        h.new_empty(h.shape if need_dx else nothing, dtype=of_x),
        h.new_empty(h.shape if need_dresidual and residual_dtype else nothing, dtype=of_residual),
        h.new_empty(nothing) if weight is None else weight.new_empty(weight.shape if need_dweight else nothing),
        h.new_empty(nothing) if bias is None else bias.new_empty(bias.shape if need_dbias else nothing),
    )


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
    adds: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The gradients in PyTorch that autograd can follow: `(dx, dresidual, dweight, dbias)`, the first two wide."""
    wide = torch.promote_types(h.dtype, torch.float32)
    x_hat, dz = h.to(wide), dy.to(wide)
    if norm == "layer":
        x_hat = x_hat - x_hat.mean(-1, keepdim=True)
    rstd = torch.rsqrt(x_hat.square().mean(-1, keepdim=True) + eps)
    x_hat = x_hat * rstd
    z = x_hat if weight is None else x_hat * weight.to(wide)
    z = z if bias is None else z + bias.to(wide)
    if not adds:
        dz = dropout(dz, seed, dropout_p)
    if activation != "identity":
        dz = dz * activate(z, activation)[1]
    g = dz if weight is None else dz * weight.to(wide)
    dresidual = g - x_hat * (g * x_hat).mean(-1, keepdim=True)
    if norm == "layer":
        dresidual = dresidual - g.mean(-1, keepdim=True)
    dresidual = dresidual * rstd
    if dh is not None:
        dresidual = dresidual + dh.to(wide)
    dx = dropout(dresidual, seed, dropout_p) if adds else dresidual
    dweight = None if weight is None else (dz * x_hat).sum_to_size(weight.shape).to(weight.dtype)
    dbias = None if bias is None else dz.sum_to_size(bias.shape).to(bias.dtype)
    return dx, dresidual, dweight, dbias


def _formula(
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
    x_dtype: str,
    residual_dtype: str,
    need_dx: bool,
    need_dresidual: bool,
    need_dweight: bool,
    need_dbias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The backward operator in PyTorch that autograd can follow."""
    scalars = (eps, dropout_p, norm, activation)
    found = backward_formula(dy, dh, h, weight, bias, seed, *scalars, residual_dtype != "")
    dx, dresidual, dweight, dbias = found
    nothing = _fake_backward(
        dy, dh, h, weight, bias, seed, statistics, *scalars, x_dtype, residual_dtype, False, False, False, False
    )
    wide_dx = dx.clone() if dx is dresidual else dx  # outputs of an operator are never one another
    return (
        wide_dx.to(nothing[0].dtype) if need_dx else nothing[0],
        dresidual.to(nothing[1].dtype) if need_dresidual and residual_dtype else nothing[1],
        dweight if need_dweight and dweight is not None else nothing[2],
        dbias if need_dbias and dbias is not None else nothing[3],
    )


def _save(x: Tensor, residual: Tensor | None, h: Tensor) -> tuple[Tensor]:
    return (x if residual is None else h,)  # what was normalised


def _gradient(
    dy: Tensor | None,
    dh: Tensor | None,
    saved: tuple[Tensor],
    weight: Tensor | None,
    bias: Tensor | None,
    seed: Tensor | None,
    statistics: Tensor,
    eps: float,
    dropout_p: float,
    norm: str,
    activation: str,
    dtypes: Sequence[torch.dtype | None],
    needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    x_dtype, residual_dtype = dtypes[:2]
    need_x, need_residual, need_dweight, need_dbias, _ = needs
    if dy is None:
        assert dh is not None
        if dropout_p == 0.0:  # only the sum was used
            return dh, dh, None, None, None
        need_dweight = need_dbias = False
        dy = torch.zeros_like(dh)
    # Without dropout the gradients of x and of the residual are the same, but for their dtypes.
    one = residual_dtype is None or (dropout_p == 0.0 and residual_dtype == x_dtype)
    dx, dresidual, dweight, dbias = run_norm_act_backward(
        dy, dh, *saved, weight, bias, seed, statistics, eps, dropout_p, norm, activation,
        DTYPE_NAMES[x_dtype], "" if residual_dtype is None else DTYPE_NAMES[residual_dtype],
        need_x or (one and need_residual), need_residual and not one, need_dweight, need_dbias,
    )  # fmt: skip
    return dx, dx if one else dresidual, dweight if need_dweight else None, dbias if need_dbias else None, None


# Operations of an element, forward and backward, without those of the activation.
_NORM_FLOPS = {"layer": (7, 13), "rms": (4, 10)}


def _forward_flops(
    x: Any, residual: Any, weight: Any, bias: Any, seed: Any, eps: float, dropout_p: float, norm: str,
    activation: str, *_: Any, **__: Any,
) -> int:  # fmt: skip
    each = _NORM_FLOPS[norm][0] + FLOPS[activation][0]
    return torch.Size(x).numel() * (each + (residual is not None) + (bias is not None) + (dropout_p > 0.0))


def _backward_flops(
    dy: Any, dh: Any, h: Any, weight: Any, bias: Any, seed: Any, statistics: Any, eps: float, dropout_p: float,
    norm: str, activation: str, *_: Any, **__: Any,
) -> int:  # fmt: skip
    each = _NORM_FLOPS[norm][1] + FLOPS[activation][1]
    return torch.Size(h).numel() * (each + (dh is not None) + (bias is not None) + (dropout_p > 0.0))


run_norm_act = declare(
    "norm_act(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, Tensor? seed, float eps, float dropout_p,"
    " str norm, str activation) -> (Tensor y, Tensor h, Tensor statistics)",
    fake=_fake,
    gradient=_gradient,
    save=_save,
    follows={"h": ("residual", "x")},
    flops=_forward_flops,
    sharding=rows_sharding.norm_act,
)
run_norm_act_backward = declare(
    "norm_act_backward(Tensor dy, Tensor? dh, Tensor h, Tensor? weight, Tensor? bias, Tensor? seed, Tensor statistics,"
    " float eps, float dropout_p, str norm, str activation, str x_dtype, str residual_dtype, bool need_dx,"
    " bool need_dresidual, bool need_dweight, bool need_dbias)"
    " -> (Tensor dx, Tensor dresidual, Tensor dweight, Tensor dbias)",
    fake=_fake_backward,
    formula=_formula,
    flops=_backward_flops,
    sharding=rows_sharding.norm_act_backward,
)


def _norm_act(function: str, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    if function.startswith("add_"):
        check_tensor(function, "residual", arguments[1])  # which the operator can do without
    found: tuple[Tensor, Tensor, Tensor] = call(function, run_norm_act, *arguments)
    return found


def layer_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    """Normalise the last dimension of `x`; differentiable in x, weight and bias any number of times.

    Args:
        x: `(..., N)`, float16, bfloat16 or float32, on a CPU float64 too; any strides.
        weight: `(N,)`, any of these dtypes, on the device of x; None for no scale.
        bias: `(N,)`, any of these dtypes, on the device of x; None for no shift.
        eps: added to the variance.

    Returns:
        `(..., N)` in the dtype of x.

    Raises:
        RuntimeError: the arguments do not fit, or the kernel could not be launched; the message names them.
        TypeError: an argument is not of its kind.
        ValueError: a number is not finite, or eps negative.
    """
    return _norm_act("layer_norm", x, None, weight, bias, None, eps, 0.0, "layer", "identity")[0]


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Add to the residual stream, then normalise: `h = residual + dropout(x)`, `y = layer_norm(h)`.

    Args:
        x: `(..., N)`.
        residual: `(..., N)`, on the device of x; its dtype may differ.
        weight: as for `layer_norm`.
        bias: as for `layer_norm`.
        eps: as for `layer_norm`.
        dropout_p: the probability that an element of x is dropped, from 0 to below 1.
        seed: int64 `()`, on the device of x; None where `dropout_p` is 0.

    Returns:
        `(y, h)`, both in the promoted dtype of x and residual.

    Raises:
        RuntimeError, TypeError, ValueError: as `layer_norm`.
    """
    return _norm_act("add_layer_norm", x, residual, weight, bias, seed, eps, dropout_p, "layer", "identity")[:2]


def layer_norm_act(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    activation: str = "",
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """Normalise, activate, drop: `y = dropout(activation(layer_norm(x)))`.

    Args:
        x: as for `layer_norm`.
        weight: as for `layer_norm`.
        bias: as for `layer_norm`.
        eps: as for `layer_norm`.
        activation: has to be given, behind arguments that may be left out: "gelu", "gelu_tanh", "silu", "relu",
            "relu_squared", "quick_gelu", "tanh", "sigmoid" or "identity".
        dropout_p: the probability that an element of the result is dropped, from 0 to below 1.
        seed: as for `add_layer_norm`.

    Returns:
        `(..., N)` in the dtype of x.

    Raises:
        RuntimeError, TypeError, ValueError: as `layer_norm`.
    """
    return _norm_act("layer_norm_act", x, None, weight, bias, seed, eps, dropout_p, "layer", activation)[0]


def add_layer_norm_act(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    activation: str = "",
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Add, normalise, activate; arguments and results as of `add_layer_norm` and `layer_norm_act`."""
    return _norm_act("add_layer_norm_act", x, residual, weight, bias, seed, eps, dropout_p, "layer", activation)[:2]


def rms_norm_act(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    activation: str = "",
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """As `layer_norm_act`, with the root mean square."""
    return _norm_act("rms_norm_act", x, None, weight, None, seed, eps, dropout_p, "rms", activation)[0]


def add_rms_norm_act(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    activation: str = "",
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `add_layer_norm_act`, with the root mean square."""
    return _norm_act("add_rms_norm_act", x, residual, weight, None, seed, eps, dropout_p, "rms", activation)[:2]
