"""Norm of every head of queries and keys, then rotary position embedding, defined.

    n = q / sqrt(mean(q^2) + eps) * (offset + weight)        the mean runs over the D columns of a head
    y1 = n1 * cos - n2 * sin,  y2 = n2 * cos + n1 * sin      for every pair (n1, n2) of a head

and the same of k; with LayerNorm, n = (q - mean(q)) / sqrt(var(q) + eps) * (offset + weight). Norm: Henry et al.,
"Query-Key Normalization for Transformers", 2020, https://arxiv.org/abs/2010.04245, with RMSNorm as in Qwen3 (offset 0)
and Gemma 3 (offset 1), https://arxiv.org/abs/2505.09388, https://arxiv.org/abs/2503.19786, with LayerNorm as in
Dehghani et al., "Scaling Vision Transformers to 22 Billion Parameters", 2023, https://arxiv.org/abs/2302.05442.
Rotation: `rotary_embedding`. All in float32 (float64 for float64), rounded once; the models round in between.
"""

from typing import Optional, Tuple

import torch
from torch import Tensor

from kernel_pytorch.qkv_fusion.rotary.levels.reference import rotate


def _one(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, interleaved: bool, offset: float, centred: bool
) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    h = x.to(wide)
    if centred:
        h = h - h.mean(-1, keepdim=True)
    normalized = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * (offset + weight.to(wide))
    return rotate(normalized, cos, sin, interleaved, False).to(x.dtype)


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Optional[Tensor],
    eps: float,
    interleaved: bool,
    offset: float,
) -> Tuple[Tensor, Tensor]:
    """Normalise every head of q and k by its root mean square, then rotate it by the angles of its token.

    Args:
        q: `(..., S, H, D)`, any float dtype.
        k: `(..., S, K, D)`, in the dtype of q.
        q_weight: `(D,)`, shared by the heads; any float dtype.
        k_weight: as q_weight.
        cos: `(S, R/2)`, or `(..., S, R/2)` with the leading dimensions of q; `(P, R/2)` with position_ids.
        sin: as cos.
        eps: added to the mean square.
        offset: added to the weights.

    Returns:
        q and k so treated, in their dtype.
    """
    if position_ids is not None:
        cos, sin = cos[position_ids], sin[position_ids]
    return (
        _one(q, q_weight, cos, sin, eps, interleaved, offset, False),
        _one(k, k_weight, cos, sin, eps, interleaved, offset, False),
    )


def qk_layer_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Optional[Tensor],
    eps: float,
    interleaved: bool,
    offset: float,
) -> Tuple[Tensor, Tensor]:
    """The same with LayerNorm, which subtracts the mean of a head first."""
    if position_ids is not None:
        cos, sin = cos[position_ids], sin[position_ids]
    return (
        _one(q, q_weight, cos, sin, eps, interleaved, offset, True),
        _one(k, k_weight, cos, sin, eps, interleaved, offset, True),
    )
