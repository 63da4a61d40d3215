"""Rotary position embedding, defined.

    y1 = x1 * cos - x2 * sin,  y2 = x2 * cos + x1 * sin        for every pair (x1, x2) of a head

Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, https://arxiv.org/abs/2104.09864.

Of a head's D columns the first R are rotated and the rest pass (R < D: partial rotary). Which of them are pairs:

- halves: column i with column i + R/2, `rotate_half` of Llama, Qwen, GPT-NeoX;
- interleaved: column 2i with column 2i + 1, GPT-J and the paper.

Computed in float32 (float64 for float64) and rounded once. cos and sin are positions: no gradient goes to them. Plain
PyTorch, no decorators: TorchScript and TorchInductor compile this very function.
"""

import torch
from torch import Tensor


def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotate every head of `x` by the angles of its token.

    Args:
        x: `(..., S, H, D)`, any float dtype: tokens before heads, as projections give them and flash-attn takes them. A
            tensor `(B, H, S, D)` is handed in as `x.transpose(1, 2)`.
        cos: `(S, R/2)`, or `(..., S, R/2)` with the leading dimensions of x; any float dtype; one number a pair (of
            tables that hold every number twice, as those of transformers do, `cos[..., : R // 2]`).
        sin: as cos.
        interleaved: whether neighbours are pairs, see above.

    Returns:
        `(..., S, H, D)` in the dtype of x.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    c = cos.detach().to(wide).unsqueeze(-2)
    s = sin.detach().to(wide).unsqueeze(-2)
    rotated = 2 * cos.shape[-1]
    h = x.to(wide)
    if interleaved:
        first, second = h[..., 0:rotated:2], h[..., 1:rotated:2]
        y = torch.stack((first * c - second * s, second * c + first * s), -1).flatten(-2)
    else:
        first, second = h[..., : rotated // 2], h[..., rotated // 2 : rotated]
        y = torch.cat((first * c - second * s, second * c + first * s), -1)
    return torch.cat((y, h[..., rotated:]), -1).to(x.dtype)
