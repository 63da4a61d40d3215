"""A sequence that ranks divide between attention and feed-forward: `tensor_parallel(sequence_parallel=True)`.

An all-reduce is a reduce-scatter and an all-gather. Between the two a rank computes norms and residual sums of S / n
tokens, and keeps them for the backward.

Source: Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022,
https://arxiv.org/abs/2205.05198.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .loss import entering


def gathered(x: Tensor, mesh: DeviceMesh, *, differ: bool = True) -> Tensor:
    """Join the parts `(B, S / n, C)` that ranks have to `(B, S, C)`, on every rank.

    differ: whether ranks compute different things with it, so that the backward must add up their gradients.
    """
    return _Exchange.apply(x, _joined, _part_of_sum if differ else _part, mesh.get_group())  # type: ignore[no-any-return]


def scattered(x: Tensor, mesh: DeviceMesh, *, differ: bool = True) -> Tensor:
    """Return this rank's part `(B, S / n, C)` of the sum of what ranks have, `(B, S, C)`.

    differ: False where all ranks have the same, which is then not added up.

    Raises:
        ValueError: x has other dimensions, or the ranks do not divide S.
    """
    ranks = mesh.size()
    if x.dim() != 3 or x.shape[1] % ranks:
        raise ValueError(f"sequence: shape is {tuple(x.shape)}; it must be (B, S, C), with S divided by {ranks} ranks")
    return _Exchange.apply(x, _part_of_sum if differ else _part, _joined, mesh.get_group())  # type: ignore[no-any-return]


# torch 2.13 gave both another name, and warns of the old one.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class OfPart:
    """A norm of a rank's part of a sequence: the backward adds up the gradients of its parameters over the ranks."""

    mesh: DeviceMesh
    _parameters: dict[str, Any]

    @property
    def weight(self) -> Tensor:
        """The weight, `(C,)`; between forwards a part of it under `fully_sharded`, which asks for the parameter."""
        weight = self._parameters["weight"]
        return weight if isinstance(weight, DTensor) else entering(weight, self.mesh)


def check_norm(path: str, norm: nn.Module) -> None:
    """Raise TypeError unless this is a norm with one weight."""
    if "Norm" not in type(norm).__name__ or [name for name, _ in norm.named_parameters()] != ["weight"]:
        raise TypeError(f"{path}: it is {type(norm).__name__}; between attention and feed-forward of a divided "
                        "sequence it must be a norm with one weight; leave out sequence_parallel")  # fmt: skip


def divide_norm(norm: nn.Module, mesh: DeviceMesh) -> None:
    """Make a norm one of a part of the sequence, in place."""
    norm.mesh = mesh
    norm.__class__ = type(f"{type(norm).__name__}OfPart", (OfPart, type(norm)), {})


def divide_between(first: nn.Module, last: nn.Module, mesh: DeviceMesh) -> None:
    """Hand the first module a part of its input, which all ranks have, and join the parts of the last one's output."""
    take_part = partial(scattered, mesh=mesh, differ=False)
    first.register_forward_pre_hook(partial(replace_input, take_part), with_kwargs=True)
    last.register_forward_hook(lambda module, args, output: gathered(output, mesh, differ=False))


def replace_input(
    enter: Callable[[Tensor], Tensor], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Be the hook of a module, whose first argument or `hidden_states` becomes what `enter` makes of it."""
    if args:
        return (enter(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": enter(kwargs["hidden_states"])}


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[..., Tensor], back: Callable[..., Tensor], group: Any) -> Tensor:
        ctx.back, ctx.group = back, group
        return there(x, group)

    @staticmethod
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(incoming, ctx.group), None, None, None


def _joined(x: Tensor, group: Any) -> Tensor:
    ranks = dist.get_world_size(group)
    found = x.new_empty(ranks * x.shape[0], *x.shape[1:])  # of one rank after the other
    _all_gather(found, x.contiguous(), group=group)
    return found.unflatten(0, (ranks, -1)).movedim(0, 1).flatten(1, 2)


def _part(x: Tensor, group: Any) -> Tensor:
    return x.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)].contiguous()


def _part_of_sum(x: Tensor, group: Any) -> Tensor:
    parts = x.unflatten(1, (dist.get_world_size(group), -1)).movedim(1, 0)
    found = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
    _reduce_scatter(found, parts.flatten(0, 1), group=group)
    return found
