"""The definition under TorchInductor: kernels made for the shapes it sees.

The product of 16-bit tensors on a GPU is one of 16-bit numbers, added and returned in float32, as a user who knows
`out_dtype` writes it. The definition widens them first, and no tensor core multiplies float32 exactly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernel_pytorch.linear_cross_entropy._core.compiled import compiled

from . import reference


class _Product(torch.autograd.Function):
    """`x @ weight.T` in float32; PyTorch has no gradient of a product with an `out_dtype`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.mm(x, weight.t(), out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        dz = dz.to(x.dtype)
        return dz @ weight, dz.t() @ x


@compiled
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    reduction: str,
    chunk: int,
) -> Tensor:
    """`linear_cross_entropy` of `reference.py`."""
    scalars = ignore_index, label_smoothing, z_loss, softcap
    if not (hidden.is_cuda and hidden.dtype == weight.dtype and hidden.dtype.itemsize == 2):
        return reference.linear_cross_entropy(hidden, weight, target, bias, *scalars, reduction, chunk)
    logits: Tensor = _Product.apply(hidden.reshape(-1, hidden.shape[-1]), weight)
    logits = logits.view(*hidden.shape[:-1], -1)
    if bias is not None:
        logits = logits + bias.float()
    return reference.cross_entropy(logits, target, *scalars, reduction, False)
