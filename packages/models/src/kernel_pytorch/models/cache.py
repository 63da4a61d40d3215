"""`KeyValueCache`: keys and values of the tokens so far, for generation."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class KeyValueCache:
    """Keys and values of all layers, `(B, K, length, D)` each, in memory that is allocated once.

    Sequences may have different lengths: token i of a call belongs at position `lengths[b] + i` of sequence b.

    Attributes:
        keys: by layer.
        values: by layer.
        lengths: `(B,)`, int32: how many tokens of each sequence are cached.
        filled: at least the largest of lengths, known without waiting for the device.

    Args:
        num_layers: how many layers there are.
        batch: B.
        num_kv_heads: K.
        length: how many tokens of a sequence there is room for.
        head_dim: D.
        device: of all tensors.
        dtype: of keys and values.
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
        # Zeros: plain attention multiplies what is masked, and memory that was never written may hold NaN.
        shape = batch, num_kv_heads, length, head_dim
        self.keys = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(num_layers)]
        self.values = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(num_layers)]
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self.filled = 0

    def positions(self, tokens: int) -> Tensor:
        """`(B, tokens)`, int64: where the next tokens of each sequence belong.

        Raises:
            ValueError: there is no room for as many.
        """
        if self.filled + tokens > self.keys[0].shape[2]:
            room = self.keys[0].shape[2]
            raise ValueError(f"cache: it has room for {room} tokens; {self.filled + tokens} are needed")
        return self.lengths[:, None] + torch.arange(tokens, device=self.lengths.device)

    def layer(self, index: int, positions: Tensor) -> LayerCache:
        """What one layer sees of the cache during a call for tokens at these positions."""
        tokens = positions.shape[1]
        return LayerCache(self.keys[index], self.values[index], positions, self.lengths + tokens, self.filled + tokens)

    def advance(self, tokens: int) -> None:
        """Count as many tokens of each sequence as cached, once all layers have theirs."""
        self.lengths = self.lengths + tokens
        self.filled += tokens

    def set_lengths(self, lengths: Tensor) -> None:
        """Keep the first `lengths[b]` tokens of each sequence alone, after a prompt with padding at its end.

        Args:
            lengths: `(B,)`, integers, at most the present lengths.
        """
        self.lengths = lengths.to(self.lengths)


class LayerCache(NamedTuple):
    """The cache of one layer during one call.

    Attributes:
        keys: `(B, K, length, D)`.
        values: `(B, K, length, D)`.
        positions: `(B, S)`, where the tokens of the call belong.
        lengths: `(B,)`, int32, how many tokens there are with those of the call.
        end: at least the largest of lengths.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    lengths: Tensor
    end: int

    @property
    def is_first(self) -> bool:
        """Whether nothing was cached before the call."""
        return self.end == self.positions.shape[1]

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Write the keys and values `(B, S, K, D)` of the call; what `attention_cached` takes.

        Returns:
            Keys and values `(B, K, end, D)`, views of the cache; lengths `(B,)`.
        """
        rows = torch.arange(k.shape[0], device=k.device)[:, None]
        self.keys.transpose(1, 2)[rows, self.positions] = k.to(self.keys.dtype)
        self.values.transpose(1, 2)[rows, self.positions] = v.to(self.values.dtype)
        return self.keys[:, :, : self.end], self.values[:, :, : self.end], self.lengths
