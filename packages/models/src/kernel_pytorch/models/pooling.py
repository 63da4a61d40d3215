"""From the vectors of tokens to one vector of each text, over packed texts: there is no padding to leave out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

OLD_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""The flags of older files, in the order in which their vectors are concatenated."""

MODES = tuple(OLD_FLAGS.values())


def read_modes(config: dict[str, Any]) -> tuple[str, ...]:
    """The modes that the pooling config of a sentence-transformers folder names, in the order of their vectors.

    Args:
        config: newer files have `pooling_mode`, a name or a list; older ones a flag for each mode.

    Raises:
        ValueError: a mode is unknown.
    """
    if "pooling_mode" in config:
        named = config["pooling_mode"]
        modes = (named,) if isinstance(named, str) else tuple(named)
    else:
        flags = {key: value for key, value in config.items() if key.startswith("pooling_mode_") and value}
        if unknown := sorted(flags.keys() - OLD_FLAGS.keys()):
            raise ValueError(f"pooling: given {', '.join(unknown)}; known are {', '.join(OLD_FLAGS)}")
        modes = tuple(mode for key, mode in OLD_FLAGS.items() if key in flags) or ("mean",)
    if unknown := [str(mode) for mode in modes if mode not in MODES]:
        raise ValueError(f"pooling_mode: given {', '.join(unknown)}; known are {', '.join(MODES)}")
    return modes


def pool_texts(x: Tensor, cu_seqlens: Tensor, modes: tuple[str, ...]) -> Tensor:
    """Pool each text.

    Args:
        x: `(T, N)`, the tokens of all texts, one text behind the other.
        cu_seqlens: `(B + 1,)` int32 or int64, where each text begins, and T. Texts may be empty.
        modes: of `MODES`; "weightedmean" weighs a token with its position, counted from 1.

    Returns:
        `(B, N * len(modes))`, float32 (float64 of float64): sums of 16-bit numbers lose digits. Zeros of empty texts.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    lengths = cu_seqlens.diff()
    empty = lengths[:, None] == 0
    found = [_pool(x, cu_seqlens.long(), lengths, mode) for mode in modes]
    return torch.where(empty, 0.0, torch.cat(found, 1))


def _pool(x: Tensor, starts: Tensor, lengths: Tensor, mode: str) -> Tensor:
    if mode in ("cls", "lasttoken"):
        places = starts[:-1] if mode == "cls" else starts[1:] - 1
        return x.index_select(0, places.clamp(0, max(x.shape[0] - 1, 0))) if x.shape[0] else _sums(x, starts)
    counts = lengths.clamp(min=1)[:, None].to(x.dtype)
    if mode == "mean":
        return _sums(x, starts) / counts
    if mode == "mean_sqrt_len_tokens":
        return _sums(x, starts) / counts.sqrt()
    tokens = torch.arange(x.shape[0], device=x.device)
    texts = torch.searchsorted(starts, tokens, right=True) - 1
    if mode == "max":
        index = texts[:, None].expand_as(x)
        return x.new_zeros(lengths.shape[0], x.shape[1]).scatter_reduce(0, index, x, "amax", include_self=False)
    positions = (tokens - starts[texts] + 1).to(x.dtype)
    return _sums(x * positions[:, None], starts) / (counts * (counts + 1) / 2)


def _sums(x: Tensor, starts: Tensor) -> Tensor:
    """Sum the rows of each text, in their order: the same bits whatever stands around it."""
    if not x.shape[0]:
        return x.new_zeros(starts.shape[0] - 1, x.shape[1])
    return F.embedding_bag(torch.arange(x.shape[0], device=x.device), x, starts, mode="sum", include_last_offset=True)
