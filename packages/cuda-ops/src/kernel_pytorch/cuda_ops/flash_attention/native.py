"""What PyTorch itself offers: `torch.nn.functional.scaled_dot_product_attention`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


class _PlainGradient(torch.autograd.Function):
    """The identity, whose incoming gradient becomes contiguous."""

    @staticmethod
    def forward(y: Tensor) -> Tensor:
        """Hand y on."""
        return y.view_as(y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep nothing."""

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        """Make dy contiguous, by a copy only where it is not."""
        return dy.contiguous()


def _aligned(x: Tensor) -> Tensor:
    """x, or a copy where rows do not begin at 16 bytes."""
    return x if all(step * x.element_size() % 16 == 0 for step in x.stride()[:-1]) else x.contiguous()


def flash_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    """`flash_attention` of `reference.py`; same arguments and result dtype."""
    if q.device.type == "cuda":  # where cuDNN's attention fails on other layouts, and takes the process with it
        return _PlainGradient.apply(_attention(_aligned(q), _aligned(k), _aligned(v), scale, causal))
    return _attention(q, k, v, scale, causal)


def _attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
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
