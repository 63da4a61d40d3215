"""What PyTorch itself offers best: `torch.nn.functional.rms_norm`, one kernel where the dtypes allow it.

`F.rms_norm` computes in float32 and rounds once, so the rounding that "llama" and "none" ask for in between is left
out: the result is the more accurate one, in the dtype that `casting` says.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str) -> Tensor:
    """`rms_norm` of `reference.py` through `F.rms_norm`; same arguments and result dtype."""
    if weight is None:
        return F.rms_norm(x, x.shape[-1:], None, eps)
    scale = weight if offset == 0.0 else offset + weight.to(torch.promote_types(weight.dtype, torch.float32))
    per_head = weight.dim() == 2
    if not per_head and scale.dtype == x.dtype:
        return F.rms_norm(x, x.shape[-1:], scale, eps)
    # One weight row per head, or another dtype than x: the fused kernel takes neither, so the scale is a second one.
    if casting == "gemma":
        return (F.rms_norm(x, x.shape[-1:], None, eps) * scale).to(x.dtype)
    return (F.rms_norm(x, x.shape[-1:], None, eps) * scale).to(torch.promote_types(x.dtype, weight.dtype))


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` of `reference.py`: PyTorch has no fused one, so the sum is a kernel of its own."""
    h = x + residual
    return rms_norm(h, weight, eps, offset, casting), h


def head_rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, casting: str) -> Tensor:
    """`head_rms_norm` of `reference.py`: the norm without weight, then the rows of weights by broadcasting."""
    return rms_norm(x, weight, eps, offset, casting)
