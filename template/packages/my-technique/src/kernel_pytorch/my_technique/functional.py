"""The public function: arguments by keyword, checked before any kernel starts."""

from __future__ import annotations

from torch import Tensor

from .arguments import check_number, check_tensor
from .levels import resolve


def my_technique(x: Tensor, *, beta: float, level: str | None = None) -> Tensor:
    """Swish: `y = x * sigmoid(beta * x)`.

    Differentiable in x, any number of times except at level "compile" (once).

    Args:
        x: `(...)`, float16, bfloat16, float32 or float64, any strides, may be empty.
        beta: a Python number, finite and above 0.
        level: None for the default of this device, or one of `levels.LEVELS` by name.

    Returns:
        `(...)`, the dtype of x.

    Raises:
        TypeError: x is no floating-point tensor of an allowed dtype, or beta no number.
        ValueError: beta or level is out of what is allowed.
        RuntimeError: the level asked for cannot run on this device or dtype; the message says why.

    Source: Ramachandran, Zoph and Le, "Searching for Activation Functions", 2017, https://arxiv.org/abs/1710.05941.
    """
    check_tensor("x", x)
    check_number("beta", beta)
    return resolve(level, x)(x, beta)
