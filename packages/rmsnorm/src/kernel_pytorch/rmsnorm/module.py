"""`RMSNorm`, a drop-in for `torch.nn.RMSNorm`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._core.arguments import check_tensor
from .functional import rms_norm
from .levels import LADDER


class RMSNorm(torch.nn.RMSNorm):
    """`torch.nn.RMSNorm` computed by `kernel_pytorch.rmsnorm.rms_norm`.

    Same constructor, parameters, state_dict and result: everything in float32 and rounded once, as casting "gemma"
    does; `eps=None` means the machine epsilon of the dtype that is computed in (float32 for float16 and bfloat16).

    Args:
        normalized_shape: sizes of the trailing dimensions that are normalised together.
        eps: added to the mean square.
        elementwise_affine: whether there is a weight, of shape `normalized_shape`, initialised to ones.
        device: of the weight.
        dtype: of the weight.
        level: as in `rms_norm`; an attribute that may be changed later.

    Raises:
        ValueError: a size of normalized_shape is below 1, or there is none; the level does not exist.
    """

    level: str | None

    def __init__(
        self,
        normalized_shape: int | Sequence[int] | torch.Size,
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        level: str | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        if min(self.normalized_shape, default=0) < 1:
            raise ValueError(f"normalized_shape: given {self.normalized_shape}; it must be sizes of at least 1")
        LADDER.check(level)
        self.level = level

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the trailing dimensions of `x`, `(..., *normalized_shape)`; same shape and dtype come back.

        Raises:
            ValueError: the trailing dimensions of x are not `normalized_shape`.
            TypeError: as `rms_norm`.
        """
        check_tensor("x", x)
        dimensions = len(self.normalized_shape)
        if tuple(x.shape[-dimensions:]) != self.normalized_shape:
            raise ValueError(f"x: shape is {tuple(x.shape)}; its last dimensions must be {self.normalized_shape}")
        eps = self.eps
        if eps is None:
            eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
        weight = None if self.weight is None else self.weight.flatten()
        y = rms_norm(x.flatten(-dimensions), weight, eps=eps, casting="gemma", level=self.level)
        return y.view(x.shape)

    def extra_repr(self) -> str:
        """As the stock module, and the level if one was given."""
        return super().extra_repr() + (f", level={self.level!r}" if self.level is not None else "")
