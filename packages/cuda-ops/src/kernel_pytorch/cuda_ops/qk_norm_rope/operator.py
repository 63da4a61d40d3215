"""`qk_norm_rope` in one kernel for q and k, and its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernel_pytorch.cuda_ops._core.operator import declare
from kernel_pytorch.cuda_ops.operators import call
from kernel_pytorch.cuda_ops.rotary_embedding.operator import token_placements
from kernel_pytorch.cuda_ops.rotary_embedding.reference import rotary_embedding
from kernel_pytorch.cuda_ops.rows_sharding import Shardings

Four = tuple[Tensor, Tensor, Tensor, Tensor]


def _compute_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _fake(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    interleaved: bool,
    offset: float,
) -> Four:
    rstds = (q.new_empty(x.shape[:-1], dtype=_compute_dtype(q.dtype)) for x in (q, k))
    return q.new_empty(q.shape), q.new_empty(k.shape), *rstds  # type: ignore[return-value]


def _fake_backward(
    dq_out: Tensor | None,
    dk_out: Tensor | None,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_rstd: Tensor,
    k_rstd: Tensor,
    eps: float,
    interleaved: bool,
    offset: float,
    need_dq: bool,
    need_dk: bool,
    need_dq_weight: bool,
    need_dk_weight: bool,
) -> Four:
    needs = ((need_dq, q), (need_dk, k), (need_dq_weight, q_weight), (need_dk_weight, k_weight))
    return tuple(x.new_empty(x.shape if needed else (0,)) for needed, x in needs)  # type: ignore[return-value]


def backward_formula(
    dy: Tensor, x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, interleaved: bool, offset: float
) -> tuple[Tensor, Tensor]:
    """The gradients of q, or of k, in PyTorch that autograd can follow: `(dx, dweight)`."""
    wide = _compute_dtype(x.dtype)
    h = x.to(wide)
    rstd = torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    x_hat = h * rstd
    g = rotary_embedding(dy.to(wide), cos, -sin, interleaved)
    scaled = g * (offset + weight.to(wide))
    dx = rstd * (scaled - x_hat * (scaled * x_hat).mean(-1, keepdim=True))
    return dx.to(x.dtype), (g * x_hat).sum_to_size(weight.shape).to(weight.dtype)


def _formula(
    dq_out: Tensor | None,
    dk_out: Tensor | None,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_rstd: Tensor,
    k_rstd: Tensor,
    eps: float,
    interleaved: bool,
    offset: float,
    *needs: bool,
) -> Four:
    """The backward operator in PyTorch that autograd can follow."""
    found = [q.new_empty((0,)) for _ in needs]
    for i, (dy, x, weight) in enumerate(((dq_out, q, q_weight), (dk_out, k, k_weight))):
        if dy is not None and (needs[i] or needs[2 + i]):
            both = backward_formula(dy, x, weight, cos, sin, eps, interleaved, offset)
            found[i::2] = [g if needed else x.new_empty((0,)) for g, needed in zip(both, needs[i::2], strict=True)]
    return tuple(found)  # type: ignore[return-value]


def _gradient(
    dq_out: Tensor | None,
    dk_out: Tensor | None,
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_rstd: Tensor,
    k_rstd: Tensor,
    eps: float,
    interleaved: bool,
    offset: float,
    needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    used = (dq_out is not None, dk_out is not None) * 2
    needed = [need and side for need, side in zip(needs[:4], used, strict=True)]
    if not any(needed):
        return (None,) * 6
    tensors = (dq_out, dk_out, q, k, q_weight, k_weight, cos, sin, q_rstd, k_rstd)
    found = run_qk_norm_rope_backward(*tensors, eps, interleaved, offset, *needed)
    return *(g if need else None for g, need in zip(found, needed, strict=True)), None, None


def _flops(factor: int, first: int) -> Any:
    """Of an operator whose arguments number `first` and `first + 1` are q and k."""

    def formula(*shapes: Any, **_: Any) -> int:
        return factor * sum(torch.Size(shape).numel() for shape in shapes[first : first + 2])

    return formula


# Sharding: the weights are replicated; each rank holds its heads' part of their gradients.


def _sharding(placements: Any, q: Any, k: Any, q_weight: Any, k_weight: Any, cos: Any, *rest: Any) -> Shardings:
    whole = placements.Replicate()
    for heads, tables in token_placements(placements, q, cos):
        yield [heads] * 4, [heads, heads, whole, whole, tables, tables]


def _sharding_backward(placements: Any, dq_out: Any, dk_out: Any, q: Any, *rest: Any) -> Shardings:
    whole, cos, needs = placements.Replicate(), rest[3], rest[-4:]
    for heads, tables in token_placements(placements, q, cos):
        shares = placements.Partial() if heads.is_shard() else whole
        # What is not needed comes back empty, and is the same everywhere.
        outputs = [own if needed else whole for own, needed in zip((heads, heads, shares, shares), needs, strict=True)]
        incoming = [None if dy is None else heads for dy in (dq_out, dk_out)]
        yield outputs, [*incoming, heads, heads, whole, whole, tables, tables, heads, heads]


run_qk_norm_rope = declare(
    "qk_norm_rope(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, Tensor cos, Tensor sin, float eps,"
    " bool interleaved, float offset) -> (Tensor q_out, Tensor k_out, Tensor q_rstd, Tensor k_rstd)",
    fake=_fake,
    gradient=_gradient,
    flops=_flops(7, 0),
    sharding=_sharding,
)
run_qk_norm_rope_backward = declare(
    "qk_norm_rope_backward(Tensor? dq_out, Tensor? dk_out, Tensor q, Tensor k, Tensor q_weight, Tensor k_weight,"
    " Tensor cos, Tensor sin, Tensor q_rstd, Tensor k_rstd, float eps, bool interleaved, float offset, bool need_dq,"
    " bool need_dk, bool need_dq_weight, bool need_dk_weight)"
    " -> (Tensor dq, Tensor dk, Tensor dq_weight, Tensor dk_weight)",
    fake=_fake_backward,
    formula=_formula,
    flops=_flops(14, 2),
    sharding=_sharding_backward,
)


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float = 1e-6,
    interleaved: bool = False,
    offset: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """RMSNorm of every head of q and k, then rotary, in one pass; differentiable in q, k and weights any number of
    times.

    Computed in float32 (float64 for float64) and rounded once. Views of a packed projection are read in place.

    Args:
        q: `(..., S, H, D)`, float16, bfloat16 or float32, on a CPU float64 too.
        k: `(..., S, K, D)`, in the dtype and on the device of q.
        q_weight: `(D,)`, shared by the heads; any of these dtypes.
        k_weight: as q_weight.
        cos: `(S, R/2)`, or `(..., S, R/2)` with the leading dimensions of q; R at most D. No gradient goes to it.
        sin: as cos.
        eps: added to the mean square.
        interleaved: pairs are columns 2i and 2i + 1; else i and i + R/2.
        offset: added to the weights (1 for weights stored around zero, as Gemma's).

    Returns:
        q and k so treated, in their dtype, contiguous.

    Raises:
        RuntimeError: the arguments do not fit, or the kernel could not be launched; the message names them.
        TypeError: an argument is not of its kind.
        ValueError: a number is not finite, or eps negative.
    """
    arguments = (q, k, q_weight, k_weight, cos, sin, eps, interleaved, offset)
    q_out, k_out, _, _ = call("qk_norm_rope", run_qk_norm_rope, *arguments)
    return q_out, k_out
