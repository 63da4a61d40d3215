"""The public function: arguments by keyword, checked before any kernel starts."""

from __future__ import annotations

from torch import Tensor

from ._core.arguments import check_floats, check_number
from ._core.operation import Operation
from .levels import LADDER


def my_technique(x: Tensor, *, beta: float, level: str | None = None) -> Tensor:
    """Swish: `y = x * sigmoid(beta * x)`.

    Differentiable in x, any number of times except at level "compile" (once).

    Args:
        x: `(...)`, float16, bfloat16, float32 or float64, any strides, may be empty.
        beta: a Python number, finite and above 0.
        level: None for the default of this device, or one of `LADDER.levels("my_technique")` by name.

    Returns:
        `(...)`, the dtype of x.

    Raises:
        TypeError: x is no floating-point tensor of an allowed dtype, or beta no number.
        ValueError: beta or level is out of what is allowed.
        RuntimeError: the level asked for cannot run on this device or dtype; the message says why.

    Source: Ramachandran, Zoph and Le, "Searching for Activation Functions", 2017, https://arxiv.org/abs/1710.05941.
    """
    y: Tensor = OPERATION(x, beta, level)
    return y


def _check_parameter(beta: float) -> None:
    """Raise TypeError or ValueError, naming it, unless this is a Python number, finite and above 0."""
    check_number("beta", beta)
    if beta <= 0.0:
        raise ValueError(f"beta: given {beta}; it must be above 0")


def _check(x: Tensor, beta: float) -> None:
    check_floats("x", x)
    _check_parameter(beta)


OPERATION = Operation(LADDER, "my_technique", _check)
