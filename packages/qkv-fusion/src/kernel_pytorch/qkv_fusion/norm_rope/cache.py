"""Projection, QK-norm and rotation of new tokens whose keys and values are written into a KV cache."""

from __future__ import annotations

import torch
from torch import Tensor

from kernel_pytorch.qkv_fusion._core.call_kinds import needs_grad
from kernel_pytorch.qkv_fusion.arguments import check_cache, check_position_values
from kernel_pytorch.qkv_fusion.levels import LADDER
from kernel_pytorch.qkv_fusion.overlap import check_no_overlap
from kernel_pytorch.qkv_fusion.projection.project import project

from .functional import check_projected, head_size
from .operators import norm_rope_cache_


def qkv_norm_rope_cache_(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor | None = None,
    *,
    num_heads: int,
    eps: float = 1e-6,
    interleaved: bool = False,
    offset: float = 0.0,
    position_ids: Tensor | None = None,
    level: str | None = None,
) -> Tensor:
    """Project new tokens as `qkv_norm_rope` does and write keys and values into a KV cache, for inference.

    Token i of sequence b is written at position `cache_seqlens[b] + i`. `flash_decode` of flash-attn-triton then reads
    `q.transpose(1, 2)`, the caches and lengths `cache_seqlens + S`. At level "triton" one kernel normalises, rotates
    and writes; the other levels compute keys first and copy them.

    Args:
        x: `(B, S, C)`; D is the size of q_weight.
        weight: as in `qkv_projection`; K is the number of heads of k_cache.
        q_weight: `(D,)`, as in `qk_norm_rope`.
        k_weight: `(D,)`, as in `qk_norm_rope`.
        cos: as in `rotary_embedding`, for the tokens of x.
        sin: as cos.
        k_cache: `(B, K, N, D)` with room for N tokens, or with block_table pages `(num_blocks, K, page_size, D)`; dtype
            (under autocast that of the product) and device of x. At level "triton" the last stride must be 1.
        v_cache: shape, dtype and device of k_cache; its own strides. The caches must not share memory with each other.
        cache_seqlens: `(B,)`, int32: how many tokens of each sequence are in the cache, the new ones not included.
        block_table: `(B, max_blocks)`, int32: the pages of each sequence, in order. No page that is written may be
            named twice. None for a cache without pages.
        num_heads: H.
        position_ids: as in `qk_norm_rope`; for the tables alone, not for the place in the cache.

    Returns:
        q `(B, S, H, D)`, normalised and rotated.

    Raises:
        TypeError: as `qkv_norm_rope`; also for a cache, cache_seqlens or block_table of another dtype.
        ValueError: as `qkv_norm_rope`; also for caches and block_table whose shapes do not fit, and for a cache that
            overlaps itself, as an expanded tensor does (as in `rotary_embedding_`).
        RuntimeError: as `qkv_norm_rope`; also if an argument needs a gradient: call it under torch.no_grad().

    The host never reads cache_seqlens and block_table. What has no position or page in the cache is not written.
    """
    columns = head_size(x, q_weight, k_weight)
    if x.dim() != 3:
        raise ValueError(f"x: shape is {tuple(x.shape)}; it must be (B, S, C)")
    cast = torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64
    dtype = torch.get_autocast_dtype(x.device.type) if cast else x.dtype
    check_cache(k_cache, v_cache, cache_seqlens, block_table, x, columns, dtype)
    _check_room(k_cache, v_cache, block_table)
    heads = columns, num_heads, k_cache.shape[1]
    check_projected(x, weight, bias, cos, sin, position_ids, *heads, eps, interleaved, offset, "K of k_cache")
    check_position_values(position_ids, cos)
    tensors = x, weight, bias, q_weight, k_weight, cos, sin
    if needs_grad(*tensors, k_cache, v_cache):
        raise RuntimeError("qkv_norm_rope_cache_ has no gradient: call it under torch.no_grad(), or qkv_norm_rope")
    if LADDER.chosen("qkv_norm_rope", level, *tensors) == "triton":
        if position_ids is not None:
            cos, sin = cos[position_ids], sin[position_ids]
        q, k, v = project(x, weight, bias, num_heads, k_cache.shape[1], columns)
        cache = k_cache, v_cache, cache_seqlens, block_table
        return norm_rope_cache_(q, k, v, q_weight, k_weight, cos, sin, *cache, eps, interleaved, offset)
    run = LADDER.resolve("qkv_norm_rope", level, *tensors)
    q, k, v = run(*tensors, position_ids, num_heads, k_cache.shape[1], eps, interleaved, offset)
    write(k, v, k_cache, v_cache, cache_seqlens, block_table)
    return q


def _check_room(k_cache: Tensor, v_cache: Tensor, block_table: Tensor | None) -> None:
    """Raise ValueError where a cache has no room in its pages, or no memory for itself."""
    if block_table is not None and k_cache.shape[2] == 0:
        raise ValueError(f"k_cache: shape is {tuple(k_cache.shape)}; page_size must be at least 1")
    if v_cache is k_cache:
        raise ValueError("v_cache: it is k_cache; it must be another tensor")
    check_no_overlap("k_cache", k_cache)
    check_no_overlap("v_cache", v_cache)


def write(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, block_table: Tensor | None
) -> None:
    """Write keys and values `(B, S, K, D)` into the cache with PyTorch operators, without waiting for the GPU."""
    if k.numel() == 0 or k_cache.numel() == 0 or (block_table is not None and block_table.numel() == 0):
        return
    page_size = k_cache.shape[2]
    position = cache_seqlens.to(torch.int64).unsqueeze(1) + torch.arange(k.shape[1], device=k.device)
    page = torch.arange(k.shape[0], device=k.device).unsqueeze(1).expand_as(position)
    room = (position >= 0) & (position < page_size * (1 if block_table is None else block_table.shape[1]))
    if block_table is not None:
        page = block_table.gather(1, (position // page_size).clamp(0, block_table.shape[1] - 1)).to(torch.int64)
        room = room & (page >= 0) & (page < k_cache.shape[0])
    # A token without room repeats the write of one with room: indexing with a mask would wait for the GPU.
    room = room.flatten()
    token = torch.where(room, torch.arange(room.shape[0], device=k.device), room.to(torch.int8).argmax())
    page = page.flatten().clamp(0, k_cache.shape[0] - 1)[token]
    place = (position % page_size).flatten()[token]
    for cache, new in ((k_cache, k), (v_cache, v)):
        cache[page, :, place] = torch.where(room.any(), new.flatten(0, 1)[token], cache[page, :, place])
