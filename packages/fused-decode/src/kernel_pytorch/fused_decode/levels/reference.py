"""One step of a decoder-only transformer, defined: the products around its norms, and attention to a cache.

    n = x / sqrt(mean(x^2) + eps) * (offset + w) + b                         norm "rms"
    n = (x - mean(x)) / sqrt(var(x) + eps) * (offset + w) + b                norm "layer"
    norm_linear = n W^T + bias
    norm_gated_linear = act(g) * u,   (g, u) = n W^T + bias
    linear_residual = x W^T + bias + residual

`rotary_cache_attention` is the attention of one new token of each sequence. It normalises each head of q and k, rotates
both, writes the new key and value into the cache, and attends to the keys from there:

    y[:r/2] = x[:r/2] * cos - x[r/2:r] * sin,   y[r/2:r] = x[r/2:r] * cos + x[:r/2] * sin,   y[r:] = x[r:]
    s[j] = scale * sum over d of q[d] k[j, d],   s[j] = softcap * tanh(s[j] / softcap)
    o = sum over j of exp(s[j]) v[j] / (exp(sink) + sum over j of exp(s[j]))

RMSNorm: Zhang and Sennrich, 2019, https://arxiv.org/abs/1910.07467. Gated products: Shazeer, 2020,
https://arxiv.org/abs/2002.05202. Rotation: Su et al., 2021, https://arxiv.org/abs/2104.09864, in halves, as Hugging
Face pairs the columns. Query head h reads head h // (H / HK): Ainslie et al., 2023, https://arxiv.org/abs/2305.13245.
Pages: Kwon et al., 2023, https://arxiv.org/abs/2309.06180.

Run in float64 this file is the oracle. In a lower precision everything is computed in float32 and rounded once, where
it is stored. Plain PyTorch, no decorators: TorchScript and TorchInductor compile these very functions.
"""

from typing import Optional, Tuple

import torch
from torch import Tensor


def normalized(
    x: Tensor, norm: str, norm_weight: Tensor, norm_bias: Optional[Tensor], norm_offset: float, eps: float
) -> Tensor:
    """The norm n of the last dimension, in float32, or float64 of float64."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide)
    if norm == "layer":
        y = y - y.mean(-1, keepdim=True)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * (norm_weight.to(wide) + norm_offset)
    return y if norm_bias is None else y + norm_bias.to(wide)


def product(x: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
    """`x @ weight.T + bias` in float32, or float64 of float64."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    y = torch.matmul(x.to(wide), weight.to(wide).t())
    return y if bias is None else y + bias.to(wide)


def activated(x: Tensor, activation: str) -> Tensor:
    """The activation named "silu", "gelu" or "gelu_tanh"."""
    if activation == "silu":
        return torch.nn.functional.silu(x)
    return torch.nn.functional.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def norm_linear(
    x: Tensor, weight: Tensor, norm_weight: Tensor, bias: Optional[Tensor], norm: str, norm_bias: Optional[Tensor],
    norm_offset: float, eps: float,
) -> Tensor:  # fmt: skip
    """A linear layer of a norm. x: `(..., K)`; weight: `(N, K)`; norm_weight and norm_bias: `(K,)`; bias: `(N,)`."""
    return product(normalized(x, norm, norm_weight, norm_bias, norm_offset, eps), weight, bias).to(weight.dtype)


def norm_gated_linear(
    x: Tensor, weight: Tensor, norm_weight: Tensor, bias: Optional[Tensor], activation: str, norm: str,
    norm_bias: Optional[Tensor], norm_offset: float, eps: float,
) -> Tensor:  # fmt: skip
    """A gated linear layer of a norm. weight: `(2 N, K)`, the rows of the gate first; bias: `(2 N,)`."""
    y = product(normalized(x, norm, norm_weight, norm_bias, norm_offset, eps), weight, bias)
    half = weight.shape[0] // 2
    return (activated(y[..., :half], activation) * y[..., half:]).to(weight.dtype)


def linear_residual(x: Tensor, weight: Tensor, residual: Tensor, bias: Optional[Tensor]) -> Tensor:
    """A linear layer and a residual sum. x: `(..., K)`; weight: `(N, K)`; residual: `(..., N)`; bias: `(N,)`."""
    y = product(x, weight, bias)
    return (y + residual.to(y.dtype)).to(weight.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads `(rows, heads, D)` rotated by angles `(rows, r / 2)`, in halves of the first r columns."""
    half = cos.shape[-1]
    c, s = cos.to(x.dtype).unsqueeze(1), sin.to(x.dtype).unsqueeze(1)
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * c - second * s, second * c + first * s, rest), -1)


def heads_of(
    qkv: Tensor, lengths: Tensor, cos: Tensor, sin: Tensor, num_heads: int, kv_heads: int, q_norm: Optional[Tensor],
    k_norm: Optional[Tensor], norm_offset: float, eps: float,
) -> Tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Normalised and rotated q `(rows, H, D)`, k and v `(rows, HK, D)`, in float32, or float64 of float64."""
    heads = qkv.to(torch.promote_types(qkv.dtype, torch.float32)).unflatten(-1, (num_heads + 2 * kv_heads, -1))
    q, k, v = heads[:, :num_heads], heads[:, num_heads : num_heads + kv_heads], heads[:, num_heads + kv_heads :]
    if q_norm is not None:
        q = normalized(q, "rms", q_norm, None, norm_offset, eps)
    if k_norm is not None:
        k = normalized(k, "rms", k_norm, None, norm_offset, eps)
    at = lengths.clamp(0, cos.shape[0] - 1).to(torch.int64)
    return rotated(q, cos[at], sin[at]), rotated(k, cos[at], sin[at]), v


def active_rows(lengths: Tensor, capacity: int, angles: int, window: Optional[int]) -> Tensor:
    """Rows whose new token has a position, `(rows,)`: only a window makes the cache a ring, which is never full."""
    most = angles if window is not None else min(angles, capacity)
    return (lengths >= 0) & (lengths < most)


def write(cache: Tensor, new: Tensor, slots: Tensor, active: Tensor, block_table: Optional[Tensor]) -> None:
    """Write `(rows, HK, D)` at slots `(rows,)` into the cache; a row that is not active repeats the write of one."""
    size = cache.shape[2]
    if new.shape[0] == 0:
        return
    page = torch.arange(new.shape[0], device=new.device)
    if block_table is not None:
        page = block_table.to(torch.int64).gather(1, (slots // size).unsqueeze(1)).squeeze(1)
    # Indexing with a mask would wait for a GPU. If no row is active, the slot gets what it has.
    row = torch.where(active, torch.arange(new.shape[0], device=new.device), active.to(torch.int64).argmax())
    page, place = page[row].clamp(0, cache.shape[0] - 1), (slots % size)[row]
    by_token = cache.transpose(1, 2)
    by_token[page, place] = torch.where(active.any(), new.to(cache.dtype)[row], by_token[page, place])


def gathered(cache: Tensor, block_table: Optional[Tensor]) -> Tensor:
    """The cache of each row, `(rows, HK, L, D)`: itself, or copied out of pages."""
    if block_table is None:
        return cache
    return cache[block_table.clamp(0, cache.shape[0] - 1).to(torch.int64)].transpose(1, 2).flatten(2, 3)


def visible(lengths: Tensor, active: Tensor, capacity: int, window: Optional[int]) -> Tensor:
    """Which slots the new token of each row sees, `(rows, L)`."""
    position = lengths.to(torch.int64).unsqueeze(1)
    # The last position with this slot, at most that of the new token; before 0 the slot is empty.
    of_slot = position - (position - torch.arange(capacity, device=lengths.device)) % capacity
    sees = (of_slot >= 0) & active.unsqueeze(1)
    return sees if window is None else sees & (of_slot > position - window)


def written(
    qkv: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, cos: Tensor, sin: Tensor, num_heads: int,
    window: Optional[int], q_norm: Optional[Tensor], k_norm: Optional[Tensor], norm_offset: float, eps: float,
    block_table: Optional[Tensor],
) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Write into the caches; then q `(rows, H, D)`, keys and values `(rows, HK, L, D)`, what is seen, active rows."""
    capacity = k_cache.shape[2] if block_table is None else k_cache.shape[2] * block_table.shape[1]
    active = active_rows(lengths, capacity, cos.shape[0], window)
    q, k, v = heads_of(qkv, lengths, cos, sin, num_heads, k_cache.shape[1], q_norm, k_norm, norm_offset, eps)
    slots = lengths.to(torch.int64) % capacity
    write(k_cache, k, slots, active, block_table)
    write(v_cache, v, slots, active, block_table)
    sees = visible(lengths, active, capacity, window)
    return q, gathered(k_cache, block_table), gathered(v_cache, block_table), sees, active


def attend(
    q: Tensor, keys: Tensor, values: Tensor, sees: Tensor, scale: float, softcap: Optional[float],
    sinks: Optional[Tensor],
) -> Tensor:  # fmt: skip
    """Attention of q `(rows, H, D)` to `(rows, HK, L, D)`, in the dtype of q; 0 where nothing is seen."""
    rows, heads, depth = q.shape[0], q.shape[1], q.shape[2]
    seen = sees.unsqueeze(1).unsqueeze(-1)  # memory behind the last key may hold NaN, and zero times NaN is NaN
    keys, values = keys.to(q.dtype).masked_fill(~seen, 0.0), values.to(q.dtype).masked_fill(~seen, 0.0)
    kv_heads = keys.shape[1]
    s = torch.matmul(q.reshape(rows, kv_heads, heads // kv_heads, depth), keys.transpose(-1, -2)).to(q.dtype) * scale
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    s = s.flatten(1, 2).masked_fill(~sees.unsqueeze(1), float("-inf"))
    sink = torch.full((rows, heads, 1), float("-inf"), dtype=q.dtype, device=q.device)
    if sinks is not None:
        sink = sinks.to(q.dtype).unsqueeze(-1).expand(rows, heads, 1)
    s = torch.cat((s, sink), -1)
    top = s.amax(-1, keepdim=True)
    p = torch.exp(s - top.masked_fill(top == float("-inf"), 0.0))
    total = p.sum(-1, keepdim=True)
    p = (p / total.masked_fill(total == 0.0, 1.0))[..., :-1].unflatten(1, (kv_heads, heads // kv_heads))
    return torch.matmul(p, values).to(q.dtype).reshape(rows, heads, depth)


def rotary_cache_attention(
    qkv: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, cos: Tensor, sin: Tensor, num_heads: int,
    scale: Optional[float], window: Optional[int], softcap: Optional[float], q_norm: Optional[Tensor],
    k_norm: Optional[Tensor], norm_offset: float, eps: float, sinks: Optional[Tensor], block_table: Optional[Tensor],
) -> Tensor:  # fmt: skip
    """Attention of the new token of each row to the cache, into which its key and value are written.

    qkv: `(rows, (H + 2 HK) * D)`. Caches: `(rows, HK, L, D)`, or pages `(n, HK, page, D)` that block_table
    `(rows, L / page)` names in order. lengths: `(rows,)`, the position of the new token, written at slot
    `position % L`. cos, sin: `(positions, r / 2)`. A row whose position is negative, or beyond the angles or (without a
    window) the slots, writes nothing, and its result is 0. Returns `(rows, H * D)`.
    """
    q, keys, values, sees, active = written(
        qkv, k_cache, v_cache, lengths, cos, sin, num_heads, window, q_norm, k_norm, norm_offset, eps, block_table
    )
    o = attend(q, keys, values, sees, q.shape[-1] ** -0.5 if scale is None else scale, softcap, sinks)
    return o.masked_fill(~active.unsqueeze(-1).unsqueeze(-1), 0.0).flatten(1).to(qkv.dtype)
