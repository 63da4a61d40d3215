"""The operator of level "triton" for decoding: attention of few new tokens to a long cache. It has no gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._core.operator import Rules
from .._core.sharding import Shardings


def fake(a: Any) -> Tensor:
    """What it allocates."""
    return a.q.new_empty(a.q.shape)


def flops(q: Any, k_cache: Any, v_cache: Any, cache_seqlens: Any, block_table: Any, *others: Any, **names: Any) -> int:
    """Two products of `(Sq, D)` with the whole cache: how much of it is valid is known on the device only."""
    keys = k_cache[2] if block_table is None else block_table[1] * k_cache[2]
    return int(4 * torch.Size(q).numel() * keys)


def sharding(placements: Any, a: Any) -> Shardings:
    """Sequences and heads are independent. Pages belong to no sequence: with a block table only heads split them."""
    whole = placements.Replicate()
    optional = (a.block_table, a.alibi_slopes, a.sinks)
    yield [whole], [whole] * 4 + [None if tensor is None else whole for tensor in optional]
    for dimension in (0, 1):
        own = placements.Shard(dimension)
        cache = whole if dimension == 0 and a.block_table is not None else own
        of_sequence = placements.Shard(0) if dimension == 0 else whole
        of_head = placements.Shard(0) if dimension == 1 else whole
        of_slopes = None
        if a.alibi_slopes is not None:  # (H,) or (B, H)
            place = dimension - 2 + a.alibi_slopes.ndim
            of_slopes = placements.Shard(place) if place >= 0 else whole
        table = None if a.block_table is None else of_sequence
        yield [own], [own, cache, cache, of_sequence, table, of_slopes, None if a.sinks is None else of_head]


FLASH_DECODE_RULES: Rules = {
    "schema": "flash_decode(Tensor q, Tensor k_cache, Tensor v_cache, Tensor cache_seqlens, Tensor? block_table,"
    " Tensor? alibi_slopes, Tensor? sinks, float scale, SymInt left, SymInt right, float softcap) -> Tensor o",
    "fake": fake,
    "flops": flops,
    "sharding": sharding,
}
