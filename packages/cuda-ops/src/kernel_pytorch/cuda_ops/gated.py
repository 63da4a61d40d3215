"""Gated linear units: `swiglu`, `geglu`, `reglu`, and their gradients.

    y = activation(gate) * (up + offset)

Shazeer, "GLU Variants Improve Transformer", 2020, https://arxiv.org/abs/2002.05202. Everything is computed in float32
(float64 for float64) and rounded once.
"""

from __future__ import annotations

from torch import Tensor

from ._core.operator import declare
from ._fused_ln_act.gated import GATED_BACKWARD_RULES, GATED_RULES
from .operators import call

run_gated_backward = declare(**GATED_BACKWARD_RULES)
run_gated = declare(**GATED_RULES, backward=run_gated_backward)


def swiglu(
    gate: Tensor, up: Tensor | None = None, alpha: float = 1.0, limit: float | None = None, offset: float = 0.0
) -> Tensor:
    """Gate by SiLU: `y = gate * sigmoid(alpha * gate) * (up + offset)`, differentiable any number of times.

    Args:
        gate: `(..., I)`, float16, bfloat16 or float32, on a CPU float64 too; any strides; packed with up `(..., 2I)`.
        up: `(..., I)`, any of these dtypes, on the device of gate; None where gate is packed.
        alpha: the slope of the sigmoid.
        limit: gate is clamped to at most this, up to at most this far from zero; positive, or None. The gradient of
            what is clamped is 0.
        offset: added to up.

    Returns:
        `(..., I)` in the promoted dtype of gate and up.

    Raises:
        RuntimeError: the arguments do not fit, or the kernel could not be launched; the message names them.
        TypeError: an argument is not of its kind.
        ValueError: a number is not finite.
    """
    return call("swiglu", run_gated, gate, up, "silu", alpha, limit, offset)


def geglu(gate: Tensor, up: Tensor | None = None, approximate: str = "none", limit: float | None = None) -> Tensor:
    """Gate by GELU: exactly, or with `approximate="tanh"` by its approximation; otherwise as `swiglu`."""
    activation = {"none": "gelu", "tanh": "gelu_tanh"}.get(approximate)
    if activation is None:
        raise RuntimeError(f"geglu: approximate: given {approximate!r}; allowed are 'none', 'tanh'")
    return call("geglu", run_gated, gate, up, activation, 1.0, limit, 0.0)


def reglu(gate: Tensor, up: Tensor | None = None, limit: float | None = None) -> Tensor:
    """Gate by ReLU; otherwise as `swiglu`."""
    return call("reglu", run_gated, gate, up, "relu", 1.0, limit, 0.0)
