"""What PyTorch itself offers best: `torch.nn.functional.rms_norm`, then the best rotation, both in float32.

Rounded to 16 bits in between, the gradients of the weights are off by more than `kernel-pytorch verify` allows.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from kernel_pytorch.cuda_ops.rotary_embedding.native import rotary_embedding


def _one(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, interleaved: bool, offset: float) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    scale = weight.to(wide) if offset == 0.0 else offset + weight.to(wide)
    normalized = F.rms_norm(x.to(wide), x.shape[-1:], scale, eps)
    return rotary_embedding(normalized, cos, sin, interleaved).to(x.dtype)


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    interleaved: bool,
    offset: float,
) -> tuple[Tensor, Tensor]:
    """`qk_norm_rope` of `reference.py`; same arguments and result dtypes."""
    return (
        _one(q, q_weight, cos, sin, eps, interleaved, offset),
        _one(k, k_weight, cos, sin, eps, interleaved, offset),
    )
