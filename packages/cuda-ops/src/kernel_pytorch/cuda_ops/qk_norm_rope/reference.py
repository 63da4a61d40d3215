"""RMSNorm of every head of queries and keys, then rotary position embedding, defined.

    n = q / sqrt(mean(q^2) + eps) * (offset + weight)        the mean runs over the D columns of a head
    y1 = n1 * cos - n2 * sin,  y2 = n2 * cos + n1 * sin      for every pair (n1, n2) of a head

and the same of k. Norm: Henry et al., "Query-Key Normalization for Transformers", 2020, https://arxiv.org/abs/2010.04245,
with RMSNorm as in Qwen3 (offset 0) and Gemma 3 (offset 1), https://arxiv.org/abs/2505.09388, https://arxiv.org/abs/2503.19786.
Rotation: `rotary_embedding`. All in float32 (float64 for float64), rounded once; the models round in between.
"""

from typing import Tuple

import torch
from torch import Tensor

from kernel_pytorch.cuda_ops.rotary_embedding.reference import rotary_embedding


def _one(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, interleaved: bool, offset: float) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    h = x.to(wide)
    normalized = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * (offset + weight.to(wide))
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
) -> Tuple[Tensor, Tensor]:
    """Normalise every head of q and k, then rotate it by the angles of its token.

    Args:
        q: `(..., S, H, D)`, any float dtype.
        k: `(..., S, K, D)`, in the dtype of q.
        q_weight: `(D,)`, shared by the heads; any float dtype.
        k_weight: as q_weight.
        cos: `(S, R/2)`, or `(..., S, R/2)` with the leading dimensions of q. No gradient goes to it.
        sin: as cos.
        eps: added to the mean square.
        interleaved: as for `rotary_embedding`.
        offset: added to the weights.

    Returns:
        q and k so treated, in their dtype.
    """
    return (
        _one(q, q_weight, cos, sin, eps, interleaved, offset),
        _one(k, k_weight, cos, sin, eps, interleaved, offset),
    )
