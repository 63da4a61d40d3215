"""PyTorch's best operator: `torch.nn.functional.rms_norm`, one kernel if the dtypes allow it.

The fused kernel computes in float32 and rounds once, without the intermediate rounding that "llama" and "none" require:
the result is more accurate than theirs and has the dtype that `casting` says. To reproduce a model's rounding
bit for bit, use level "reference" or "triton".
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str) -> Tensor:
    """`rms_norm` of `reference.py` through `F.rms_norm`; same arguments and result dtype."""
    if weight is None:
        return F.rms_norm(x, x.shape[-1:], None, eps)
    if offset == 0.0 and weight.dim() == 1 and weight.dtype == x.dtype:
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    # One weight row per head, an offset, or another dtype than x: the fused kernel takes none of them.
    wide = torch.promote_types(x.dtype, torch.float32)
    if casting == "gemma":
        scale = offset + weight.to(wide)
        if weight.dim() == 1 and x.dtype == wide:
            return F.rms_norm(x, x.shape[-1:], scale, eps)
        return (F.rms_norm(x.to(wide), x.shape[-1:], None, eps) * scale).to(x.dtype)
    return F.rms_norm(x, x.shape[-1:], None, eps) * (weight if offset == 0.0 else offset + weight)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str
) -> tuple[Tensor, Tensor]:
    """`add_rms_norm` of `reference.py`: PyTorch has no fused operator, so the sum is a separate kernel."""
    h = x + residual
    return rms_norm(h, weight, eps, offset, casting), h


def head_rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float, casting: str) -> Tensor:
    """`head_rms_norm` of `reference.py`: the norm without weight, then the rows of weights by broadcasting."""
    return rms_norm(x, weight, eps, offset, casting)
