"""Gradients of parameters of which some are divided and some are whole: PyTorch's list functions take no mixture."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .strategies import Parallelized


def parameter_kinds(model: nn.Module | Parallelized) -> list[list[nn.Parameter]]:
    """Return lists of parameters for an optimizer's groups: plain tensors, and the DTensors of each mesh.

    Optimizers with `fused=True` or `foreach=True` need this after `tensor_parallel`: a group must be of one kind.
    """
    return [*_kinds(_parameters(model)).values()]


def clip_gradients(model: nn.Module | Parallelized, max_norm: float) -> Tensor:
    """Scale the gradients so that their norm, of all ranks together, is at most max_norm; return the norm before.

    This is `torch.nn.utils.clip_grad_norm_` for models after any of the helpers. Each rank must call it.

    Args:
        model: after any of the helpers, or what the helper returned; after the last backward of a step.
        max_norm: the largest Euclidean norm.

    Returns:
        `()`, the same on every rank, float32 (float64 of float64).
    """
    kinds = [*_kinds(each for each in _parameters(model) if each.grad is not None).values()]
    total = torch.stack([_square_of_norm(kind) for kind in kinds]).sum().sqrt() if kinds else torch.zeros(())
    for kind in kinds:
        torch.nn.utils.clip_grads_with_norm_(kind, max_norm, total)
    return total


def _parameters(model: Any) -> Iterable[nn.Parameter]:
    model = model.model if isinstance(model, Parallelized) else model
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: given {type(model).__name__}; it must be a torch.nn.Module, or what a helper returned")
    return model.parameters()


def _square_of_norm(kind: list[nn.Parameter]) -> Tensor:
    # DTensor's norm adds up all dimensions of a mesh at once, and warns that ranks may then differ in rounding.
    gradients: list[Any] = [each.grad for each in kind]
    local = [each.to_local() if isinstance(each, DTensor) else each for each in gradients]
    norm = torch.nn.utils.get_total_norm(local)
    square = norm.to(torch.promote_types(norm.dtype, torch.float32)).square()
    for dimension, placement in enumerate(getattr(gradients[0], "placements", ())):
        if not placement.is_replicate():
            dist.all_reduce(square, group=gradients[0].device_mesh.get_group(dimension))
    return square


def _kinds(parameters: Iterable[nn.Parameter]) -> dict[object, list[nn.Parameter]]:
    found: dict[object, list[nn.Parameter]] = {}
    for each in parameters:
        whole = tuple(placement.is_replicate() for placement in getattr(each, "placements", ()))
        kind = (each.device_mesh, whole) if isinstance(each, DTensor) else None
        found.setdefault(kind, []).append(each)
    return found
