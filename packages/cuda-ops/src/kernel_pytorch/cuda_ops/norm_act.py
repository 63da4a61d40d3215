"""Norm, residual, dropout and activation: `layer_norm`, `add_layer_norm`, `layer_norm_act`, ..., and their gradients.

    h = residual + dropout(x)                        with a residual, else h = x
    y = activation(norm(h))                          with a residual, else y = dropout(activation(norm(h)))

Ba, Kiros and Hinton, "Layer Normalization", 2016, https://arxiv.org/abs/1607.06450; Zhang and Sennrich, "Root Mean
Square Layer Normalization", 2019, https://arxiv.org/abs/1910.07467. Everything is computed in float32 (float64 for
float64) and rounded to the dtype of h: h once, before it is normalised, and y once. The mask is that of
`_fused_ln_act/philox.py`.

Saved for the backward: what was normalised (x, or h, which is a result anyway), the parameters, the seed, and mean and
rstd, two numbers a row (one for the RMS norm). The input of the activation and the mask are made again.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ._core.operator import declare
from ._fused_ln_act.norm import NORM_ACT_BACKWARD_RULES, NORM_ACT_RULES
from .arguments import check_tensor
from .operators import call

run_norm_act_backward = declare(**NORM_ACT_BACKWARD_RULES)
run_norm_act = declare(**NORM_ACT_RULES, backward=run_norm_act_backward)


def _norm_act(function: str, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    if function.startswith("add_"):
        check_tensor(function, "residual", arguments[1])  # which the operator can do without
    return call(function, run_norm_act, *arguments)


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
        activation: has to be given, behind arguments that may be left out: "gelu", "gelu_tanh", "silu", "relu",
            "relu_squared", "quick_gelu", "tanh", "sigmoid" or "identity".
        dropout_p: the probability that an element of the result is dropped, from 0 to below 1.

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
