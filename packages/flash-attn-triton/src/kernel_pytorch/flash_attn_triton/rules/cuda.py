"""The operator of level "cuda": forward in one C++ kernel, gradient of scores that PyTorch computes again.

Dao et al., "FlashAttention", 2022, https://arxiv.org/abs/2205.14135; "FlashAttention-2", 2023,
https://arxiv.org/abs/2307.08691.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._core.operator import Rules
from .._core.sharding import Shardings

LOWEST = -1e30
"""A masked score: as good as -inf, and a row that contains nothing else still has a softmax."""

RUN = 64
"""Products that are added up at a time, as in the CPU backend: rounding does not grow with the head size."""


def fake(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """What it allocates."""
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))


def gradient(do: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v in PyTorch that autograd can follow.

    As in FlashAttention-2, section 3.1, but for one block, and the softmax is recomputed: `exp(scores - lse)` of large
    scores would depend on how either was rounded. Query heads that read the same keys are rows of one matrix.

    Args:
        do: gradient of the output.
        q: `(B, H, S, D)`.
        k: `(B, K, T, D)`.
        v: `(B, K, T, D)`.
        scale: of the scores.
        causal: whether query i sees keys up to i + T - S alone.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    batch, heads, queries, depth = q.shape
    together = batch, k.shape[1], heads // k.shape[1] * queries, depth
    rows, drows = q.to(wide).reshape(together), do.to(wide).reshape(together)
    keys, values = k.to(wide), v.to(wide)
    scores = _products(rows, keys) * scale
    if causal:
        sees = torch.ones(queries, k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - queries)
        sees = sees.repeat(heads // k.shape[1], 1)
        p = torch.softmax(scores.masked_fill(~sees, LOWEST), -1) * sees
    else:
        p = torch.softmax(scores, -1)
    dp = torch.matmul(drows, values.transpose(-1, -2))
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
    dq = torch.matmul(ds, keys).reshape(q.shape)
    dk = torch.matmul(ds.transpose(-1, -2), rows)
    dv = torch.matmul(p.transpose(-1, -2), drows)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _products(rows: Tensor, keys: Tensor) -> Tensor:
    """The product of `(..., R, D)` and the transpose of `(..., T, D)`."""
    runs = zip(rows.split(RUN, -1), keys.split(RUN, -1), strict=True)
    first, *others = (torch.matmul(a, b.transpose(-1, -2)) for a, b in runs)
    return sum(others, first)


def flops(q: Any, k: Any, *arguments: Any, **keywords: Any) -> int:
    """Two products of `(S, D)` with `(D, T)`, causal or not, as PyTorch counts its own attention."""
    return 4 * torch.Size(q).numel() * k[2]


def sharding(placements: Any, a: Any) -> Shardings:
    """Sequences and heads are independent; each device needs whole groups of heads."""
    for place in (placements.Replicate(), placements.Shard(0), placements.Shard(1)):
        yield dict.fromkeys(("q", "k", "v", "o", "lse"), place)


FLASH_ATTENTION_RULES: Rules = {
    "schema": "flash_attention(Tensor q, Tensor k, Tensor v, float scale, bool causal) -> (Tensor o, Tensor lse)",
    "fake": fake,
    "gradient": gradient,
    "flops": flops,
    "sharding": sharding,
}
