"""Queries, keys and values as one product, alone and in front of QK-norm and rotary embedding, defined.

    (q | k | v) = x W^T + b          W holds the rows of queries, then of keys, then of values

Vaswani et al., "Attention Is All You Need", 2017, https://arxiv.org/abs/1706.03762, with grouped queries as in Ainslie
et al., 2023, https://arxiv.org/abs/2305.13245. In `qkv_norm_rope`, q and k then go through `qk_norm_rope`.
"""

from typing import Optional, Tuple

from torch import Tensor
from torch.nn import functional as F

from kernel_pytorch.qkv_fusion.norm_rope.levels.reference import qk_norm_rope


def qkv_projection(
    x: Tensor, weight: Tensor, bias: Optional[Tensor], num_heads: int, num_kv_heads: int, head_dim: int
) -> Tuple[Tensor, Tensor, Tensor]:
    """Project `x` to queries, keys and values.

    Args:
        x: `(..., S, C)`.
        weight: `((H + 2K) * D, C)`.
        bias: `((H + 2K) * D,)` or None.
        num_heads: H.
        num_kv_heads: K.
        head_dim: D.

    Returns:
        Views of one product: `(..., S, H, D)`, and twice `(..., S, K, D)`.
    """
    packed = F.linear(x, weight, bias)
    q, k, v = packed.split([num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim], -1)
    return (
        q.unflatten(-1, [num_heads, head_dim]),
        k.unflatten(-1, [num_kv_heads, head_dim]),
        v.unflatten(-1, [num_kv_heads, head_dim]),
    )


def qkv_norm_rope(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Optional[Tensor],
    num_heads: int,
    num_kv_heads: int,
    eps: float,
    interleaved: bool,
    offset: float,
) -> Tuple[Tensor, Tensor, Tensor]:
    """Project `x`, then normalise and rotate the heads of queries and keys.

    Args:
        x: as for `qkv_projection`; D is the size of q_weight.
        q_weight: as for `qk_norm_rope`, like all that follow but the numbers of heads.
        k_weight: `(D,)`.
        cos: of the tokens.
        sin: of the tokens.
        position_ids: of the tokens.
        num_heads: H.
        num_kv_heads: K.
        eps: of the norm.
        interleaved: of the rotation.
        offset: of the norm.

    Returns:
        q and k so treated, and v, a view of the product.
    """
    q, k, v = qkv_projection(x, weight, bias, num_heads, num_kv_heads, q_weight.shape[0])
    q, k = qk_norm_rope(q, k, q_weight, k_weight, cos, sin, position_ids, eps, interleaved, offset)
    return q, k, v
