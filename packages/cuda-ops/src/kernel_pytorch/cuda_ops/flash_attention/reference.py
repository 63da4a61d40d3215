"""Scaled dot product attention, defined.

    s[i, j] = scale * sum over d of q[i, d] k[j, d]        -inf where query i does not see key j
    o[i] = sum over j of softmax(s[i])[j] v[j]

Vaswani et al., "Attention Is All You Need", 2017, https://arxiv.org/abs/1706.03762, section 3.2.1. Query head h reads
head h // (H // K) of k and v (Ainslie et al., "GQA", 2023, https://arxiv.org/abs/2305.13245). Where it is causal, the
last query sees the last key, as in FlashAttention-2: query i sees keys up to i + T - S. A query that sees no key has
output zero.

Run in float64 this file is the oracle. In a lower precision everything is computed in float32 and rounded once. Plain
PyTorch, no decorators: TorchInductor compiles this very function.
"""

import torch
from torch import Tensor


def flash_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    """Attend.

    Args:
        q: `(B, H, S, D)`, any float dtype.
        k: `(B, K, T, D)`, K divides H; dtype of q.
        v: `(B, K, T, D)`; dtype of q.
        scale: of the scores.
        causal: whether queries see no later keys.

    Returns:
        `(B, H, S, D)` in the dtype of q.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    groups = q.shape[1] // k.shape[1]
    keys = k.to(wide).repeat_interleave(groups, 1)
    values = v.to(wide).repeat_interleave(groups, 1)
    scores = torch.matmul(q.to(wide), keys.transpose(-1, -2)) * scale
    if causal:
        queries, count = q.shape[2], k.shape[2]
        sees = torch.ones(queries, count, dtype=torch.bool, device=q.device).tril(count - queries)
        # Not -inf: a row of them has no softmax, and its gradient would be NaN.
        scores = scores.masked_fill(~sees, -1e30)
        return torch.matmul(torch.softmax(scores, -1) * sees, values).to(q.dtype)
    return torch.matmul(torch.softmax(scores, -1), values).to(q.dtype)
