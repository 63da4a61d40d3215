"""RMSNorm or LayerNorm of every head of queries and keys and then their rotation, and the gradients.

Heads are whole: DTensor may shard batches, tokens and heads; the weights are replicated, and each rank holds its heads'
part of their gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._core.gradients import asks
from .._core.operator import Rules, like_first, per_element
from .._core.sharding import Shardings
from .rotary import token_placements

Four = tuple[Tensor, Tensor, Tensor, Tensor]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the statistics: float64 for float64, else float32."""
    return torch.promote_types(dtype, torch.float32)


def fake(q: Tensor, k: Tensor, *rest: Any) -> Four:
    """What it allocates."""
    q_rstd, k_rstd = (q.new_empty(x.shape[:-1], dtype=compute_dtype(q.dtype)) for x in (q, k))
    return q.new_empty(q.shape), q.new_empty(k.shape), q_rstd, k_rstd


def fake_backward(dq_out: Tensor | None, dk_out: Tensor | None, *rest: Any) -> Four:
    """What it allocates; what is not needed comes back empty."""
    found = zip(rest[-4:], rest[:4], strict=True)  # the needs, and what they are about
    return tuple(x.new_empty(x.shape if needed else (0,)) for needed, x in found)  # type: ignore[return-value]


def turned_back(dy: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The rotation of heads `(..., S, H, D)` by the opposite angles, in PyTorch that autograd can follow."""
    c, s, pairs = cos.detach().to(dy.dtype).unsqueeze(-2), sin.detach().to(dy.dtype).unsqueeze(-2), cos.shape[-1]
    rotated, rest = dy[..., : 2 * pairs], dy[..., 2 * pairs :]
    if interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
        turned = torch.stack((first * c + second * s, second * c - first * s), -1).flatten(-2)
    else:
        first, second = rotated.chunk(2, -1)
        turned = torch.cat((first * c + second * s, second * c - first * s), -1)
    return torch.cat((turned, rest), -1)


def formula_of_one(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    interleaved: bool,
    offset: float,
    centred: bool,
) -> tuple[Tensor, Tensor]:
    """The gradients of q, or of k, in PyTorch that autograd can follow: `(dx, dweight)`."""
    wide = compute_dtype(x.dtype)
    h = x.to(wide)
    if centred:
        h = h - h.mean(-1, keepdim=True)
    rstd = torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    x_hat = h * rstd
    g = turned_back(dy.to(wide), cos, sin, interleaved)
    scaled = g * (offset + weight.to(wide))
    dx = rstd * (scaled - x_hat * (scaled * x_hat).mean(-1, keepdim=True))
    if centred:
        dx = dx - dx.mean(-1, keepdim=True)
    return dx.to(x.dtype), (g * x_hat).sum_to_size(weight.shape).to(weight.dtype)


def formula(a: Any, *, centred: bool = False) -> Four:
    """The backward operator in PyTorch that autograd can follow; `centred` for LayerNorm."""
    needs = a[13:]
    found = [a.q.new_empty((0,)) for _ in needs]
    for i, (dy, x, weight) in enumerate(((a.dq_out, a.q, a.q_weight), (a.dk_out, a.k, a.k_weight))):
        if dy is not None and (needs[i] or needs[2 + i]):
            both = formula_of_one(dy, x, weight, a.cos, a.sin, a.eps, a.interleaved, a.offset, centred)
            found[i::2] = [g if needed else x.new_empty((0,)) for g, needed in zip(both, needs[i::2], strict=True)]
    return tuple(found)  # type: ignore[return-value]


@asks("backward dq_out dk_out q k q_weight k_weight cos sin q_rstd k_rstd eps interleaved offset needs")
def gradient(backward: Callable[..., Any], *given: Any) -> tuple[Tensor | None, ...]:
    """Gradients of q, k and the weights; the inputs and one float32 per head are saved for them."""
    *inputs, needs = given
    used = (inputs[0] is not None, inputs[1] is not None) * 2
    needed = [need and side for need, side in zip(needs[:4], used, strict=True)]
    if not any(needed):
        return (None,) * 6
    found = backward(*inputs, *needed)
    return *(g if need else None for g, need in zip(found, needed, strict=True)), None, None


def sharding(placements: Any, a: Any) -> Shardings:
    """Where tensors may lie."""
    of_heads = ("q", "k", "q_out", "k_out", "q_rstd", "k_rstd", "dq_out", "dk_out", "dq", "dk")
    for heads, tables in token_placements(placements, a.q, a.cos):
        shares = placements.Partial() if heads.is_shard() else heads
        found = dict.fromkeys(of_heads, heads) | dict.fromkeys(("cos", "sin"), tables)
        yield found | dict.fromkeys(("dq_weight", "dk_weight"), shares)


QK_NORM_ROPE_RULES: Rules = {
    "schema": "qk_norm_rope(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, Tensor cos, Tensor sin, float eps,"
    " bool interleaved, float offset) -> (Tensor q_out, Tensor k_out, Tensor q_rstd, Tensor k_rstd)",
    "fake": fake,
    "gradient": gradient,
    "follows": {"q_out": ("q", "q_weight"), "k_out": ("k", "k_weight")},
    "flops": per_element(7, 0, 1),
    "sharding": sharding,
}
BACKWARD_RULES: Rules = {
    "schema": "qk_norm_rope_backward(Tensor? dq_out, Tensor? dk_out, Tensor q, Tensor k, Tensor q_weight,"
    " Tensor k_weight, Tensor cos, Tensor sin, Tensor q_rstd, Tensor k_rstd, float eps, bool interleaved, float offset,"
    " bool need_dq, bool need_dk, bool need_dq_weight, bool need_dk_weight)"
    " -> (Tensor dq, Tensor dk, Tensor dq_weight, Tensor dk_weight)",
    "fake": fake_backward,
    "formula": formula,
    "flops": per_element(14, 2, 3),
    "sharding": sharding,
}
QK_LAYER_NORM_ROPE_RULES: Rules = {
    **QK_NORM_ROPE_RULES,
    "schema": QK_NORM_ROPE_RULES["schema"].replace("qk_norm_rope(", "qk_layer_norm_rope("),
}
LAYER_BACKWARD_RULES: Rules = {
    **BACKWARD_RULES,
    "schema": BACKWARD_RULES["schema"].replace("qk_norm_rope_backward(", "qk_layer_norm_rope_backward("),
    "formula": functools.partial(formula, centred=True),
}
NORM_ROPE_CACHE_RULES: Rules = {
    "schema": "norm_rope_cache_(Tensor q, Tensor k, Tensor v, Tensor q_weight, Tensor k_weight, Tensor cos, Tensor sin,"
    " Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor cache_seqlens, Tensor? block_table, float eps, bool interleaved,"
    " float offset) -> Tensor q_out",
    "fake": like_first,
    "flops": per_element(7, 0, 1),
}
