"""`MyTechnique`, a drop-in for `torch.nn.SiLU`."""

from __future__ import annotations

import torch
from torch import Tensor

from .arguments import check_positive
from .functional import my_technique
from .levels import LADDER


class MyTechnique(torch.nn.SiLU):
    """`torch.nn.SiLU` computed by this package, with a beta; it never writes into its input.

    Args:
        beta: finite and above 0; the stock module has 1.
        level: as in the function; an attribute that may be changed later.
    """

    beta: float
    level: str | None

    def __init__(self, beta: float = 1.0, *, level: str | None = None) -> None:
        super().__init__()
        check_positive("beta", beta)
        LADDER.check(level)
        self.beta = beta
        self.level = level

    def forward(self, x: Tensor) -> Tensor:
        """Apply the function to `x`, `(...)`; same shape and dtype come back. Raises what the function raises."""
        return my_technique(x, beta=self.beta, level=self.level)

    def extra_repr(self) -> str:
        """The arguments, and the level if one was given."""
        return f"beta={self.beta}" + (f", level={self.level!r}" if self.level is not None else "")
