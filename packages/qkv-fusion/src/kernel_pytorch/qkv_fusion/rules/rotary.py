"""Rotary position embedding: `rotary_embedding` of one tensor, and `rotary_qk` of queries and keys at once.

Both are linear in what they rotate, so each is its own derivative, with the transposed matrix, any number of times.
Heads are whole: DTensor may shard batches, tokens and heads, the tables with the tokens, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from .._core.gradients import asks
from .._core.operator import Rules, like_first, per_element
from .._core.sharding import Shardings


@asks("itself dy cos sin interleaved transposed needs")
def gradient(itself: Callable[..., Any], *given: Any) -> tuple[Tensor | None, None, None]:
    """Gradient of x; only the tables are saved for it."""
    *others, transposed, needs = given
    return itself(*others, not transposed) if needs[0] else None, None, None


def token_placements(placements: Any, x: Any, cos: Any) -> Iterator[tuple[Any, Any]]:
    """Where heads may lie, whole, and the tables with them.

    Args:
        placements: `torch.distributed.tensor`.
        x: `(..., S, H, D)`.
        cos: `(S, R/2)`, or `(..., S, R/2)`.
    """
    yield placements.Replicate(), placements.Replicate()
    first = x.ndim - 1 - cos.ndim  # of the dimensions of x that the tables have
    for dimension in range(x.ndim - 1):
        has = first <= dimension < x.ndim - 2
        yield placements.Shard(dimension), placements.Shard(dimension - first) if has else placements.Replicate()


def sharding(placements: Any, a: Any) -> Shardings:
    """Where y, x and the tables may lie."""
    for heads, tables in token_placements(placements, a.x, a.cos):
        yield {"x": heads, "y": heads, "cos": tables, "sin": tables}


def fake_qk(a: Any) -> tuple[Tensor, Tensor]:
    """What it allocates; of what is absent comes back an empty tensor."""
    q_out, k_out = (a.cos.new_empty((0,)) if x is None else x.new_empty(x.shape) for x in (a.q, a.k))
    return q_out, k_out


@asks("itself dq_out dk_out cos sin position_ids interleaved transposed needs")
def gradient_qk(itself: Callable[..., Any], *given: Any) -> tuple[Tensor | None, ...]:
    """Gradients of q and k; only the tables and positions are saved for them."""
    dq_out, dk_out, *constants, transposed, needs = given
    dq, dk = (dy if need else None for dy, need in zip((dq_out, dk_out), needs, strict=False))
    if dq is None and dk is None:
        return (None,) * 5
    found = itself(dq, dk, *constants, not transposed)
    return *(None if dy is None else dx for dy, dx in zip((dq, dk), found, strict=True)), None, None, None


def sharding_qk(placements: Any, a: Any) -> Shardings:
    """Where both results, q, k, the tables and positions may lie; positions lie like tokens, and tables are whole."""
    # Positions have the dimensions that tables without them would have, less their columns.
    like = a.cos if a.position_ids is None else a.position_ids.unsqueeze(-1)
    for heads, rows in token_placements(placements, a.k if a.q is None else a.q, like):
        found = {} if a.q is None else {"q": heads, "q_out": heads}
        found |= {} if a.k is None else {"k": heads, "k_out": heads}
        yield found | dict.fromkeys(("cos", "sin") if a.position_ids is None else ("position_ids",), rows)


ROTARY_EMBEDDING_RULES: Rules = {
    "schema": "rotary_embedding(Tensor x, Tensor cos, Tensor sin, bool interleaved, bool transposed=False) -> Tensor",
    "fake": like_first,
    "gradient": gradient,
    "flops": per_element(3),
    "sharding": sharding,
}
ROTARY_QK_RULES: Rules = {
    "schema": "rotary_qk(Tensor? q, Tensor? k, Tensor cos, Tensor sin, Tensor? position_ids, bool interleaved,"
    " bool transposed) -> (Tensor q_out, Tensor k_out)",
    "fake": fake_qk,
    "gradient": gradient_qk,
    "follows": {"q_out": ("q",), "k_out": ("k",)},
    "flops": per_element(3, 0, 1),
    "sharding": sharding_qk,
}
ROTARY_QK_IN_PLACE_RULES: Rules = {
    "schema": "rotary_qk_(Tensor(a!) q, Tensor(b!) k, Tensor cos, Tensor sin, Tensor? position_ids, bool interleaved,"
    " bool transposed) -> ()",
    "fake": lambda *arguments: None,
    "flops": per_element(3, 0, 1),
}
