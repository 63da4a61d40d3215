"""What PyTorch itself offers: `torch.nn.functional.scaled_dot_product_attention`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def _aligned(x: Tensor) -> Tensor:
    """x, or a copy where rows do not begin at 16 bytes: cuDNN's attention fails there, and takes the GPU with it."""
    if x.device.type != "cuda" or all(step * x.element_size() % 16 == 0 for step in (*x.stride()[:-1], x.storage_offset())):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    """`flash_attention` of `reference.py`; same arguments and result dtype."""
    q, k, v = _aligned(q), _aligned(k), _aligned(v)
    queries, keys = q.shape[2], k.shape[2]
    if keys == 0:
        return torch.zeros_like(q)
    grouped = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}  # the comparison of symbolic sizes is no bool
    if not causal or queries == keys:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, **grouped)
        return y.to(q.dtype)  # which autocast changes
    # PyTorch's own causal mask lets the first query see the first key, not the last the last.
    sees = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=sees, scale=scale, **grouped)
    return (y if queries <= keys else torch.where(sees.any(-1, keepdim=True), y, 0.0)).to(q.dtype)
