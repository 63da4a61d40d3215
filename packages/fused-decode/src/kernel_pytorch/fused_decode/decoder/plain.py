"""What a step is made of, in PyTorch's own operators: the functions of `launch.py`, for all devices."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .families import ACTIVATIONS


def embed(tokens: Tensor, table: Tensor, *, scale: float | None = None) -> Tensor:
    """`table[tokens]`, times a scale that is rounded to the table's dtype first."""
    x = table[tokens]
    return x if scale is None else x * torch.full((), scale, dtype=x.dtype, device=x.device)


def add_norm(
    y: Tensor, norm_weight: Tensor, residual: Tensor | None = None, out: Tensor | None = None, *,
    norm_offset: float = 0.0, eps: float = 1e-6,
) -> Tensor:  # fmt: skip
    """`residual + norm(y)`."""
    normed = _rms(y, norm_weight, norm_offset, eps)
    if residual is not None:
        normed = normed + residual
    return normed if out is None else out.copy_(normed)


def project(
    x: Tensor, weight: Tensor, *, norm: str | None = None, norm_weight: Tensor | None = None, norm_offset: float = 0.0,
    eps: float = 1e-6, bias: Tensor | None = None, gated: str | None = None, residual: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """A norm, a product with bias, a gated unit, a residual and a soft cap; all but the product may be left out."""
    if norm is not None and norm_weight is not None:
        x = _rms(x, norm_weight, norm_offset, eps)
    y = F.linear(x, weight, bias)
    if gated is not None:
        gate, up = y.chunk(2, -1)
        y = ACTIVATIONS[gated](gate) * up
    if residual is not None:
        y = residual + y
    return y if softcap is None else torch.tanh(y / softcap) * softcap


def attend(
    qkv: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, cos: Tensor, sin: Tensor, *, num_heads: int,
    scale: float, window: int | None = None, softcap: float | None = None, q_norm: Tensor | None = None,
    k_norm: Tensor | None = None, norm_offset: float = 0.0, eps: float = 1e-6,
) -> Tensor:  # fmt: skip
    """Rotate, write the new key and value into their slots, and attend to what is in the caches."""
    rows, kv_heads, slots, head_dim = k_cache.shape
    q, k, v = qkv.view(rows, -1, head_dim).split([num_heads, kv_heads, kv_heads], 1)
    if q_norm is not None and k_norm is not None:
        q, k = _rms(q, q_norm, norm_offset, eps), _rms(k, k_norm, norm_offset, eps)
    active, at = lengths >= 0, lengths.clamp_min(0).long()
    c, s = cos[at][:, None], sin[at][:, None]
    q, k = _rotate(q, c, s), _rotate(k, c, s)
    row, slot = torch.arange(rows, device=qkv.device), at % slots
    for cache, new in ((k_cache, k), (v_cache, v)):
        cache[row, :, slot] = torch.where(active[:, None, None], new.to(cache.dtype), cache[row, :, slot])
    if qkv.is_cpu:  # where the host may look: behind the longest row nothing is in use
        slots = min(slots, int(at.max()) + 1)
    age = (at[:, None] - torch.arange(slots, device=qkv.device)) % k_cache.shape[2]  # of what is in a slot
    seen = age <= at[:, None] if window is None else age <= at[:, None].clamp_max(window - 1)
    keys, values = k_cache[:, :, :slots].float(), v_cache[:, :, :slots].float()
    scores = q.float().view(rows, kv_heads, -1, head_dim) @ keys.transpose(2, 3) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
    o = (scores.softmax(-1) @ values).to(qkv.dtype).reshape(rows, -1)
    return o.masked_fill(~active[:, None], 0.0)


def _rms(x: Tensor, weight: Tensor, offset: float, eps: float) -> Tensor:
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps)
    return (y * (offset + weight.float())).to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    first, second, rest = x.float().split([half, half, x.shape[-1] - 2 * half], -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1).to(x.dtype)
