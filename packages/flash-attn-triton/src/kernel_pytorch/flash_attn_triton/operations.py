"""The functions of the package: what is checked of a call, and what the functions of the levels get of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._core.arguments import check_flag
from ._core.operation import Operation, Prepared
from .arguments import (
    check_bias,
    check_cache,
    check_lengths,
    check_no_gradient,
    check_qkv,
    check_sinks,
    check_softcap,
    check_starts,
    scale_or_default,
    seed_of,
    slopes_of,
    window_of,
)
from .levels import CAUSAL_MASK, LADDER, SAME_BITS, gradient_is_unordered
from .masks import always

_ZERO = torch.zeros((), dtype=torch.int64)


def _seed(seed: Tensor | int | None, dropout_p: float, q: Tensor) -> Tensor | None:
    """Return `seed_of`, for an integer under torch.compile as a tensor that the graph reads.

    TorchInductor inlines a constant. Each round of Philox would then contain the previous one twice, and compilation
    would not end.
    """
    found = seed_of(seed, dropout_p, q)
    if found is not None and isinstance(seed, int) and torch.compiler.is_compiling():
        return found + _ZERO
    return found


def _attention(level: str | None, q: Tensor, k: Tensor, v: Tensor, causal: bool, *options: Any) -> Prepared:
    prepared = _with_lse(level, q, k, v, causal, *options)
    features = prepared.features[1:]
    if causal and not (always(q.shape[2] == k.shape[2]) or always(q.shape[2] == 1)):
        features = (*features, CAUSAL_MASK)
    return prepared._replace(features=features)


def _with_lse(level: str | None, *given: Any) -> Prepared:
    q, k, v, causal, scale, window, softcap, alibi_slopes, sinks, dropout_p, seed, deterministic = given
    check_qkv(q, k, v)
    alibi_slopes = slopes_of(alibi_slopes, q, q.shape[0], q.shape[1])
    check_sinks(sinks, q, q.shape[1])
    scale, window, seed = scale_or_default(scale, q), window_of(window), _seed(seed, dropout_p, q)
    features = "lse", *_features(q, causal, window, softcap, alibi_slopes, sinks, dropout_p, deterministic)
    options = causal, scale, window, softcap, alibi_slopes, sinks, float(dropout_p), seed, deterministic
    return Prepared(level, (q, k, v, *options), features, state=_state(deterministic), deciding=(q, sinks))


def _masked(level: str | None, *given: Any) -> Prepared:
    q, k, v, mask, causal, scale, window, softcap, sinks, dropout_p, seed, deterministic = given
    check_qkv(q, k, v)
    if isinstance(mask, Tensor) and mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"mask: dtype is {mask.dtype}; it must be torch.bool or a floating-point dtype")
    check_bias("mask", mask, q, k)
    check_sinks(sinks, q, q.shape[1])
    scale, window, seed = scale_or_default(scale, q), window_of(window), _seed(seed, dropout_p, q)
    features = _features(q, causal, window, softcap, None, sinks, dropout_p, deterministic)
    if causal and not always(q.shape[2] == 1):
        features = (*features, CAUSAL_MASK)
    options = causal, scale, window, softcap, sinks, float(dropout_p), seed, deterministic
    return Prepared(level, (q, k, v, mask, *options), features, state=_state(deterministic), deciding=(q, sinks))


def _varlen(level: str | None, *given: Any) -> Prepared:
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *others = given
    causal, scale, window, softcap, alibi_slopes, sinks, deterministic = others
    check_qkv(q, k, v, "(tokens, heads, head size)")
    check_starts("cu_seqlens_q", cu_seqlens_q, q, "q")
    check_starts("cu_seqlens_k", cu_seqlens_k, k, "k")
    if cu_seqlens_k.shape != cu_seqlens_q.shape:
        shapes = f"shape is {tuple(cu_seqlens_k.shape)}; it must be that of cu_seqlens_q, {tuple(cu_seqlens_q.shape)}"
        raise ValueError(f"cu_seqlens_k: {shapes}")
    alibi_slopes = slopes_of(alibi_slopes, q, cu_seqlens_q.shape[0] - 1, q.shape[1])
    check_sinks(sinks, q, q.shape[1])
    scale, window = scale_or_default(scale, q), window_of(window)
    features = _features(q, causal, window, softcap, alibi_slopes, sinks, 0.0, deterministic)
    check_lengths("cu_seqlens_q", cu_seqlens_q, max_seqlen_q, q, "q")
    check_lengths("cu_seqlens_k", cu_seqlens_k, max_seqlen_k, k, "k")
    sequences = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    options = causal, scale, window, softcap, alibi_slopes, sinks, deterministic
    given = q, k, v, *sequences, *options
    return Prepared(level, given, features, state=_state(deterministic), deciding=(q, sinks))


def _decode(level: str | None, *given: Any) -> Prepared:
    q, k_cache, v_cache, cache_seqlens, block_table, causal, scale, window, softcap, alibi_slopes, sinks = given
    check_cache(q, k_cache, v_cache, cache_seqlens, block_table)
    if block_table is not None and k_cache.shape[2] == 0:
        raise ValueError(f"k_cache: shape is {tuple(k_cache.shape)}; the page size must be at least 1")
    alibi_slopes = slopes_of(alibi_slopes, q, q.shape[0], q.shape[1])
    check_sinks(sinks, q, q.shape[1])
    scale, window = scale_or_default(scale, q), window_of(window)
    features = _features(q, causal, window, softcap, alibi_slopes, sinks, 0.0, False)
    check_no_gradient(q=q, k_cache=k_cache, v_cache=v_cache, sinks=sinks)
    given = q, k_cache, v_cache, cache_seqlens, block_table, causal, scale, window, softcap, alibi_slopes, sinks
    return Prepared(level, given, features, deciding=(q, sinks))


def _state(deterministic: bool) -> Callable[[], bool] | None:
    """What decides, with that option, whether native gives the same bits each time."""
    return torch.are_deterministic_algorithms_enabled if deterministic else None


def _features(
    q: Tensor,
    causal: bool,
    window: tuple[int, int] | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    dropout_p: float,
    deterministic: bool,
) -> tuple[str, ...]:
    """Check what is left to check; which features of `LACKS` a call uses."""
    check_flag("causal", causal)
    check_flag("deterministic", deterministic)
    check_softcap(softcap)
    if softcap is not None and softcap > torch.finfo(torch.float32).max:
        raise ValueError(f"softcap: given {softcap}; it must be a number of float32, or None for no soft cap")
    uses = {
        "window": window not in (None, (-1, -1)),
        "softcap": softcap is not None,
        "alibi_slopes": alibi_slopes is not None,
        "sinks": sinks is not None,
        "dropout_p": dropout_p > 0.0,
        "deterministic": deterministic and gradient_is_unordered(q.device),
        SAME_BITS: deterministic,
        "float64": q.dtype == torch.float64,
        "head size": q.shape[-1] > 256,
    }
    return tuple([feature for feature, used in uses.items() if used])


FLASH_ATTENTION = Operation(LADDER, "flash_attention", prepare=_attention)
FLASH_ATTENTION_WITH_LSE = Operation(LADDER, "flash_attention_with_lse", prepare=_with_lse)
FLASH_ATTENTION_MASKED = Operation(LADDER, "flash_attention_masked", prepare=_masked)
FLASH_ATTENTION_VARLEN = Operation(LADDER, "flash_attention_varlen", prepare=_varlen)
FLASH_DECODE = Operation(LADDER, "flash_decode", prepare=_decode)
