"""What a step is made of, in PyTorch's own operators: the functions of `launch.py`, for all devices."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from kernel_pytorch.fused_decode.levels import reference


def embed(tokens: Tensor, table: Tensor, *, scale: float | None = None) -> Tensor:
    """`table[tokens]`, times a scale that is rounded to the table's dtype first."""
    x = table[tokens]
    return x if scale is None else x * torch.full((), scale, dtype=x.dtype, device=x.device)


def add_norm(
    y: Tensor, norm_weight: Tensor, residual: Tensor | None = None, out: Tensor | None = None, *,
    norm_offset: float = 0.0, eps: float = 1e-6,
) -> Tensor:  # fmt: skip
    """`residual + norm(y)`."""
    normed = rms(y, norm_weight, norm_offset, eps)
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
        x = rms(x, norm_weight, norm_offset, eps)
    y = F.linear(x, weight, bias)
    if gated is not None:
        gate, up = y.chunk(2, -1)
        y = reference.activated(gate, gated) * up
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
    heads = qkv.view(rows, -1, head_dim)
    qk, v = heads[:, : num_heads + kv_heads], heads[:, num_heads + kv_heads :]
    if q_norm is not None and k_norm is not None:
        q, k = qk.split([num_heads, kv_heads], 1)
        qk = torch.cat([rms(q, q_norm, norm_offset, eps), rms(k, k_norm, norm_offset, eps)], 1)
    at = lengths.clamp_min(0).long()
    qk = reference.rotated(qk.float(), cos[at], sin[at]).to(qk.dtype)
    q, k = qk[:, :num_heads], qk[:, num_heads:]
    # Where the host may look, rows of one length, as a single row is, need no mask.
    here = {*lengths.tolist()} if qkv.is_cpu else set()
    position = max(here, default=slots)
    if len(here) == 1 and 0 <= position < slots:
        k_cache[:, :, position], v_cache[:, :, position] = k, v
        seen = slice(0 if window is None else max(position - window + 1, 0), position + 1)
        o = _attention(q, k_cache[:, :, seen], v_cache[:, :, seen], None, scale, softcap)
        return o.reshape(rows, -1)
    active, row, slot = lengths >= 0, torch.arange(rows, device=qkv.device), at % slots
    for cache, new in ((k_cache, k), (v_cache, v)):
        cache[row, :, slot] = torch.where(active[:, None, None], new, cache[row, :, slot])
    used = min(slots, position + 1)
    age = (at[:, None] - torch.arange(used, device=qkv.device)) % slots  # of what is in a slot
    seen = age <= (at if window is None else at.clamp_max(window - 1))[:, None]
    o = _attention(q, k_cache[:, :, :used], v_cache[:, :, :used], seen, scale, softcap)
    return o.masked_fill(~active[:, None, None], 0.0).reshape(rows, -1)


def _attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float, softcap: float | None) -> Tensor:
    """Attention of q `(rows, heads, head_dim)` to what is seen `(rows, slots)`: PyTorch's; the formula with a cap."""
    if softcap is not None:
        sees = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device) if seen is None else seen
        return reference.attend(q.float(), k, v, sees, scale, softcap, None).to(q.dtype)
    mask, grouped = None if seen is None else seen[:, None, None], q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q.unsqueeze(2), k, v, mask, scale=scale, enable_gqa=grouped).squeeze(2)


def rms(x: Tensor, weight: Tensor, offset: float, eps: float) -> Tensor:
    """The norm of the last dimension, in float32."""
    weight = weight.float() if offset == 0.0 else offset + weight.float()
    return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
