"""The public functions of the norm: arguments by keyword, checked before any kernel starts."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kernel_pytorch.fused_ln_act._core.arguments import check_eps, check_like, check_parameter, check_tensor
from kernel_pytorch.fused_ln_act._core.operation import Operation
from kernel_pytorch.fused_ln_act.arguments import SeededOperation, check_activation, check_dropout
from kernel_pytorch.fused_ln_act.levels import LADDER


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    level: str | None = None,
) -> Tensor:
    """Layer normalisation over the last dimension.

    `y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias`, with the variance of the whole population, in float32 and
    rounded once. Differentiable in x, weight and bias, any number of times except at level "compile" (once).

    Args:
        x: `(..., N)`, float16, bfloat16, float32 or float64, any strides, N at least 1.
        weight: `(N,)`, any of these dtypes, on the device of x; None for no scale.
        bias: `(N,)`, any of these dtypes, on the device of x; None for no shift.
        eps: added to the variance; not negative.
        level: None for the default of this device, or "reference", "native", "torchscript", "compile", "triton",
            "cuda".

    Returns:
        `(..., N)` in the dtype of x.

    Raises:
        TypeError: a tensor is none, or has no allowed dtype.
        ValueError: shapes, devices, eps or level do not fit; the message names the argument.
        RuntimeError: the level asked for cannot run on this device or dtype; the message says why.

    Saved for the backward at levels "triton" and "cuda": x, weight, bias, and two float32 a row.

    Source: Ba, Kiros and Hinton, "Layer Normalization", 2016, https://arxiv.org/abs/1607.06450.
    """
    return LAYER_NORM(x, weight, bias, eps, level)


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    level: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Add to the residual stream and normalise the sum: `h = residual + dropout(x)`, `y = layer_norm(h)`.

    What transformers do between two blocks, in one pass over memory. Differentiable in x, residual, weight and bias.

    `weight`, `bias`, `eps` and `level` are as in `layer_norm`; `RuntimeError` is raised as by `layer_norm`.

    Args:
        x: `(..., N)`, the output of the previous block; float16, bfloat16, float32 or float64.
        residual: `(..., N)`, the residual stream, on the device of x; its dtype may differ.
        dropout_p: probability, from 0 to below 1, that an element of x is dropped before it is added; those that are
            kept are divided by `1 - dropout_p`. Dropout happens whenever this is above 0: give 0 in evaluation.
        seed: int64 of shape `()` on the device of x; the same seed gives the same mask, at every level, forward and
            backward. None with `dropout_p` above 0 draws one from torch's generator of that device (level "native"
            draws PyTorch's own mask instead): `torch.manual_seed` and checkpointing then repeat it as they do for
            `torch.nn.Dropout`, and the host does not wait for the device.

    Returns:
        `(y, new_residual)`, both `(..., N)` in the promoted dtype of x and residual; new_residual is h.

    Raises:
        TypeError: as in `layer_norm`; also where the seed is no int64 tensor.
        ValueError: as in `layer_norm`; also where residual has another shape or device than x, or dropout_p is no
            probability below 1.

    Saved for the backward at levels "triton" and "cuda": h, which is a result anyway, weight, bias, seed, and two
    float32 a row.

    Source: as `layer_norm`; dropout and the residual add in front of it as in Vaswani et al., "Attention Is All You
    Need", 2017, section 5.4, https://arxiv.org/abs/1706.03762.
    """
    return ADD_LAYER_NORM(x, residual, weight, bias, eps, dropout_p, seed, level)


def layer_norm_act(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    activation: str,
    eps: float = 1e-5,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    level: str | None = None,
) -> Tensor:
    """Normalise, activate, drop: `y = dropout(activation(layer_norm(x)))`, everything in float32, rounded once.

    Differentiable in x, weight and bias.

    `x`, `weight`, `bias`, `eps` and `level` are as in `layer_norm`; `seed` is as in `add_layer_norm`; `TypeError`
    is raised as by `add_layer_norm`; `RuntimeError` is raised as by `layer_norm`.

    Args:
        activation: "gelu", "gelu_tanh", "silu", "relu", "relu_squared", "quick_gelu", "tanh", "sigmoid" or "identity".
        dropout_p: as in `add_layer_norm`, here of the elements of the result.

    Returns:
        `(..., N)` in the dtype of x.

    Raises:
        ValueError: as in `add_layer_norm`; also where there is no such activation.

    Saved for the backward at levels "triton" and "cuda": x, weight, bias, seed, and two float32 a row; neither the
    input of the activation nor the mask.

    Source: as `layer_norm`; the activations are named in `activations.py`.
    """
    return LAYER_NORM_ACT(x, weight, bias, eps, activation, dropout_p, seed, level)


def add_layer_norm_act(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    activation: str,
    eps: float = 1e-5,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    level: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Add, normalise, activate: `h = residual + dropout(x)`, `y = activation(layer_norm(h))`.

    Differentiable in x, residual, weight and bias.

    `x`, `residual` and `seed` are as in `add_layer_norm`; `weight`, `bias`, `eps` and `level` are as in
    `layer_norm`; `activation` is as in `layer_norm_act`; `TypeError` is raised as by `add_layer_norm`;
    `ValueError` is raised as by `layer_norm_act`; `RuntimeError` is raised as by `layer_norm`.

    Args:
        dropout_p: as in `add_layer_norm`: of the elements of x, before they are added; y is not dropped.

    Returns:
        `(y, new_residual)` as `add_layer_norm`.

    Saved for the backward at levels "triton" and "cuda": as by `add_layer_norm`.

    Source: as `add_layer_norm` and `layer_norm_act`.
    """
    return ADD_LAYER_NORM_ACT(x, residual, weight, bias, eps, activation, dropout_p, seed, level)


def rms_norm_act(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    activation: str,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    level: str | None = None,
) -> Tensor:
    """As `layer_norm_act`, with the root mean square: `y = dropout(activation(x / sqrt(mean(x^2) + eps) * weight))`.

    `x`, `weight` and `level` are as in `layer_norm`; `activation` and `dropout_p` are as in `layer_norm_act`;
    `seed` is as in `add_layer_norm`; `TypeError` is raised as by `add_layer_norm`; `ValueError` is raised as by
    `layer_norm_act`; `RuntimeError` is raised as by `layer_norm`.

    Args:
        eps: added to the mean square; not negative.

    Returns:
        `(..., N)` in the dtype of x.

    Saved for the backward at levels "triton" and "cuda": x, weight, seed, and one float32 a row.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, https://arxiv.org/abs/1910.07467.
    """
    return RMS_NORM_ACT(x, weight, eps, activation, dropout_p, seed, level)


def add_rms_norm_act(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    *,
    activation: str,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    seed: Tensor | None = None,
    level: str | None = None,
) -> tuple[Tensor, Tensor]:
    """As `add_layer_norm_act`, with the root mean square: `h = residual + dropout(x)`, `y = activation(rms_norm(h))`.

    `x`, `residual` and `seed` are as in `add_layer_norm`; `weight` and `level` are as in `layer_norm`;
    `activation` is as in `layer_norm_act`; `TypeError` is raised as by `add_layer_norm`; `ValueError` is raised
    as by `layer_norm_act`; `RuntimeError` is raised as by `layer_norm`.

    Args:
        eps: added to the mean square; not negative.
        dropout_p: as in `add_layer_norm`: of the elements of x, before they are added; y is not dropped.

    Returns:
        `(y, new_residual)` as `add_layer_norm`.

    Saved for the backward at levels "triton" and "cuda": h, which is a result anyway, weight, seed, and one float32 a
    row.

    Source: as `rms_norm_act` and `add_layer_norm`.
    """
    return ADD_RMS_NORM_ACT(x, residual, weight, eps, activation, dropout_p, seed, level)


def _check(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *residual: Tensor) -> None:
    check_tensor("x", x)
    check_eps(eps)
    for tensor in residual:
        check_like("residual", tensor, x)
    check_parameter("weight", weight, x)
    check_parameter("bias", bias, x)


def _check_add(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, p: float, seed: Tensor | None
) -> None:
    _check(x, weight, bias, eps, residual)
    check_dropout(p, seed, x)


def _check_act(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, activation: str, p: float, seed: Tensor | None,
    *residual: Tensor,
) -> None:  # fmt: skip
    _check(x, weight, bias, eps, *residual)
    check_activation(activation)
    check_dropout(p, seed, x)


def _check_add_act(x: Tensor, residual: Tensor, *others: Any) -> None:
    _check_act(x, *others, residual)


def _check_rms_act(x: Tensor, weight: Tensor | None, *others: Any) -> None:
    _check_act(x, weight, None, *others)


def _check_add_rms_act(x: Tensor, residual: Tensor, weight: Tensor | None, *others: Any) -> None:
    _check_act(x, weight, None, *others, residual)


LAYER_NORM = Operation(LADDER, "layer_norm", _check)
ADD_LAYER_NORM = SeededOperation(LADDER, "add_layer_norm", _check_add)
LAYER_NORM_ACT = SeededOperation(LADDER, "layer_norm_act", _check_act)
ADD_LAYER_NORM_ACT = SeededOperation(LADDER, "add_layer_norm_act", _check_add_act)
RMS_NORM_ACT = SeededOperation(LADDER, "rms_norm_act", _check_rms_act)
ADD_RMS_NORM_ACT = SeededOperation(LADDER, "add_rms_norm_act", _check_add_rms_act)
