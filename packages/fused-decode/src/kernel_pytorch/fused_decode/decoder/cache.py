"""Keys and values of all layers, and how those of a prompt get there."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .plan import Plan

ROUND = 16
"""A window's slots are a multiple of this."""


class Caches:
    """Slots for the keys and values of each layer, the number of tokens of each row, and which were chosen.

    A row's token at position p is in slot p, without its padding; in layers with a window in slot p % slots.

    Attributes:
        layers: keys, values, cosines and sines of each layer; keys and values `(rows, kv_heads, slots, head_dim)`.
        lengths: int32 `(rows,)`, the position of the next token; below 0 where a row is not in use.
        history: int64 `(rows, length)`, in the host's memory, which a GPU writes to: the token that was chosen at each
            position, -1 where logits are not finite.
        written: the same where PyTorch's operators can write it: `history` on a CPU, else a tensor on the GPU.
    """

    def __init__(self, plan: Plan, tables: Mapping[str, tuple[Tensor, Tensor]], rows: int, length: int) -> None:
        table, self.layers = plan.table, []
        shared: dict[int, tuple[Tensor, Tensor]] = {}
        for layer in plan.layers:
            attention = layer.attention
            window = attention.window or length
            slots = min(-(-window // ROUND) * ROUND, length)
            shape = (rows, attention.kv_heads, slots, attention.head_dim)
            k, v = (torch.zeros(shape, dtype=table.dtype, device=table.device) for _ in range(2))
            if attention.rotary is not None:
                cos, sin = tables[attention.rotary]
            else:
                cos, sin = shared.setdefault(attention.head_dim, _no_rotation(length, attention.head_dim, table.device))
            self.layers.append((k, v, cos, sin))
        self.lengths = torch.full((rows,), -1, dtype=torch.int32, device=table.device)
        self.history = torch.zeros(rows, length, dtype=torch.int64, device="cpu", pin_memory=table.is_cuda)
        self.written = torch.zeros_like(self.history, device=table.device) if table.is_cuda else self.history
        if table.is_cuda:
            weakref.finalize(self, _give_back, self.history, self.written).atexit = False

    def fill(self, prompt: Any, width: int, pads: Sequence[int]) -> None:
        """Copy what the model's own forward cached of a padded prompt.

        Args:
            prompt: a cache of transformers whose layers have the last columns of the prompt.
            width: columns of the prompt, padding included.
            pads: how many columns at the left of each row are padding.
        """
        found: dict[tuple[int, int], Tensor] = {}
        for (k, v, _, _), layer in zip(self.layers, prompt.layers, strict=True):
            kept, slots = layer.keys.shape[-2], k.shape[-2]
            if (kept, slots) not in found:
                start = torch.tensor([max(pad - width + kept, kept - slots, 0) for pad in pads], device="cpu")
                rows, columns = (torch.arange(kept, device="cpu") >= start[:, None]).nonzero(as_tuple=True)
                at = (width - kept + columns - torch.tensor(pads, device="cpu")[rows]) % slots
                found[kept, slots] = torch.stack([rows, columns, at]).to(k.device)
            rows, columns, at = found[kept, slots]
            for cache, new in ((k, layer.keys), (v, layer.values)):
                cache.transpose(1, 2)[rows, at] = new.transpose(1, 2)[rows, columns].to(cache.dtype)


_kept: list[Tensor] = []  # freed while a graph is recorded: they stay


def _give_back(history: Tensor, written: Tensor) -> None:
    """Let PyTorch reuse the host's memory only when steps that still run have written to it: it waits for copies."""
    if torch.cuda.is_current_stream_capturing():
        _kept.append(history)
    else:
        history[:1, :1].copy_(written[:1, :1], non_blocking=True)


def _no_rotation(length: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    one = torch.ones(length, head_dim // 2, dtype=torch.float32, device=device)
    return one, torch.zeros_like(one)
