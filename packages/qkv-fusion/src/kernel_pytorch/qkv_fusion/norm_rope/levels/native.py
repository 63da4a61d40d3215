"""What PyTorch itself offers best: its fused norms, then the best rotation, both in float32.

Rounded to 16 bits in between, the gradients of the weights are off by more than `kernel-pytorch verify` allows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from kernel_pytorch.qkv_fusion.rotary.levels.native import rotate


def _rms_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], scale, eps)


def _layer_norm(x: Tensor, scale: Tensor, eps: float) -> Tensor:
    # Not F.layer_norm, which `kernel-pytorch verify` finds too far off where the mean of a head is large.
    return F.rms_norm(x - x.mean(-1, keepdim=True), x.shape[-1:], scale, eps)


def _both(
    norm: Callable[[Tensor, Tensor, float], Tensor],
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None,
    eps: float,
    interleaved: bool,
    offset: float,
) -> tuple[Tensor, Tensor]:
    """The functions of `reference.py` after `norm`; same arguments and result dtypes."""
    if position_ids is not None:
        cos, sin = cos[position_ids], sin[position_ids]
    found = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        wide = torch.promote_types(x.dtype, torch.float32)
        scale = weight.to(wide) if offset == 0.0 else offset + weight.to(wide)
        found.append(rotate(norm(x.to(wide), scale, eps), cos, sin, interleaved, False).to(x.dtype))
    return found[0], found[1]


qk_norm_rope = functools.partial(_both, _rms_norm)
qk_layer_norm_rope = functools.partial(_both, _layer_norm)
