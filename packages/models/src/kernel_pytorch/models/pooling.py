"""Pooling of packed texts: from the vectors of tokens to one vector per text."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .segments import bag_sum, maximum

OLD_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Flags of older files, in the order in which their vectors are concatenated."""
MODES = tuple(OLD_FLAGS.values())


def read_modes(config: dict[str, Any]) -> tuple[str, ...]:
    """The modes in the pooling config of sentence-transformers, in the order of their vectors.

    Newer files have `pooling_mode`, a name or a list; older ones a flag for each mode. ValueError: a mode is unknown.
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
        x: `(T, N)`, the tokens of all texts, one text after the other.
        cu_seqlens: `(B + 1,)` int32 or int64, where each text begins, and T. Texts may be empty.
        modes: of `MODES`; "weightedmean" weights a token by its position, counted from 1.

    Returns:
        `(B, N * len(modes))`, float32 (float64 for float64): sums in 16 bits lose digits. Zeros for empty texts.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    lengths = cu_seqlens.diff()
    found = [_pool(x, cu_seqlens.long(), lengths, mode) for mode in modes]
    return torch.where(lengths[:, None] == 0, 0.0, torch.cat(found, 1))


def _pool(x: Tensor, starts: Tensor, lengths: Tensor, mode: str) -> Tensor:
    tokens = torch.arange(x.shape[0], device=x.device)
    if mode in ("cls", "lasttoken") and x.shape[0]:
        places = starts[:-1] if mode == "cls" else starts[1:] - 1
        return x.index_select(0, places.clamp(0, x.shape[0] - 1))
    texts = torch.searchsorted(starts, tokens, right=True) - 1
    if mode == "max":
        return maximum(x, texts, lengths.shape[0])
    counts = lengths.clamp(min=1)[:, None].to(x.dtype)
    if mode == "weightedmean":
        x = x * (tokens - starts[texts] + 1).to(x.dtype)[:, None]
        counts = counts * (counts + 1) / 2
    # The rows of each text are added in their order: the bits do not depend on the other texts.
    return bag_sum(x, None, tokens, starts) / (counts.sqrt() if mode == "mean_sqrt_len_tokens" else counts)
