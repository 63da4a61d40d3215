"""`KeyValueCache`: keys and values of the tokens so far, for generation."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class KeyValueCache:
    """Keys and values of all layers, `(batch, num_kv_heads, length, head_dim)` each, in memory that is allocated once.

    Sequences may have different lengths: token i of a call belongs at position `lengths[b] + i` of sequence b. Keys and
    values have this device and dtype; None for PyTorch's defaults.

    Attributes:
        keys, values: by layer.
        lengths: `(batch,)`, int32: the number of cached tokens of each sequence.
        filled: at least the largest of lengths, known without waiting for the device.
    """

    def __init__(
        self,
        num_layers: int,
        batch: int,
        num_kv_heads: int,
        length: int,
        head_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        # Zeros: plain attention multiplies masked values too, and uninitialised memory may hold NaN.
        shape = batch, num_kv_heads, length, head_dim
        self.keys = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(num_layers)]
        self.values = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(num_layers)]
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self.filled = 0

    def positions(self, tokens: int) -> Tensor:
        """Positions of the next tokens of each sequence, `(B, tokens)`, int64; ValueError if there is no room."""
        if self.filled + tokens > (room := self.keys[0].shape[2]):
            raise ValueError(f"cache: it has room for {room} tokens; {self.filled + tokens} are needed")
        return self.lengths[:, None] + torch.arange(tokens, device=self.lengths.device)

    def layer(self, index: int, positions: Tensor) -> LayerCache:
        """The cache of one layer during a call for tokens at these positions."""
        tokens = positions.shape[1]
        return LayerCache(self.keys[index], self.values[index], positions, self.lengths + tokens, self.filled + tokens)

    def advance(self, tokens: int) -> None:
        """Count that many more tokens of each sequence as cached, once all layers have written them."""
        self.lengths = self.lengths + tokens
        self.filled += tokens

    def set_lengths(self, lengths: Tensor) -> None:
        """Keep only the first `lengths[b]` (at most the present length) tokens of each sequence: drop padding."""
        self.lengths = lengths.to(self.lengths)


class LayerCache(NamedTuple):
    """The cache of one layer during one call."""

    keys: Tensor  # (B, K, length, D)
    values: Tensor
    positions: Tensor  # (B, S), of the tokens of the call
    lengths: Tensor  # (B,), int32, the number of tokens including those of the call
    end: int  # at least the largest of lengths

    @property
    def is_first(self) -> bool:
        """Whether nothing was cached before the call."""
        return self.end == self.positions.shape[1]

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Write the keys and values `(B, S, K, D)` of the call.

        Returns all keys and values `(B, K, end, D)`, views of the cache, and lengths `(B,)`.
        """
        rows = torch.arange(k.shape[0], device=k.device)[:, None]
        self.keys.transpose(1, 2)[rows, self.positions] = k.to(self.keys.dtype)
        self.values.transpose(1, 2)[rows, self.positions] = v.to(self.values.dtype)
        return self.keys[:, :, : self.end], self.values[:, :, : self.end], self.lengths
