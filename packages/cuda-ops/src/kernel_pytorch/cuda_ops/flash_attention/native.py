"""What PyTorch itself offers: `torch.nn.functional.scaled_dot_product_attention`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def flash_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    """`flash_attention` of `reference.py`; same arguments and result dtype."""
    queries, keys = q.shape[2], k.shape[2]
    if k.shape[2] == 0:
        return torch.zeros_like(q)
    grouped = q.shape[1] != k.shape[1]
    if not causal or queries == keys:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)
    # PyTorch's own causal mask lets the first query see the first key, not the last the last.
    sees = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=sees, scale=scale, enable_gqa=grouped)
    return y if queries <= keys else torch.where(sees.any(-1, keepdim=True), y, 0.0)
