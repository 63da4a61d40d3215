"""`FusedSelfAttention`: projection, QK-norm, rotary embedding, attention and the output projection; `KVCache`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kernel_pytorch.qkv_fusion._core.arguments import check_number, check_tensor, shape_of
from kernel_pytorch.qkv_fusion.levels import LADDER
from kernel_pytorch.qkv_fusion.norm_rope.functional import qk_norm_rope
from kernel_pytorch.qkv_fusion.rotary.functional import rotary_embedding

from .projection import QKVProjection, pack_projection
from .table import RotaryTable

OUTPUTS = {"packed": "out_proj", "q_proj": "o_proj", "query": "dense", "Wqkv": "out_proj", "qkv": "proj"}
OUTPUTS |= {"c_attn": "c_proj", "in_proj": "out_proj"}
"""Names of the output projection, by naming of the others."""


class KVCache:
    """Keys and values of the tokens so far, `(B, L, K, D)` each, for generation without gradients.

    `qkv_norm_rope_cache_` and `flash_decode` of flash-attn-triton take them as `cache.keys.transpose(1, 2)`.

    Args:
        batch: B.
        length: L, how many tokens there is memory for.
        projection: what makes keys and values: their heads, dtype and device.
    """

    def __init__(self, batch: int, length: int, projection: QKVProjection) -> None:
        shape = (batch, length, projection.num_kv_heads, projection.head_dim)
        self.keys = torch.empty(shape, dtype=projection.weight.dtype, device=projection.weight.device)
        self.values = torch.empty_like(self.keys)
        self.filled = 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the keys and values of more tokens, `(B, S, K, D)`; returns views of all that are kept.

        Raises:
            ValueError: they are of another batch or heads than the cache, or there is no memory left for them.
        """
        wanted = self.keys.shape[0], *self.keys.shape[2:]
        if (k.shape[0], *k.shape[2:]) != wanted or v.shape != k.shape:
            raise ValueError(f"cache: it holds (B, K, D) = {wanted}; given are {shape_of(k)} and {shape_of(v)}")
        end = self.filled + k.shape[1]
        if end > self.keys.shape[1]:
            raise ValueError(f"length: the cache holds {self.keys.shape[1]} tokens; {end} are needed")
        self.keys[:, self.filled : end] = k
        self.values[:, self.filled : end] = v
        self.filled = end
        return self.keys[:, :end], self.values[:, :end]


class FusedSelfAttention(torch.nn.Module):
    """Self-attention whose queries, keys and values are one product, normalised and rotated in one pass.

    Args:
        embed_dim: C, channels that go in and come out.
        num_heads: H.
        num_kv_heads: K, which divides H; None for K = H.
        head_dim: D; None for C / H.
        bias: whether the projection of queries, keys and values has one.
        out_bias: whether the output projection has one.
        qk_norm: eps of the RMSNorm of heads of queries and keys, as Qwen3 has it; None for no norm.
        rotary: makes cosines and sines; None for no rotation, which needs qk_norm to be None too.
        attention: called with q, k, v `(B, heads, S, D)`, attn_mask, dropout_p, is_causal, enable_gqa.
        dropout: of attention, in training.
        naming: of the projection, as in `QKVProjection`; the output projection is named as models of that naming do.
        device: of the parameters.
        dtype: of the parameters.
        level: of `qk_norm_rope` and `rotary_embedding`.

    Raises:
        TypeError: qk_norm is no number, or rotary cannot be called.
        ValueError: num_kv_heads does not divide num_heads, or rotary is None where there is qk_norm.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        bias: bool = False,
        out_bias: bool = False,
        qk_norm: float | None = None,
        rotary: RotaryTable | None = None,
        interleaved: bool = False,
        attention: Callable[..., Tensor] = F.scaled_dot_product_attention,
        dropout: float = 0.0,
        naming: str = "q_proj",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        level: str | None = None,
    ) -> None:
        super().__init__()
        LADDER.check(level)
        if qk_norm is not None:
            check_number("qk_norm", qk_norm)
        if rotary is not None and not callable(rotary):
            raise TypeError(f"rotary: given {type(rotary).__name__}; it must be a RotaryTable or None")
        if qk_norm is not None and rotary is None:
            raise ValueError("rotary: given None; with qk_norm it must be a RotaryTable")
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.projection = QKVProjection(embed_dim, num_heads, num_kv_heads, head_dim, bias, naming, **made)
        if num_heads % self.projection.num_kv_heads:
            raise ValueError(f"num_kv_heads: given {num_kv_heads}; it must divide num_heads, {num_heads}")
        self.projection.inside = "projection."
        self.register_load_state_dict_pre_hook(_pack)
        columns = self.projection.head_dim
        self.rotary, self.interleaved, self.level = rotary, interleaved, level
        self.attention, self.dropout = attention, dropout
        self.q_norm = None if qk_norm is None else torch.nn.RMSNorm(columns, qk_norm, **made)
        self.k_norm = None if qk_norm is None else torch.nn.RMSNorm(columns, qk_norm, **made)
        self.output = OUTPUTS[naming]
        self.add_module(self.output, torch.nn.Linear(num_heads * columns, embed_dim, out_bias, **made))

    def forward(
        self,
        x: Tensor,
        position_ids: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            x: `(B, S, C)`.
            position_ids: `(S,)` or `(B, S)`; None for those that follow what the cache holds, from 0 without one.
            attn_mask: as scaled_dot_product_attention takes it; not with is_causal.
            is_causal: whether a token sees those before it alone, in the cache and here.
            cache: keys and values of the tokens so far, to which those of x are added.

        Returns:
            `(B, S, C)`.

        Raises:
            TypeError: x is no tensor of an allowed dtype.
            ValueError: x has another number of dimensions or of channels, there is attn_mask with is_causal, or x
                does not fit into cache.
        """
        check_tensor("x", x)
        if is_causal and attn_mask is not None:
            raise ValueError("attn_mask: given with is_causal; it must be None, or the mask must be causal itself")
        if x.dim() != 3 or x.shape[-1] != self.projection.in_features:
            raise ValueError(f"x: shape is {shape_of(x)}; it must be (B, S, {self.projection.in_features})")
        q, k, v = self.projection(x)
        before, tokens = 0 if cache is None else cache.filled, x.shape[1]
        if self.rotary is not None:
            if position_ids is None:
                position_ids = torch.arange(before, before + tokens, device=x.device)
            q, k = self._turned(q, k, *self.rotary(position_ids))
        if cache is not None:
            k, v = cache.append(k, v)
        if is_causal and before > 0:  # is_causal would align the first query with the first key
            seen = torch.ones(tokens, before + tokens, dtype=torch.bool, device=x.device).tril(before)
            attn_mask, is_causal = seen, False
        try:
            y = self.attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=attn_mask,
                dropout_p=self.dropout if self.training else 0.0, is_causal=is_causal,
                enable_gqa=self.projection.num_kv_heads != self.projection.num_heads,
            )  # fmt: skip
        except Exception:
            if cache is not None:
                cache.filled = before  # so that the call may be repeated
            raise
        return self.get_submodule(self.output)(y.transpose(1, 2).flatten(-2))

    def _turned(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys, normalised if they are to be, and rotated."""
        if self.q_norm is None or self.k_norm is None:
            return rotary_embedding(q, k, cos, sin, interleaved=self.interleaved, level=self.level)
        weights, eps = (self.q_norm.weight, self.k_norm.weight), self.q_norm.eps
        assert eps is not None
        return qk_norm_rope(q, k, *weights, cos, sin, eps=eps, interleaved=self.interleaved, level=self.level)


def _pack(module: torch.nn.Module, state: dict[str, Any], prefix: str, *found: Any) -> None:
    """Load the projection under the names that it has in models."""
    assert isinstance(module, FusedSelfAttention)
    pack_projection(module.projection, state, prefix, *found)
