"""Scaled dot product attention, defined.

    s[i, j] = scale * sum over d of q[i, d] k[j, d]
    s[i, j] = softcap * tanh(s[i, j] / softcap)                              with a soft cap
    s[i, j] = s[i, j] - slope * |i + Sk - Sq - j| + bias[i, j]               with ALiBi, with a bias
    s[i, j] = -inf                                                           where query i does not see key j
    lse[i]  = log(exp(sink) + sum over j of exp(s[i, j]))                    no exp(sink) without a sink
    o[i]    = sum over j of exp(s[i, j] - lse[i]) v[j]

Vaswani et al., "Attention Is All You Need", 2017, https://arxiv.org/abs/1706.03762, section 3.2.1. Query head h reads
head h // (H / Hkv) of k and v (Ainslie et al., "GQA", 2023, https://arxiv.org/abs/2305.13245). ALiBi: Press et al.,
2021, https://arxiv.org/abs/2108.12409. Soft cap: Gemma 2, 2024, https://arxiv.org/abs/2408.00118. Sinks: one learned
logit for each head that takes part in the softmax and has no value, as in gpt-oss, 2025,
https://arxiv.org/abs/2508.10925. Query i is at key position i + Sk - Sq, as in FlashAttention-2: with causal the last
query sees the last key. A query that sees no key has output zero, and lse -inf (that of the sink alone,
if there is one).

Run in float64 this file is the oracle. In a lower precision everything is computed in float32 and rounded once. Plain
PyTorch, no decorators: TorchScript and TorchInductor compile these very functions.
"""

from typing import Optional, Tuple

import torch
from torch import Tensor

from kernel_pytorch.flash_attn_triton._core.philox import keep
from kernel_pytorch.flash_attn_triton.masks import cached, gathered, limits, packed, positions, visible


def attention_scores(
    q: Tensor, k: Tensor, bias: Optional[Tensor], causal: bool, scale: float, window: Optional[Tuple[int, int]],
    softcap: Optional[float], alibi_slopes: Optional[Tensor],
) -> Tensor:  # fmt: skip
    """The scores `(B, H, Sq, Sk)` in float32, or float64 of float64: -inf where a query does not see a key."""
    wide = torch.promote_types(q.dtype, torch.float32)
    queries, keys = q.shape[2], k.shape[2]
    repeated = k.to(wide).repeat_interleave(q.shape[1] // k.shape[1], 1)
    s = torch.matmul(q.to(wide), repeated.transpose(-1, -2)).to(wide) * scale
    if softcap is not None:
        s = softcap * torch.tanh(s / softcap)
    if alibi_slopes is not None:
        s = s - alibi_slopes.detach().to(wide).unsqueeze(-1).unsqueeze(-1) * positions(queries, keys, q.device).abs()
    if bias is not None:
        if bias.dtype == torch.bool:
            s = s.masked_fill(~bias, float("-inf"))
        else:
            s = s + bias.to(wide)
    left, right = limits(causal, window)
    if left >= 0 or right >= 0:
        s = s.masked_fill(~visible(queries, keys, left, right, q.device), float("-inf"))
    return s


def attend(
    s: Tensor, v: Tensor, sinks: Optional[Tensor], dropout_p: float, seed: Optional[Tensor]
) -> Tuple[Tensor, Tensor]:
    """The output, `(B, H, Sq, D)` in the dtype of v, and lse, of scores `(B, H, Sq, Sk)`."""
    values = v.to(s.dtype).repeat_interleave(s.shape[1] // v.shape[1], 1)
    sink = s.new_full(s.shape[:-1], float("-inf")).unsqueeze(-1)
    if sinks is not None:
        sink = sinks.to(s.dtype).unsqueeze(-1).unsqueeze(-1).expand(sink.shape)
    # Any number may be subtracted: it changes no derivative.
    top = torch.cat((s.detach(), sink.detach()), -1).amax(-1, keepdim=True)
    top = top.masked_fill(top == float("-inf"), 0.0)
    e = torch.exp(s - top)
    total = e.sum(-1, keepdim=True) + torch.exp(sink - top)
    nothing = total == 0.0
    total = total.masked_fill(nothing, 1.0)
    p = e / total
    if dropout_p > 0.0 and seed is not None:
        p = torch.where(keep(s, seed, dropout_p), p * (1.0 / (1.0 - dropout_p)), torch.zeros_like(p))
    lse = (top + torch.log(total)).masked_fill(nothing, float("-inf")).squeeze(-1)
    return torch.matmul(p, values).to(v.dtype), lse


def flash_attention_with_lse(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: Optional[float], window: Optional[Tuple[int, int]],
    softcap: Optional[float], alibi_slopes: Optional[Tensor], sinks: Optional[Tensor], dropout_p: float,
    seed: Optional[Tensor], deterministic: bool,
) -> Tuple[Tensor, Tensor]:  # fmt: skip
    """Attend, and return the logarithm of the sum of exponentials of each row of scores too.

    Args:
        q: `(B, H, Sq, D)`, any float dtype.
        k: `(B, Hkv, Sk, D)`, Hkv divides H; dtype of q.
        v: `(B, Hkv, Sk, D)`; dtype of q.
        causal: whether a query sees no key behind its position.
        scale: of the scores; `D ** -0.5` for None.
        window: how many keys before and behind its position a query sees; -1 for all.
        softcap: bound of the scaled scores.
        alibi_slopes: `(H,)` or `(B, H)`.
        sinks: `(H,)`.
        dropout_p: probability with which a weight becomes zero; the others are divided by `1 - dropout_p`.
        seed: int64 of shape `()`; of the dropout mask.
        deterministic: it always is.

    Returns:
        `(B, H, Sq, D)` in the dtype of q; `(B, H, Sq)`, float32 (float64 of float64).
    """
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    s = attention_scores(q, k, None, causal, factor, window, softcap, alibi_slopes)
    return attend(s, v, sinks, dropout_p, seed)


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: Optional[float], window: Optional[Tuple[int, int]],
    softcap: Optional[float], alibi_slopes: Optional[Tensor], sinks: Optional[Tensor], dropout_p: float,
    seed: Optional[Tensor], deterministic: bool,
) -> Tensor:  # fmt: skip
    """`flash_attention_with_lse` without lse; same arguments."""
    return flash_attention_with_lse(
        q, k, v, causal, scale, window, softcap, alibi_slopes, sinks, dropout_p, seed, deterministic
    )[0]


def flash_attention_masked(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, causal: bool, scale: Optional[float],
    window: Optional[Tuple[int, int]], softcap: Optional[float], sinks: Optional[Tensor], dropout_p: float,
    seed: Optional[Tensor], deterministic: bool,
) -> Tensor:  # fmt: skip
    """`flash_attention` with a mask or a bias.

    Args:
        mask: broadcasts to `(B, H, Sq, Sk)`; bool, False where a query does not see a key, or a float dtype, added.
        deterministic: it always is.
    """
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    s = attention_scores(q, k, mask, causal, factor, window, softcap, None)
    return attend(s, v, sinks, dropout_p, seed)[0]


def flash_attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    causal: bool, scale: Optional[float], window: Optional[Tuple[int, int]], softcap: Optional[float],
    alibi_slopes: Optional[Tensor], sinks: Optional[Tensor], deterministic: bool,
) -> Tensor:  # fmt: skip
    """`flash_attention` of packed sequences: tokens see only tokens of the same sequence.

    Args:
        q: `(S, H, D)`, the queries of all sequences.
        k: `(T, Hkv, D)`.
        v: `(T, Hkv, D)`.
        cu_seqlens_q: `(B + 1,)`, where the queries of each sequence begin, and S.
        cu_seqlens_k: `(B + 1,)`, where the keys of each sequence begin, and T.
        max_seqlen_q: queries of the longest sequence.
        max_seqlen_k: keys of the longest sequence.
        alibi_slopes: `(H,)` or `(B, H)`.
        deterministic: it always is.

    Returns:
        `(S, H, D)` in the dtype of q.
    """
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    behind, sees, of_query = packed(cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0], causal, window)
    values = v.transpose(0, 1).unsqueeze(0)
    s = attention_scores(
        q.transpose(0, 1).unsqueeze(0), k.transpose(0, 1).unsqueeze(0), None, False, factor, None, softcap, None
    )
    if alibi_slopes is not None:
        slopes = alibi_slopes.detach().to(s.dtype)
        of_head = slopes.unsqueeze(-1) if slopes.dim() == 1 else slopes[of_query].transpose(0, 1)
        s = s - of_head.unsqueeze(-1) * behind.abs()
    s = s.masked_fill(~sees, float("-inf"))
    return attend(s, values, sinks, 0.0, None)[0].squeeze(0).transpose(0, 1)


def flash_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, block_table: Optional[Tensor], causal: bool,
    scale: Optional[float], window: Optional[Tuple[int, int]], softcap: Optional[float], alibi_slopes: Optional[Tensor],
    sinks: Optional[Tensor],
) -> Tensor:  # fmt: skip
    """`flash_attention` of the last tokens of sequences to all their keys, which lie in a cache.

    q: `(B, H, Sq, D)`; query i of sequence b is at key position `cache_seqlens[b] - Sq + i`. Caches:
    `(B, Hkv, S, D)`, or pages `(num_blocks, Hkv, page_size, D)` that block_table `(B, max_blocks)` names in order.
    cache_seqlens: `(B,)`, how many keys are valid. Both are clamped to what there is. alibi_slopes: `(H,)` or `(B, H)`.
    """
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    keys, values = k_cache, v_cache
    if block_table is not None:
        keys, values = gathered(k_cache, block_table), gathered(v_cache, block_table)
    behind, sees, valid = cached(cache_seqlens, q.shape[2], keys.shape[2], causal, window)
    s = attention_scores(q, keys, None, False, factor, None, softcap, None)
    if alibi_slopes is not None:
        s = s - alibi_slopes.detach().to(s.dtype).unsqueeze(-1).unsqueeze(-1) * behind.abs()
    s = s.masked_fill(~sees, float("-inf"))
    # Memory behind the last valid key may hold NaN, and zero times NaN is NaN.
    return attend(s, values.masked_fill(~valid, 0.0), sinks, 0.0, None)[0]
