"""`SwiGLU` and `GEGLU`: the functions as modules, for where a network has its activations in a list."""

from __future__ import annotations

import torch
from torch import Tensor

from kernel_pytorch.fused_ln_act.levels import LADDER

from .functional import Approximate, check_gelu, check_swish, geglu, swiglu


class SwiGLU(torch.nn.Module):
    """`kernel_pytorch.fused_ln_act.swiglu` as a module without parameters.

    `alpha`, `limit` and `offset` are as in `swiglu`.

    Args:
        level: as in `swiglu`; an attribute that may be changed later.
    """

    def __init__(
        self, alpha: float = 1.0, limit: float | None = None, offset: float = 0.0, *, level: str | None = None
    ) -> None:
        super().__init__()
        check_swish(alpha, limit, offset)
        LADDER.check(level)
        self.alpha, self.limit, self.offset, self.level = alpha, limit, offset, level

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        """`(..., I)` of gate and up `(..., I)`, or of one packed tensor `(..., 2I)`; errors as of `swiglu`."""
        return swiglu(gate, up, alpha=self.alpha, limit=self.limit, offset=self.offset, level=self.level)

    def extra_repr(self) -> str:
        """Alpha, limit and offset, and the level if one was given."""
        text = f"alpha={self.alpha}, limit={self.limit}, offset={self.offset}"
        return text + (f", level={self.level!r}" if self.level is not None else "")


class GEGLU(torch.nn.Module):
    """`kernel_pytorch.fused_ln_act.geglu` as a module without parameters.

    `approximate` and `limit` are as in `geglu`.

    Args:
        level: as in `geglu`; an attribute that may be changed later.
    """

    def __init__(
        self, approximate: Approximate = "none", limit: float | None = None, *, level: str | None = None
    ) -> None:
        super().__init__()
        check_gelu(approximate, limit)
        LADDER.check(level)
        self.approximate, self.limit, self.level = approximate, limit, level

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        """`(..., I)` of gate and up `(..., I)`, or of one packed tensor `(..., 2I)`; errors as of `geglu`."""
        return geglu(gate, up, approximate=self.approximate, limit=self.limit, level=self.level)

    def extra_repr(self) -> str:
        """The approximation and the limit, and the level if one was given."""
        text = f"approximate={self.approximate!r}, limit={self.limit}"
        return text + (f", level={self.level!r}" if self.level is not None else "")
