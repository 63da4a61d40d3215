"""The operators of the Triton level: `softmax` and its gradient.

Saved for the backward: y, which is a result anyway, and a mask that is added, of which only the shape counts.

Rows are independent, so DTensor may shard x over every dimension but the last, and nothing is sent. A mask that has
this dimension is sharded with it; one that is broadcast over it is replicated, and each rank holds its own rows' part
of its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kernel_pytorch.fused_ln_act._core.operator import declare, per_element

from .levels.reference import score_dtype

Placed = Iterator[tuple[list[Any], list[Any]]]


def launch() -> Callable[..., Any]:
    """The launcher."""
    from .kernels import forward

    return forward.softmax


def fake(x: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """What it allocates."""
    return x.new_empty(x.shape, dtype=score_dtype(x, mask))


def save(y: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """What the gradient is made of."""
    return y, mask if mask is not None and mask.is_floating_point() else None


def gradient(
    dy: Tensor, saved: tuple[Tensor, Tensor | None], scale: float, needs: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    """Of x and the mask."""
    found: tuple[Tensor, Tensor] = softmax_backward(dy, *saved, scale, *needs)
    return found


def flops(x: Any, mask: Any, *_: Any, **__: Any) -> int:
    """Scale, maximum, difference, exponential, sum, product; shapes in the place of tensors."""
    return (6 if mask is None else 7) * torch.Size(x).numel()


def placements(dtensor: Any, x: Any, mask: Any, scale: float) -> Placed:
    """Where y, x and the mask may lie."""
    for rows, of_mask, _ in placed_together(dtensor, x, mask):
        yield [rows], [rows, of_mask]


softmax = declare(
    "softmax(Tensor x, Tensor? mask, float scale) -> Tensor",
    launch=launch,
    fake=fake,
    save=save,
    gradient=gradient,
    flops=flops,
    sharding=placements,
)


# The gradient.


def launch_backward() -> Callable[..., Any]:
    """The launcher."""
    from .kernels import backward

    return backward.softmax_backward


def fake_backward(
    dy: Tensor, y: Tensor, mask: Tensor | None, scale: float, need_dx: bool, need_dmask: bool
) -> tuple[Tensor, Tensor]:
    """What it allocates; what is not needed comes back empty."""
    dx = y.new_empty(y.shape if need_dx else (0,))
    return dx, y.new_empty((0,)) if mask is None else mask.new_empty(mask.shape if need_dmask else (0,))


def formula(
    dy: Tensor, y: Tensor, mask: Tensor | None, scale: float, need_dx: bool, need_dmask: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of `kernels/backward.py` in PyTorch that autograd can follow."""
    wide = torch.promote_types(y.dtype, torch.float32)
    p, dy = y.to(wide), dy.to(wide)
    dz = p * (dy - (dy * p).sum(-1, keepdim=True))
    dx = (scale * dz).to(y.dtype) if need_dx else y.new_empty((0,))
    if mask is None or not need_dmask:
        return dx, (y if mask is None else mask).new_empty((0,))
    return dx, dz.sum_to_size(mask.shape).to(mask.dtype)


def placements_backward(
    dtensor: Any, dy: Any, y: Any, mask: Any, scale: float, need_dx: bool, need_dmask: bool
) -> Placed:
    """Where dx, dmask and what goes in may lie."""
    nothing = dtensor.Replicate()  # what is not needed comes back empty, and is the same everywhere
    for rows, of_mask, share in placed_together(dtensor, y, mask):
        outputs = [rows if need_dx else nothing, share if need_dmask and mask is not None else nothing]
        yield outputs, [rows, rows, of_mask]


softmax_backward = declare(
    "softmax_backward(Tensor dy, Tensor y, Tensor? mask, float scale, bool need_dx, bool need_dmask)"
    " -> (Tensor dx, Tensor dmask)",
    launch=launch_backward,
    fake=fake_backward,
    formula=formula,
    flops=per_element(5),
    sharding=placements_backward,
)


def placed_together(dtensor: Any, x: Any, mask: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Placements of x, the mask and its gradient that belong together."""
    replicate, partial, shard = dtensor.Replicate(), dtensor.Partial(), dtensor.Shard
    yield replicate, None if mask is None else replicate, replicate
    for dimension in range(x.ndim - 1):
        if mask is None:
            yield shard(dimension), None, replicate
            continue
        of_mask = dimension - (x.ndim - mask.ndim)
        has_it = of_mask >= 0 and mask.shape[of_mask] == x.shape[dimension] != 1
        yield shard(dimension), *((shard(of_mask),) * 2 if has_it else (replicate, partial))
