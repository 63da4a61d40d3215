"""`MyTechnique`, the function as a module."""

from __future__ import annotations

import torch
from torch import Tensor

from .functional import _check_parameter, my_technique
from .levels import LADDER


class MyTechnique(torch.nn.Module):
    """`my_technique` with its `beta`, as a layer of a network.

    Args:
        beta: as in the function.
        level: as in the function; an attribute that may be changed later.
    """

    def __init__(self, beta: float, *, level: str | None = None) -> None:
        super().__init__()
        _check_parameter(beta)
        LADDER.check(level)
        self.beta = beta
        self.level = level

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function to `x`, `(...)`; same shape and dtype come back. Raises what the function raises."""
        return my_technique(x, beta=self.beta, level=self.level)

    def extra_repr(self) -> str:
        """The arguments, and the level if one was given."""
        return f"beta={self.beta}" + (f", level={self.level!r}" if self.level is not None else "")
