"""The operator of level "triton" for decoding: attention of few new tokens to a long cache. It has no gradient."""

from __future__ import annotations

from typing import Any

import torch

from .._core.operator import Rules, like_first
from .._core.sharding import Shardings


def flops(q: Any, k_cache: Any, v_cache: Any, cache_seqlens: Any, block_table: Any, *others: Any, **names: Any) -> int:
    """Two products of `(Sq, D)` with the whole cache: how much of it is valid is known on the device only."""
    keys = k_cache[2] if block_table is None else block_table[1] * k_cache[2]
    return int(4 * torch.Size(q).numel() * keys)


def sharding(placements: Any, a: Any) -> Shardings:
    """Sequences and heads are independent. Pages belong to no sequence: with a block table only heads split them."""
    yield {}
    first = placements.Shard(0)
    slopes = a.alibi_slopes  # (H,) or (B, H)
    found = {"q": first, "o": first, "cache_seqlens": first, "block_table": first}
    if a.block_table is None:
        found |= {"k_cache": first, "v_cache": first}
    yield found | ({"alibi_slopes": first} if slopes is not None and slopes.ndim == 2 else {})
    of_heads = dict.fromkeys(("q", "k_cache", "v_cache", "o"), placements.Shard(1)) | {"sinks": first}
    yield of_heads | ({} if slopes is None else {"alibi_slopes": placements.Shard(slopes.ndim - 1)})


FLASH_DECODE_RULES: Rules = {
    "schema": "flash_decode(Tensor q, Tensor k_cache, Tensor v_cache, Tensor cache_seqlens, Tensor? block_table,"
    " Tensor? alibi_slopes, Tensor? sinks, float scale, SymInt left, SymInt right, float softcap) -> Tensor o",
    "fake": like_first,
    "flops": flops,
    "sharding": sharding,
}
