"""Rotary position embedding, defined.

    y1 = x1 * cos - x2 * sin,  y2 = x2 * cos + x1 * sin        for every pair (x1, x2) of a head

Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, https://arxiv.org/abs/2104.09864.

The first R of a head's D columns are rotated, the others are unchanged (R < D: partial rotary). The pairs are:

- halves: column i with column i + R/2, `rotate_half` of Llama, Qwen, GPT-NeoX;
- interleaved: column 2i with column 2i + 1, GPT-J and the paper.

Computed in float32 (float64 for float64) and rounded once. cos and sin are positions: no gradient goes to them. Plain
PyTorch, no decorators: TorchScript and TorchInductor compile these very functions.
"""

from typing import Optional, Tuple

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool) -> Tensor:
    """Rotate every head of `x` by the angles of its token.

    Args:
        x: `(..., S, H, D)`, any float dtype: tokens before heads, as projections give them.
        cos: `(S, R/2)`, or `(..., S, R/2)` with the leading dimensions of x; any float dtype; one number a pair.
        sin: as cos.
        interleaved: whether neighbours are pairs, see above.
        inverse: whether to rotate by the opposite angles.

    Returns:
        `(..., S, H, D)` in the dtype of x.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    c = cos.detach().to(wide).unsqueeze(-2)
    s = sin.detach().to(wide).unsqueeze(-2)
    if inverse:
        s = -s
    rotated = 2 * cos.shape[-1]
    h = x.to(wide)
    if interleaved:
        first, second = h[..., 0:rotated:2], h[..., 1:rotated:2]
        y = torch.stack((first * c - second * s, second * c + first * s), -1).flatten(-2)
    else:
        first, second = h[..., : rotated // 2], h[..., rotated // 2 : rotated]
        y = torch.cat((first * c - second * s, second * c + first * s), -1)
    return torch.cat((y, h[..., rotated:]), -1).to(x.dtype)


def rotary_embedding(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Optional[Tensor],
    interleaved: bool,
    inverse: bool,
) -> Tuple[Tensor, Tensor]:
    """Rotate every head of queries and of keys by the angles of its token.

    Args:
        q: `(..., S, H, D)`.
        k: `(..., S, K, D)`.
        cos: as for `rotate`; with `position_ids` `(P, R/2)`, of all positions there are.
        sin: as cos.
        position_ids: `(S,)` or `(..., S)`, the position of each token, or None for tables by token.

    Returns:
        q and k so rotated.
    """
    if position_ids is not None:
        cos, sin = cos[position_ids], sin[position_ids]
    return rotate(q, cos, sin, interleaved, inverse), rotate(k, cos, sin, interleaved, inverse)
