"""FlexAttention, and padding, for `kernel-pytorch bench --peers`: the same arguments, the same truth, the same rounds.

It is compiled, as PyTorch documents it, and its block masks are made once for a geometry, as a model would keep them.
Sinks scale its output by what they add to lse, as Hugging Face's gpt-oss does.

Dong et al., "Flex Attention", 2024, https://arxiv.org/abs/2412.05496.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernel_pytorch.harness.peers import Peer
from kernel_pytorch.harness.technique import Level

TECHNIQUE = "flash-attn-triton"

Window = tuple[int, int] | None


@functools.cache
def compiled() -> Callable[..., Any]:
    """FlexAttention's kernel."""
    from torch.nn.attention.flex_attention import flex_attention

    # Each case is compiled for its sizes: with a batch of any size PyTorch takes no kernel for decoding.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return torch.compile(flex_attention, fullgraph=True, dynamic=False)


@functools.lru_cache(64)
def block_mask(queries: int, keys: int, left: int, right: int, device: torch.device) -> Any:
    """Which tiles of scores exist; None where all do."""
    from torch.nn.attention.flex_attention import create_block_mask

    if left < 0 and right < 0:
        return None

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        behind = j - i - (keys - queries)
        before_it = (behind >= -left) | (left < 0)
        return before_it & ((behind <= right) | (right < 0))

    return create_block_mask(sees, None, None, queries, keys, device)


def flex_attention_with_lse(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, window: Window, softcap: float | None,
    alibi_slopes: Tensor | None, sinks: Tensor | None, dropout_p: float, *unused: Any, bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output and lse."""
    from torch.nn.attention.flex_attention import AuxRequest

    if dropout_p > 0.0:
        raise NotImplementedError("FlexAttention has no dropout")
    left, right = window or (-1, -1)
    queries, keys = q.shape[2], k.shape[2]
    slopes = None if alibi_slopes is None else alibi_slopes.expand(q.shape[:2])
    every_bias = None if bias is None else bias.expand(q.shape[0], q.shape[1], queries, keys)

    def change(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if softcap is not None:
            s = softcap * torch.tanh(s / softcap)
        if slopes is not None:
            s = s - slopes[b, h] * (j - i - (keys - queries)).abs()
        if every_bias is None:
            return s
        found = every_bias[b, h, i, j]
        return torch.where(found, s, -float("inf")) if found.dtype == torch.bool else s + found

    changed = softcap is not None or slopes is not None or bias is not None
    mask = block_mask(queries, keys, left, 0 if causal else right, q.device)
    grouped = q.shape[1] != k.shape[1]
    o, aux = compiled()(
        q, k, v, change if changed else None, mask, scale, grouped, return_aux=AuxRequest(lse=True)
    )  # fmt: skip
    if sinks is None:
        return o, aux.lse
    lse = torch.logaddexp(aux.lse, sinks.to(aux.lse.dtype)[:, None])
    return (o * torch.exp(aux.lse - lse).unsqueeze(-1)).to(o.dtype), lse


def flex_attention(*arguments: Any) -> Tensor:
    """The output."""
    return flex_attention_with_lse(*arguments)[0]


def flex_attention_masked(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, causal: bool, scale: float | None, window: Window,
    softcap: float | None, sinks: Tensor | None, dropout_p: float, *unused: Any,
) -> Tensor:  # fmt: skip
    """The output with a mask or a bias, which every tile reads: FlexAttention skips tiles by formulas alone."""
    return flex_attention_with_lse(
        q, k, v, causal, scale, window, softcap, None, sinks, dropout_p, bias=mask
    )[0]  # fmt: skip


@functools.lru_cache(64)
def every_block(batch: int, queries: int, keys: int, device: torch.device) -> Any:
    """All tiles of a cache: FlexAttention masks each."""
    from torch.nn.attention.flex_attention import BlockMask

    count = -(-keys // 128)
    number = torch.full((batch, 1, 1), count, dtype=torch.int32, device=device)
    indices = torch.arange(count, dtype=torch.int32, device=device).repeat(batch, 1, 1, 1)
    return BlockMask.from_kv_blocks(number, indices, BLOCK_SIZE=128, seq_lengths=(queries, keys))


def flex_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, block_table: Tensor | None, causal: bool,
    scale: float | None, window: Window, *features: Tensor | float | None,
) -> Tensor:  # fmt: skip
    """The output of new tokens against a cache, which is read to its end: lengths are known on the GPU alone."""
    if block_table is not None or any(f is not None for f in features):
        raise NotImplementedError("pages, soft cap, ALiBi and sinks in a cache are not written in FlexAttention here")
    queries, keys = q.shape[2], k_cache.shape[2]
    left, right = window or (-1, -1)
    right = 0 if causal else right

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        length = cache_seqlens[b].clamp(0, keys)
        behind = j - i - (length - queries)
        return (j < length) & ((behind >= -left) | (left < 0)) & ((behind <= right) | (right < 0))

    mask = copy.copy(every_block(q.shape[0], queries, keys, q.device))
    mask.mask_mod = sees
    return compiled()(q, k_cache, v_cache, None, mask, scale, q.shape[1] != k_cache.shape[1])


def padded_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    causal: bool, scale: float | None, window: Window, *features: Any,
) -> Tensor:  # fmt: skip
    """Packed sequences padded to the longest one, by PyTorch's attention; without a mask where it is causal."""
    if window is not None or any(features):
        raise NotImplementedError("window, soft cap, ALiBi and sinks of padded sequences are not written here")
    if causal and cu_seqlens_q is not cu_seqlens_k and not torch.equal(cu_seqlens_q, cu_seqlens_k):
        raise NotImplementedError("causal with other lengths of keys than of queries is not written here")
    at_q, _ = _places(cu_seqlens_q, max_seqlen_q, q.shape[0])
    at_k, exists = _places(cu_seqlens_k, max_seqlen_k, k.shape[0])
    padded = (x[at].transpose(1, 2) for x, at in ((q, at_q), (k, at_k), (v, at_k)))
    mask = None if causal else exists[:, None, None, :]
    o = torch.nn.functional.scaled_dot_product_attention(
        *padded, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    token = torch.arange(q.shape[0], device=q.device)
    sequence = (token[:, None] >= cu_seqlens_q[1:]).sum(1)
    return o[sequence, :, token - cu_seqlens_q[sequence]]


def _places(cu_seqlens: Tensor, longest: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Which token is at each place of padded sequences, `(B, longest)`, and whether there is one."""
    place = torch.arange(longest, device=cu_seqlens.device) + cu_seqlens[:-1, None]
    return place.clamp(max=tokens - 1), place < cu_seqlens[1:, None]


def _peer(function: str, name: str = "flex") -> list[Peer]:
    return [
        Peer(f"peer:{name}", Level.PEER, f"{__name__}:{function}", requires="torch", install="torch", capability=(8, 0))
    ]


PEERS = {
    "flash_attention": _peer("flex_attention"),
    "flash_attention_with_lse": _peer("flex_attention_with_lse"),
    "flash_attention_masked": _peer("flex_attention_masked"),
    "flash_attention_varlen": _peer("padded_varlen", "padded"),
    "flash_decode": _peer("flex_decode"),
}
