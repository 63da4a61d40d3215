"""`softmax` of scaled and masked scores, and its gradient.

    z = scale * x + mask                                     or -inf where a boolean mask is False
    y = exp(z - max(z)) / sum(exp(z - max(z)))               over the last dimension

Saved for the backward: y, which is a result anyway, and a mask that is added, of which only the shape is used.

Rows are independent, so DTensor may shard x over every dimension but the last, and nothing is sent. A mask that has
this dimension is sharded with it; one that is broadcast over it is replicated, and each rank holds the part of its
gradient from its own rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._core.gradients import asks
from .._core.operator import Rules, per_element
from .._core.sharding import Shardings, row_placements


def fake(x: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """What it allocates."""
    if mask is None or mask.dtype == torch.bool:
        return x.new_empty(x.shape)
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, mask.dtype))


def save(y: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """What the gradient is made of."""
    return y, mask if mask is not None and mask.is_floating_point() else None


@asks("backward dy saved scale needs")
def gradient(backward: Callable[..., Any], *given: Any) -> tuple[Tensor, Tensor]:
    """Gradients of x and the mask."""
    dy, saved, scale, needs = given
    return backward(dy, *saved, scale, *needs)


def flops(x: Any, mask: Any, *_: Any, **__: Any) -> int:
    """Scale, maximum, difference, exponential, sum, product; shapes in the place of tensors."""
    return (6 if mask is None else 7) * torch.Size(x).numel()


def sharding(placements: Any, a: Any) -> Shardings:
    """Where tensors may lie: the mask is sharded where it has the dimension."""
    x = a[0]  # or dy, which has its shape
    for rows, share in row_placements(placements, x.ndim):
        found = dict.fromkeys(("x", "y", "dy", "dx"), rows)
        of_mask = rows.dim - (x.ndim - a.mask.ndim) if rows.is_shard() and a.mask is not None else -1
        if of_mask >= 0 and a.mask.shape[of_mask] == x.shape[rows.dim] != 1:
            yield {**found, "mask": placements.Shard(of_mask), "dmask": placements.Shard(of_mask)}
        else:
            yield {**found, "dmask": share}


SOFTMAX_RULES: Rules = {
    "schema": "softmax(Tensor x, Tensor? mask, float scale) -> Tensor",
    "fake": fake,
    "save": save,
    "gradient": gradient,
    "flops": flops,
    "sharding": sharding,
}


# The gradient.


def fake_backward(a: Any) -> tuple[Tensor, Tensor]:
    """What it allocates; what is not needed comes back empty."""
    dx = a.y.new_empty(a.y.shape if a.need_dx else (0,))
    return dx, a.y.new_empty((0,)) if a.mask is None else a.mask.new_empty(a.mask.shape if a.need_dmask else (0,))


def formula(a: Any) -> tuple[Tensor, Tensor]:
    """The gradients in PyTorch that autograd can follow."""
    wide = torch.promote_types(a.y.dtype, torch.float32)
    p, dy = a.y.to(wide), a.dy.to(wide)
    dz = p * (dy - (dy * p).sum(-1, keepdim=True))
    dx = (a.scale * dz).to(a.y.dtype) if a.need_dx else a.y.new_empty((0,))
    if a.mask is None or not a.need_dmask:
        return dx, (a.y if a.mask is None else a.mask).new_empty((0,))
    return dx, dz.sum_to_size(a.mask.shape).to(a.mask.dtype)


SOFTMAX_BACKWARD_RULES: Rules = {
    "schema": "softmax_backward(Tensor dy, Tensor y, Tensor? mask, float scale, bool need_dx, bool need_dmask)"
    " -> (Tensor dx, Tensor dmask)",
    "fake": fake_backward,
    "formula": formula,
    "flops": per_element(5),
    "sharding": sharding,
}
