"""RMSNorm: `rms_norm`, `add_rms_norm`, `head_rms_norm`, and their gradients.

    y = x / sqrt(mean(x^2) + eps) * (offset + weight)        the mean runs over the last dimension

Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019, https://arxiv.org/abs/1910.07467. Everything is
computed in float32 (float64 for float64) and rounded once, so the rounding that castings "llama" and "none" have in
between is left out; the dtype of the result is theirs.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ._core.operator import declare
from ._rmsnorm.rms_norm import ADD_RMS_NORM_RULES, BACKWARD_RULES, RMS_NORM_RULES
from .arguments import check_tensor
from .operators import call

run_rms_norm_backward = declare(**BACKWARD_RULES)
run_rms_norm = declare(**RMS_NORM_RULES, backward=run_rms_norm_backward)
run_add_rms_norm = declare(**ADD_RMS_NORM_RULES, backward=run_rms_norm_backward)


def _rms_norm(function: str, *arguments: Any) -> Tensor:
    return call(function, run_rms_norm, *arguments)[0]


def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float = 1e-6, offset: float = 0.0, casting: str = "llama"
) -> Tensor:
    """Normalise the last dimension of `x`, differentiable in x and weight any number of times.

    Args:
        x: `(..., N)`, float16, bfloat16 or float32, on a CPU float64 too; any strides.
        weight: `(N,)`, or `(H, N)` for x of shape `(..., H, N)`; any of these dtypes, on the device of x.
        eps: added to the mean square.
        offset: added to the weight.
        casting: the dtype of the result: that of x for "gemma", x and weight promoted for "llama" and "none".

    Returns:
        `(..., N)`.

    Raises:
        RuntimeError: the arguments do not fit, or the kernel could not be launched; the message names them.
        TypeError: an argument is not of its kind.
        ValueError: a number is not finite, or eps negative.
    """
    return _rms_norm("rms_norm", x, weight, eps, offset, casting)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: str = "llama",
) -> tuple[Tensor, Tensor]:
    """Add the residual stream, then normalise: `h = x + residual`, `y = rms_norm(h)`.

    Args:
        x: `(..., N)`.
        residual: `(..., N)`, on the device of x; its dtype may differ.
        casting: as for `rms_norm`, with h in the place of x.

    Returns:
        `(y, h)`; h in the promoted dtype of x and residual.

    Raises:
        RuntimeError, TypeError, ValueError: as `rms_norm`.
    """
    arguments = (x, residual, weight, eps, offset, casting)
    y, h, _ = call("add_rms_norm", run_add_rms_norm, *arguments)
    return y, h


def head_rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, offset: float = 0.0, casting: str = "llama") -> Tensor:
    """Normalise every head on its own: `rms_norm` of x `(..., H, D)` with weight `(H, D)`."""
    check_tensor("head_rms_norm", "weight", weight)  # which the operator can do without
    return _rms_norm("head_rms_norm", x, weight, eps, offset, casting)
