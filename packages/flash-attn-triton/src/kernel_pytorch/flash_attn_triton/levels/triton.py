"""Triton: a kernel for the forward, kernels for the gradients, and for decoding. There are no second derivatives."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kernel_pytorch.flash_attn_triton import operators
from kernel_pytorch.flash_attn_triton._core.call_kinds import needs_grad
from kernel_pytorch.flash_attn_triton._core.operation import calls, first, first_two
from kernel_pytorch.flash_attn_triton.masks import limits

NOT_PACKED = (None, None, 0, 0)  # cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k


def keeps_rest(q: Tensor, *others: Tensor | None) -> bool:
    """Whether a backward will need maxima, sums and what rounding took off the output."""
    return needs_grad(q, *others)


def _arguments_of(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window: tuple[int, int] | None, softcap: float | None,
    alibi_slopes: Tensor | None, sinks: Tensor | None, dropout_p: float, seed: Tensor | None, deterministic: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """The arguments of the operator, made of those of `reference.py`."""
    options = scale, *limits(causal, window), softcap or 0.0, dropout_p, *NOT_PACKED, keeps_rest(q, k, v, sinks)
    return q, k, v, None, alibi_slopes, sinks, seed, *options


flash_attention = calls(operators.flash_attention, first)(_arguments_of)
flash_attention_with_lse = calls(operators.flash_attention, first_two)(_arguments_of)


@calls(operators.flash_attention, first)
def flash_attention_masked(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, causal: bool, scale: float, window: tuple[int, int] | None,
    softcap: float | None, sinks: Tensor | None, dropout_p: float, seed: Tensor | None, deterministic: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """`flash_attention_masked` of `reference.py`."""
    options = scale, *limits(causal, window), softcap or 0.0, dropout_p, *NOT_PACKED, keeps_rest(q, k, v, mask, sinks)
    return q, k, v, mask, None, sinks, seed, *options


def flash_attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    causal: bool, scale: float, window: tuple[int, int] | None, softcap: float | None, alibi_slopes: Tensor | None,
    sinks: Tensor | None, deterministic: bool,
) -> Tensor:  # fmt: skip
    """`flash_attention_varlen` of `reference.py`."""
    options = scale, *limits(causal, window), softcap or 0.0, 0.0
    together = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    sequences = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    o: Tensor = operators.flash_attention(
        *together, None, alibi_slopes, sinks, None, *options, *sequences, keeps_rest(q, k, v, sinks)
    )[0]
    return o.squeeze(0).transpose(0, 1)


@calls(operators.flash_decode)
def flash_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, block_table: Tensor | None, causal: bool,
    scale: float, window: tuple[int, int] | None, softcap: float | None, alibi_slopes: Tensor | None,
    sinks: Tensor | None,
) -> tuple[Any, ...]:  # fmt: skip
    """`flash_decode` of `reference.py`."""
    tensors = q, k_cache, v_cache, cache_seqlens, block_table, alibi_slopes, sinks
    return *tensors, scale, *limits(causal, window), softcap or 0.0
