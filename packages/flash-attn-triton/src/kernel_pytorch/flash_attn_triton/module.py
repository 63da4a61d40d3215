"""`MultiheadAttention`, a drop-in for `torch.nn.MultiheadAttention`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .functional import flash_attention, flash_attention_masked
from .levels import LADDER


class MultiheadAttention(torch.nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` computed by `kernel_pytorch.flash_attn_triton.flash_attention`.

    Same constructor, parameters, state_dict and results, but for two: a query that sees no key gives the output
    projection of zeros, not NaN, and `is_causal` is obeyed without `attn_mask` too. What needs the matrix of weights or
    has no counterpart here is left to the stock module, which may refuse it: `need_weights=True` (its default),
    `add_bias_kv`, `add_zero_attn`, nested tensors, dropout while training, and masks of other shapes or dtypes.

    Args:
        *arguments: of `torch.nn.MultiheadAttention`.
        level: as in `flash_attention`; an attribute that may be changed later.
        **keywords: of `torch.nn.MultiheadAttention`.
    """

    level: str | None

    def __init__(self, *arguments: Any, level: str | None = None, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        LADDER.check(level)
        self.level = level

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Project, attend, project.

        Args:
            query: `(L, N, E)`, with batch_first `(N, L, E)`, or `(L, E)`.
            key: `(S, N, kdim)`, with the batch dimension where query has it.
            value: `(S, N, vdim)`, with the batch dimension where query has it.
            key_padding_mask: `(N, S)` or `(S,)`: bool, True for keys that are left out, or float, added.
            need_weights: whether to return the weights too, as the stock module computes them.
            attn_mask: `(L, S)` or `(N * heads, L, S)`: bool, True for keys that are left out, or float, added.
            average_attn_weights: over heads, with need_weights.
            is_causal: that attn_mask is a causal mask, which is not read then; L must be S for that.

        Returns:
            The output, in the shape of query; None, or with need_weights the weights.
        """
        given = query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
        return attend(self, super().forward, self.level, *given)

    def extra_repr(self) -> str:
        """As the stock module, with the level where one was asked for."""
        return super().extra_repr() + (f"level={self.level!r}" if self.level is not None else "")


def attend(
    module: torch.nn.MultiheadAttention,
    stock: Callable[..., tuple[Tensor, Tensor | None]],
    level: str | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """What `MultiheadAttention.forward` gives, for any module with its parameters.

    `level` is as in `flash_attention`.

    Args:
        module: whose parameters these are.
        stock: its own forward, for what has no counterpart here.
        query: as in `MultiheadAttention.forward`; so are the rest.
    """
    nothing_special = module.bias_k is None and not module.add_zero_attn and not query.is_nested
    nothing_special = nothing_special and _fit(module, query, key, attn_mask, key_padding_mask, is_causal)
    if need_weights or not nothing_special or (module.dropout > 0.0 and module.training):
        return stock(query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)
    batched = query.dim() == 3
    projected = _projected(module, query, key, value)
    if not batched:
        projected = tuple(t.unsqueeze(0) for t in projected)
    elif not module.batch_first:
        projected = tuple(t.transpose(0, 1) for t in projected)
    q, k, v = (t.unflatten(-1, (module.num_heads, -1)).transpose(1, 2) for t in projected)
    causal = is_causal and q.shape[2] == k.shape[2]
    mask = _mask(None if causal else attn_mask, key_padding_mask, q)
    if mask is None:
        y = flash_attention(q, k, v, causal=causal, level=level)
    else:
        y = flash_attention_masked(q, k, v, mask, causal=causal, level=level)
    y = module.out_proj(y.transpose(1, 2).flatten(2))
    return (y.squeeze(0) if not batched else y if module.batch_first else y.transpose(0, 1)), None


def _fit(
    module: torch.nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    is_causal: bool,
) -> bool:
    """Whether masks have the shapes and dtypes that `MultiheadAttention.forward` documents."""
    batched, place = query.dim() == 3, 1 if module.batch_first and query.dim() == 3 else 0
    batch = query.shape[1 - place] if batched else 1
    pair = query.shape[place], key.shape[place]
    allowed = (pair, (batch * module.num_heads, *pair))
    if attn_mask is None and is_causal and pair[0] != pair[1]:
        return False
    if attn_mask is not None and (attn_mask.dtype not in (torch.bool, query.dtype) or attn_mask.shape not in allowed):
        return False
    padding = (batch, pair[1]) if batched else (pair[1],)
    return key_padding_mask is None or (
        key_padding_mask.dtype in (torch.bool, query.dtype) and key_padding_mask.shape == padding
    )


def _projected(module: torch.nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    biases = (None, None, None) if module.in_proj_bias is None else module.in_proj_bias.chunk(3)
    if not module._qkv_same_embed_dim:
        weights = module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
    elif query is key and key is value:
        return F.linear(query, module.in_proj_weight, module.in_proj_bias).chunk(3, -1)
    else:
        weights = module.in_proj_weight.chunk(3)
    inputs = query, key, value
    return tuple(F.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True))


def _mask(attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor) -> Tensor | None:
    """Both masks in one that broadcasts to `(N, heads, L, S)`: bools where a key is seen, or numbers to add."""
    masks = []
    if attn_mask is not None:
        masks.append(attn_mask[None, None] if attn_mask.dim() == 2 else attn_mask.unflatten(0, (-1, q.shape[1])))
    if key_padding_mask is not None:
        masks.append(key_padding_mask.reshape(q.shape[0], 1, 1, -1))
    if not masks:
        return None
    if all(mask.dtype == torch.bool for mask in masks):
        return ~masks[0] if len(masks) == 1 else ~(masks[0] | masks[1])
    lowest = float("-inf")
    numbers = (torch.zeros_like(m, dtype=q.dtype).masked_fill(m, lowest) if m.dtype == torch.bool else m for m in masks)
    return sum(numbers, torch.zeros((), dtype=q.dtype, device=q.device))
