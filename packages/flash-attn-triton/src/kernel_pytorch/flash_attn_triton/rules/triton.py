"""The operators of level "triton": attention with everything that the public functions take, and its gradients.

Sequences may be packed: then q, k and v are `(1, H, S, D)` views of `(S, H, D)`, and what is allocated lies like that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._core.operator import Rules
from .._core.sharding import Shardings


def empty_like(x: Tensor, packed: bool, device: torch.device | None = None) -> Tensor:
    """Memory for a result like x, contiguous; packed sequences with tokens before heads."""
    if not packed:
        return torch.empty(x.shape, dtype=x.dtype, device=device or x.device)
    _, heads, tokens, depth = x.shape
    return torch.empty((tokens, heads, depth), dtype=x.dtype, device=device or x.device).transpose(0, 1).unsqueeze(0)


def fake(a: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What it allocates: the output, lse, and what a backward needs, empty if not kept.

    That is the maximum of the scores and the sum of exponentials relative to it, and of 16 bits the rest that rounding
    took off the output.
    """
    packed = a.cu_seqlens_q is not None
    rest = empty_like(a.q, packed) if a.keep_rest and a.q.dtype != torch.float32 else a.q.new_empty((0,))
    normalizer = a.q.new_empty((*a.q.shape[:-1], 2) if a.keep_rest else (0,), dtype=torch.float32)
    return empty_like(a.q, packed), a.q.new_empty(a.q.shape[:-1], dtype=torch.float32), normalizer, rest


def save(
    q: Tensor, lse: Tensor, normalizer: Tensor, rest: Tensor, keep_rest: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Maxima and sums, and the rest of 16 bits; lse, which has fewer digits, where they were not kept."""
    return (normalizer, rest if q.dtype != torch.float32 else None) if keep_rest else (lse, None)


def gradient(
    backward: Callable[..., Any], do: Tensor | None, dlse: Tensor | None,
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, alibi_slopes: Tensor | None, sinks: Tensor | None,
    seed: Tensor | None, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, o: Tensor,
    scale: float, left: int, right: int, softcap: float, dropout_p: float, max_seqlen_q: int, max_seqlen_k: int,
    saved: Sequence[Tensor | None], needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Gradients of q, k, v, the bias and the sinks; the output and what `save` returns are saved too."""
    need_dbias = needs[3] and bias is not None and bias.is_floating_point()
    dq, dk, dv, dbias, dsinks = backward(
        torch.zeros_like(o) if do is None else do, dlse, q, k, v, bias, alibi_slopes, sinks, seed, o, *saved,
        scale, left, right, softcap, dropout_p,
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        needs[0], needs[1], needs[2], need_dbias, needs[5],
    )  # fmt: skip
    return dq, dk, dv, dbias, None, dsinks, None, None, None


def fake_backward(a: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What it allocates; what is not needed comes back empty."""
    packed, nothing = a.cu_seqlens_q is not None, (0,)
    dbias = a.q.new_empty(nothing) if a.bias is None or not a.need_dbias else a.bias.new_empty(a.bias.shape)
    dsinks = a.q.new_empty(nothing) if a.sinks is None or not a.need_dsinks else a.sinks.new_empty(a.sinks.shape)
    return (
        empty_like(a.q, packed) if a.need_dq else a.q.new_empty(nothing),
        empty_like(a.k, packed) if a.need_dk else a.q.new_empty(nothing),
        empty_like(a.v, packed) if a.need_dv else a.q.new_empty(nothing),
        dbias,
        dsinks,
    )


def flops(q: Any, k: Any, *arguments: Any, **keywords: Any) -> int:
    """Two products of `(Sq, D)` with `(D, Sk)`, causal or not, as PyTorch counts its own attention."""
    return 4 * torch.Size(q).numel() * k[2]


def flops_backward(do: Any, dlse: Any, q: Any, k: Any, *arguments: Any, **keywords: Any) -> int:
    """Five products, as PyTorch counts its own attention."""
    return 10 * torch.Size(q).numel() * k[2]


def sharding(placements: Any, a: Any) -> Shardings:
    """Where tensors may lie: batches and heads are independent.

    The dropout mask spans the whole batch, so nothing is sharded with dropout. With packed sequences, only heads are.
    """
    yield {}
    names = ["q", "k", "v", "o", "lse", "do", "dlse", "dq", "dk", "dv", "normalizer", "rest"]
    if hasattr(a, "keep_rest"):  # of the forward; what it does not keep is empty
        kept = 0 if not a.keep_rest else 1 if a.q.tensor_meta.dtype == torch.float32 else 2
        names = names[: 10 + kept]
    for dimension in () if a.dropout_p > 0.0 else (1,) if a.cu_seqlens_q is not None else (0, 1):
        own, share = placements.Shard(dimension), placements.Partial()
        found = dict.fromkeys(names, own)
        has_it = a.bias is not None and a.bias.shape[dimension] > 1
        found |= {"bias": own, "dbias": own} if has_it else {"dbias": share}
        of_slopes = -1 if a.alibi_slopes is None else dimension - 2 + a.alibi_slopes.ndim
        if of_slopes >= 0:
            found["alibi_slopes"] = placements.Shard(of_slopes)
        first = placements.Shard(0)
        yield found | ({"sinks": first, "dsinks": first} if dimension == 1 else {"dsinks": share})


FLASH_ATTENTION_RULES: Rules = {
    "schema": "flash_attention(Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? alibi_slopes, Tensor? sinks,"
    " Tensor? seed, float scale, SymInt left, SymInt right, float softcap, float dropout_p, Tensor? cu_seqlens_q,"
    " Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, bool keep_rest)"
    " -> (Tensor o, Tensor lse, Tensor normalizer, Tensor rest)",
    "fake": fake,
    "gradient": gradient,
    "save": save,
    "flops": flops,
    "sharding": sharding,
}
BACKWARD_RULES: Rules = {
    "schema": "flash_attention_backward(Tensor do, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor? bias,"
    " Tensor? alibi_slopes, Tensor? sinks, Tensor? seed, Tensor o, Tensor normalizer, Tensor? rest, float scale,"
    " SymInt left, SymInt right, float softcap, float dropout_p, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k,"
    " SymInt max_seqlen_q, SymInt max_seqlen_k, bool need_dq, bool need_dk, bool need_dv, bool need_dbias,"
    " bool need_dsinks)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)",
    "fake": fake_backward,
    "flops": flops_backward,
    "sharding": sharding,
}
