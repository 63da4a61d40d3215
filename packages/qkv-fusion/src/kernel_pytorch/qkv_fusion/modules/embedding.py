"""`TokenPositionEmbedding` and `PatchEmbedding`: what comes before the first layer, with the stock weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F


class TokenPositionEmbedding(torch.nn.Module):
    """Token, position and, if there are any, segment embeddings, added, with LayerNorm if there is one.

    Args:
        tokens: of the vocabulary, `(V, C)`.
        positions: `(P, C)`, learned; None for the sinusoids of Vaswani et al., 2017, https://arxiv.org/abs/1706.03762.
        segments: `(segments, C)`, as BERT's token_type_embeddings, or None.
        norm: over C, or None.
    """

    def __init__(
        self,
        tokens: torch.nn.Embedding,
        positions: torch.nn.Embedding | None = None,
        segments: torch.nn.Embedding | None = None,
        norm: torch.nn.LayerNorm | None = None,
    ) -> None:
        super().__init__()
        columns = tokens.embedding_dim
        for name, other in (("positions", positions), ("segments", segments)):
            if other is not None and other.embedding_dim != columns:
                raise ValueError(
                    f"{name}: embedding_dim is {other.embedding_dim}; it must be that of tokens, {columns}"
                )
        if norm is not None and tuple(norm.normalized_shape) != (columns,):
            raise ValueError(f"norm: normalized_shape is {tuple(norm.normalized_shape)}; it must be ({columns},)")
        self.tokens, self.positions, self.segments, self.norm = tokens, positions, segments, norm

    def forward(
        self, token_ids: Tensor, position_ids: Tensor | None = None, segment_ids: Tensor | None = None
    ) -> Tensor:
        """Embed.

        Args:
            token_ids: `(..., S)`, integers.
            position_ids: `(S,)` or `(..., S)`; None for 0 to S - 1.
            segment_ids: `(..., S)`; None for segment 0, where there are segments.

        Returns:
            `(..., S, C)`.

        Raises:
            ValueError: segment_ids are given, and there are no segments.
        """
        if segment_ids is not None and self.segments is None:
            raise ValueError("segment_ids: given a tensor; it must be None, for there are no segments")
        if position_ids is None:
            position_ids = torch.arange(token_ids.shape[-1], device=token_ids.device)
        y = self.tokens(token_ids) + self._positions(position_ids)
        if self.segments is not None:
            y = y + (self.segments.weight[0] if segment_ids is None else self.segments(segment_ids))
        return y if self.norm is None else self.norm(y)

    def _positions(self, position_ids: Tensor) -> Tensor:
        """`(..., S, C)`: learned, or sines of the first half of the columns and cosines of the second."""
        if self.positions is not None:
            return self.positions(position_ids)
        weight = self.tokens.weight
        half = (weight.shape[1] + 1) // 2
        steps = torch.arange(half, device=weight.device, dtype=torch.float32) * (-math.log(10000.0) / half)
        angles = position_ids.unsqueeze(-1) * steps.exp()
        return torch.cat((angles.sin(), angles.cos()), -1)[..., : weight.shape[1]].to(weight.dtype)


class PatchEmbedding(torch.nn.Module):
    """Patches of images as tokens: a convolution whose kernel is its stride, as one matrix product.

    Parameters and state_dict are those of the convolution: weight `(E, C, height, width)` and bias `(E,)`.

    Args:
        convolution: its kernel_size equals its stride; no padding, dilation or groups.

    Raises:
        ValueError: the convolution does more than embed patches.
    """

    def __init__(self, convolution: torch.nn.Conv2d) -> None:
        super().__init__()
        given = {name: getattr(convolution, name) for name in ("stride", "padding", "dilation", "groups")}
        wanted = {"stride": convolution.kernel_size, "padding": (0, 0), "dilation": (1, 1), "groups": 1}
        if given != wanted:
            raise ValueError(f"convolution: it has {given}; patches are embedded with {wanted}")
        self.patch_size = convolution.kernel_size
        self.weight, self.bias = convolution.weight, convolution.bias

    def forward(self, images: Tensor) -> Tensor:
        """Embed images `(B, C, height, width)`, whose sizes are multiples of the patch's: `(B, patches, E)`.

        Raises:
            ValueError: the channels or the sizes do not fit.
        """
        channels, (height, width) = self.weight.shape[1], self.patch_size
        if images.dim() != 4 or images.shape[1] != channels or images.shape[2] % height or images.shape[3] % width:
            raise ValueError(
                f"images: shape is {tuple(images.shape)}; it must be (B, {channels}, multiple of {height}, multiple of"
                f" {width})"
            )
        patches = images.unflatten(3, (-1, width)).unflatten(2, (-1, height))  # (B, C, rows, height, columns, width)
        patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        return F.linear(patches, self.weight.flatten(1), self.bias)
