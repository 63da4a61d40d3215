"""`TransformerBlock`, and the attention and feed-forward it is made of."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from kernel_pytorch.qkv_fusion import RotaryTable

from .cache import LayerCache
from .techniques import ACTIVATIONS, Names, TechniqueModule, check_integers

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of the positions of all tokens, from `RotaryTable`."""

NORMS = {"rms": nn.RMSNorm, "layer": nn.LayerNorm}


class Attention(TechniqueModule):
    """Self-attention with one projection for queries, keys and values.

    Parameters: `qkv` `((H + 2K) * D, dim)`, with the rows of queries, keys and values in this order, and `out`
    `(dim, H * D)`.

    Args:
        dim: channels of a token.
        num_heads: H, heads of queries.
        num_kv_heads: K, heads of keys and values, which divides H (Ainslie et al., "GQA", 2023,
            https://arxiv.org/abs/2305.13245); None for H.
        head_dim: D; None for dim / H.
        bias: whether both projections have one.
        causal: whether a token sees no later token.
        techniques, level: as in `TechniqueModule`, with its errors.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        causal: bool = True,
        techniques: Names = None,
        level: str | None = None,
    ) -> None:
        super().__init__(techniques, level)
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_integers(dim=dim, num_heads=num_heads, num_kv_heads=kv_heads)
        if num_heads < 1 or kv_heads < 1 or num_heads % kv_heads:
            raise ValueError(f"num_kv_heads: given {kv_heads}; it must divide num_heads, {num_heads}")
        if head_dim is None and dim % num_heads:
            raise ValueError(f"head_dim: given None; dim {dim} is no multiple of num_heads, {num_heads}")
        self.num_heads, self.num_kv_heads, self.causal = num_heads, kv_heads, causal
        self.head_dim = dim // num_heads if head_dim is None else head_dim
        self.qkv = nn.Linear(dim, (num_heads + 2 * kv_heads) * self.head_dim, bias)
        self.out = nn.Linear(num_heads * self.head_dim, dim, bias)

    def forward(
        self,
        x: Tensor,
        *,
        rotation: Rotation | None = None,
        mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Compute attention, in the shape of x.

        Args:
            x: `(B, S, dim)`; packed `(T, dim)`.
            rotation: cosines and sines `(S, D/2)` or `(B, S, D/2)`; None for no rotary embedding.
            mask: bool, broadcasts to `(B, H, S, S)`, False where a key is not seen. A token that sees no key gets the
                output projection of zeros.
            cu_seqlens: `(B + 1,)`, int32: x is packed, and sequence b is `x[cu_seqlens[b] : cu_seqlens[b + 1]]`.
            max_seqlen: at least the tokens of the longest packed sequence; None for T.
            cache: keys and values of the tokens before x, to which those of x are added. No gradients then.
        """
        heads = self.num_heads, self.num_kv_heads, self.head_dim
        q, k, v = self.techniques.qkv(x, self.qkv.weight, self.qkv.bias, *heads)
        if rotation is not None:
            q, k = self.techniques.rotate(q, k, *rotation)
        if cu_seqlens is not None:
            longest = x.shape[0] if max_seqlen is None else max_seqlen
            y = self.techniques.attention_packed(q, k, v, cu_seqlens, longest, causal=self.causal)
        elif cache is not None:
            keys, values, lengths = cache.append(k, v)
            if cache.is_first:  # nothing else was cached, so no mask is needed
                y = self.techniques.attention(q, k, v, causal=True)
            else:
                y = self.techniques.attention_cached(q, keys, values, lengths)
        else:
            y = self.techniques.attention(q, k, v, causal=self.causal, mask=mask)
        return self.out(y.flatten(-2))


class FeedForward(TechniqueModule):
    """The feed-forward of a transformer: `down(activation(up(x)))`, or gated, `down(activation(gate(x)) * up(x))`.

    Parameters: gated `gate_up` `(2 * hidden_dim, dim)`, the rows of the gate first, else `up`; and `down`.

    Args:
        dim: channels of a token.
        hidden_dim: channels in between; None for 4 dim, or if gated 8/3 dim, rounded up to a multiple of 64.
        gated: whether there is a gate (Shazeer, "GLU Variants Improve Transformer", 2020,
            https://arxiv.org/abs/2002.05202). A gated feed-forward has no biases.
        activation: "gelu", "gelu_tanh", "silu", "relu" or "quick_gelu"; None for "silu" if gated, else "gelu".
        techniques, level: as in `TechniqueModule`, with its errors.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int | None = None,
        *,
        gated: bool = True,
        activation: str | None = None,
        techniques: Names = None,
        level: str | None = None,
    ) -> None:
        super().__init__(techniques, level)
        if hidden_dim is None:
            hidden_dim = -(-8 * dim // 192) * 64 if gated else 4 * dim
        self.gated, self.activation = gated, activation or ("silu" if gated else "gelu")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation: given {activation!r}; allowed are {', '.join(ACTIVATIONS)}")
        if gated:
            self.gate_up = nn.Linear(dim, 2 * hidden_dim, bias=False)
        else:
            self.up = nn.Linear(dim, hidden_dim)
        self.down = nn.Linear(hidden_dim, dim, bias=not gated)

    def forward(self, x: Tensor) -> Tensor:
        """Map `(..., dim)` to the same shape."""
        if self.gated:
            return self.techniques.gated_mlp(x, self.gate_up.weight, self.down.weight, self.activation)
        return self.down(self.techniques.linear_act(x, self.up.weight, self.up.bias, self.activation))


class TransformerBlock(TechniqueModule):
    """A pre-norm transformer block: `x = x + attention(norm1(x)); x = x + mlp(norm2(x))`.

    Args:
        dim: channels of a token.
        num_heads, num_kv_heads, head_dim, bias, causal: as in `Attention`.
        norm: "rms" (`torch.nn.RMSNorm`) or "layer" (`torch.nn.LayerNorm`).
        norm_eps: eps of both norms.
        mlp: "gated" or "gelu", a plain feed-forward with biases.
        hidden_dim, activation: as in `FeedForward`.
        rotary: makes cosines and sines for tokens 0, 1, ... where a call has no rotation; None for no rotation.
        techniques, level: as in `TechniqueModule`, with its errors.

    Source: Vaswani et al., 2017, https://arxiv.org/abs/1706.03762; pre-norm as in Xiong et al., "On Layer Normalization
    in the Transformer Architecture", 2020, https://arxiv.org/abs/2002.04745.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        norm: Literal["rms", "layer"] = "rms",
        norm_eps: float = 1e-6,
        mlp: Literal["gated", "gelu"] = "gated",
        hidden_dim: int | None = None,
        activation: str | None = None,
        bias: bool = False,
        causal: bool = True,
        rotary: RotaryTable | None = None,
        techniques: Names = None,
        level: str | None = None,
    ) -> None:
        super().__init__(techniques, level)
        if norm not in NORMS:
            raise ValueError(f"norm: given {norm!r}; allowed are {', '.join(NORMS)}")
        if mlp not in ("gated", "gelu"):
            raise ValueError(f"mlp: given {mlp!r}; allowed are gated, gelu")
        how: dict[str, Any] = {"techniques": self.techniques.names, "level": level}
        heads: dict[str, Any] = {"num_kv_heads": num_kv_heads, "head_dim": head_dim}
        self.norm1 = NORMS[norm](dim, eps=norm_eps)
        self.attention = Attention(dim, num_heads, **heads, bias=bias, causal=causal, **how)
        self.norm2 = NORMS[norm](dim, eps=norm_eps)
        self.mlp = FeedForward(dim, hidden_dim, gated=mlp == "gated", activation=activation, **how)
        self.rotary = rotary

    def forward(
        self,
        x: Tensor,
        update: Tensor | None = None,
        *,
        rotation: Rotation | None = None,
        defer: bool = False,
        **attention: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Apply the block, in the shape of x; with defer return two tensors of that shape.

        Args:
            x: `(B, S, dim)`, the residual stream; packed `(T, dim)`.
            update: the shape of x, the output of the previous block that is still to be added; None for none.
            rotation: as in `Attention.forward`; None for that of `rotary`.
            defer: return `(x, update)` before they are added, so that the next norm adds them in its own kernel.
            attention: mask, cu_seqlens, max_seqlen and cache of `Attention.forward`.
        """
        if rotation is None and self.rotary is not None:
            rotation = self.rotary(torch.arange(x.shape[-2], device=x.device))
        y, x = self.techniques.norm(self.norm1, x, update)
        update = self.attention(y, rotation=rotation, **attention)
        y, x = self.techniques.norm(self.norm2, x, update)
        update = self.mlp(y)
        return (x, update) if defer else x + update
