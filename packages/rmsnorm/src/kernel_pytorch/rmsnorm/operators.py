"""The operators of the Triton level, each declared once: `rms_norm`, `add_rms_norm` and their gradient.

Rows are independent, so DTensor may shard x over every dimension but the last: y, the sum and rstd lie like x, each
rank holds its rows' part of the gradient of the weight, and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ._core.operator import declare, per_element


def result_dtype(x_dtype: torch.dtype, weight: Tensor | None, casting: str) -> torch.dtype:
    """The dtype of y, as `levels/reference.py` defines it."""
    if weight is None or casting == "gemma":
        return x_dtype
    return torch.promote_types(x_dtype, weight.dtype)


# The norm.


def launch() -> Callable[..., Any]:
    """The launcher."""
    from .kernels import forward

    return forward.rms_norm


def fake(x: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str) -> tuple[Tensor, Tensor]:
    """What it allocates."""
    y = x.new_empty(x.shape, dtype=result_dtype(x.dtype, weight, casting))
    return y, x.new_empty(x.shape[:-1], dtype=torch.promote_types(x.dtype, torch.float32))


def gradient(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, eps: float, offset: float, needs: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    """Of x and the weight; x, the weight and one float32 a row are saved for it."""
    found: tuple[Tensor, Tensor] = rms_norm_backward(dy, None, x, weight, rstd, eps, offset, *needs)
    return found


def placements(dtensor: Any, x: Any, weight: Any, *scalars: Any) -> Iterator[tuple[list[Any], list[Any]]]:
    """Where y, rstd, x and the weight may lie."""
    for rows, of_weight, _ in placed_together(dtensor, x, weight):
        yield [rows] * 2, [rows, of_weight]


rms_norm = declare(
    "rms_norm(Tensor x, Tensor? weight, float eps, float offset, str casting) -> (Tensor y, Tensor rstd)",
    launch=launch,
    fake=fake,
    gradient=gradient,
    flops=per_element(4),
    sharding=placements,
)


# With the residual stream.


def launch_add() -> Callable[..., Any]:
    """The launcher."""
    from .kernels import forward

    return forward.add_rms_norm


def fake_add(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, offset: float, casting: str
) -> tuple[Tensor, Tensor, Tensor]:
    """What it allocates."""
    h = x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, residual.dtype))
    y, rstd = fake(h, weight, eps, offset, casting)
    return y, h, rstd


def gradient_add(
    dy: Tensor | None,
    dh: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    eps: float,
    offset: float,
    needs: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Of x, the residual and the weight; h, the weight and one float32 a row are saved for it."""
    if dy is None:
        return dh, dh, None
    dx, dweight = rms_norm_backward(dy, dh, h, weight, rstd, eps, offset, needs[0] or needs[1], needs[2])
    return dx, dx, dweight


def placements_add(
    dtensor: Any, x: Any, residual: Any, weight: Any, *scalars: Any
) -> Iterator[tuple[list[Any], list[Any]]]:
    """Where y, h, rstd, x, the residual and the weight may lie."""
    for rows, of_weight, _ in placed_together(dtensor, x, weight):
        yield [rows] * 3, [rows, rows, of_weight]


add_rms_norm = declare(
    "add_rms_norm(Tensor x, Tensor residual, Tensor? weight, float eps, float offset, str casting)"
    " -> (Tensor y, Tensor h, Tensor rstd)",
    launch=launch_add,
    fake=fake_add,
    gradient=gradient_add,
    follows={"h": ("x", "residual")},
    flops=per_element(5),
    sharding=placements_add,
)


# The gradient of both.


def launch_backward() -> Callable[..., Any]:
    """The launcher."""
    from .kernels import backward

    return backward.rms_norm_backward


def fake_backward(
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    eps: float,
    offset: float,
    need_dx: bool,
    need_dweight: bool,
) -> tuple[Tensor, Tensor]:
    """What it allocates; what is not needed comes back empty."""
    dx = h.new_empty(h.shape if need_dx else (0,))
    if weight is None:
        return dx, h.new_empty((0,), dtype=rstd.dtype)
    return dx, weight.new_empty(weight.shape if need_dweight else (0,))


def formula(
    dy: Tensor,
    dh: Tensor | None,
    h: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    eps: float,
    offset: float,
    need_dx: bool,
    need_dweight: bool,
) -> tuple[Tensor, Tensor]:
    """The gradients of `kernels/backward.py` in PyTorch that autograd can follow: rstd is computed again for that."""
    wide = torch.promote_types(h.dtype, torch.float32)
    x, dy, nothing = h.to(wide), dy.to(wide), h.new_empty((0,))
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    x_hat = x * rstd
    g = dy if weight is None else dy * (offset + weight.to(wide))
    dx = rstd * (g - x_hat * (g * x_hat).mean(-1, keepdim=True))
    if dh is not None:
        dx = dx + dh.to(wide)
    dweight = nothing.clone()
    if weight is not None and need_dweight:
        dweight = (dy * x_hat).sum_to_size(weight.shape).to(weight.dtype)
    return dx.to(h.dtype) if need_dx else nothing, dweight


def placements_backward(
    dtensor: Any, dy: Any, dh: Any, h: Any, weight: Any, rstd: Any, eps: Any, offset: Any, *needs: bool
) -> Iterator[tuple[list[Any], list[Any]]]:
    """Where dx, dweight and what goes in may lie."""
    nothing = dtensor.Replicate()  # what is not needed comes back empty, and is the same everywhere
    need_dx, need_dweight = needs
    for rows, of_weight, share in placed_together(dtensor, h, weight):
        outputs = [rows if need_dx else nothing, share if need_dweight and weight is not None else nothing]
        yield outputs, [rows, None if dh is None else rows, rows, of_weight, rows]


rms_norm_backward = declare(
    "rms_norm_backward(Tensor dy, Tensor? dh, Tensor h, Tensor? weight, Tensor rstd, float eps, float offset,"
    " bool need_dx, bool need_dweight) -> (Tensor dx, Tensor dweight)",
    launch=launch_backward,
    fake=fake_backward,
    formula=formula,
    flops=per_element(11),
    sharding=placements_backward,
)


def placed_together(dtensor: Any, x: Any, weight: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Placements of x, the weight and its gradient that belong together: the last dimension is whole.

    A weight with a row per head is sharded with the heads, where they are sharded.
    """
    replicate, partial = dtensor.Replicate(), dtensor.Partial()
    yield replicate, None if weight is None else replicate, replicate
    for dimension in range(x.ndim - 1):
        per_head = weight is not None and weight.ndim == 2 and dimension == x.ndim - 2
        shares = (dtensor.Shard(0), dtensor.Shard(0)) if per_head else (replicate, partial)
        yield dtensor.Shard(dimension), None if weight is None else shares[0], shares[1]
