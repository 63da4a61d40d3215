"""Sharding rules of the operators, for DTensor: data, sequence and tensor parallelism.

Rows are independent, so x may be sharded over every dimension but the last, the weight is replicated, and nothing is
sent: y, the sum and rstd are sharded like x, and each rank holds its own rows' part of the gradient of the weight. A
weight with a row per head is sharded with the heads, where they are sharded. Anything else that comes in (a sharded
last dimension, a pending sum) is redistributed first, by DTensor, to what costs least.

Importing `torch.distributed.tensor` takes half a second, which importing this package must not; so the rules are
registered when somebody else imports it, before there is a DTensor.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from .after_import import after_import

# Position of the first argument of an operator that is no tensor.
FIRST_SCALAR = {"rms_norm": 2, "add_rms_norm": 3, "rms_norm_backward": 5}

Shardings = list[tuple[list[Any], list[Any]]]
"""Acceptable placements of the outputs, then of all arguments; None for what is no tensor."""


def register_when_distributed() -> None:
    """Register the rules now if DTensor is imported already, else as soon as it is."""
    after_import("torch.distributed.tensor", register)


def register(tensor: ModuleType) -> None:
    """Register the rules with `torch.distributed.tensor`; a torch that has no place for them is told of in a warning.

    DTensor remembers its decisions by placements, shapes and dtypes, and `register_sharding` adds no more than integers
    to that key. Here `casting` decides about a dtype and `need_dx` about a shape, so the scalars must be added.
    """
    try:
        from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
        from torch.distributed.tensor.experimental import register_sharding

        remembered = tensor.DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    except (ImportError, AttributeError) as error:
        warnings.warn(
            f"kernel_pytorch.rmsnorm: level 'triton' will not accept DTensors, torch {torch.__version__} registers "
            f"sharding rules in another way ({error})",
            stacklevel=2,
        )
        return
    for name, rule in rules(tensor).items():
        operator = getattr(torch.ops.kernel_pytorch, name).default
        register_sharding(operator)(rule)
        remembered[operator] = RuntimeSchemaInfo(FIRST_SCALAR[name])


def rules(tensor: ModuleType) -> dict[str, Callable[..., Shardings]]:
    """The rule of each operator, by its name.

    Args:
        tensor: `torch.distributed.tensor`.
    """
    replicate, partial, shard = tensor.Replicate(), tensor.Partial(), tensor.Shard

    def choices(x: Any, weight: Any) -> list[tuple[Any, Any, Any]]:
        """Placements of x, the weight and its gradient that belong together."""
        found = [(replicate, replicate, replicate)]
        for dimension in range(x.ndim - 1):
            per_head = weight is not None and weight.ndim == 2 and dimension == x.ndim - 2
            found.append((shard(dimension), *((shard(0), shard(0)) if per_head else (replicate, partial))))
        return [(rows, of_weight if weight is not None else None, gradient) for rows, of_weight, gradient in found]

    def rms_norm(x: Any, weight: Any, *scalars: Any) -> Shardings:
        none = [None] * len(scalars)
        return [([rows] * 2, [rows, of_weight, *none]) for rows, of_weight, _ in choices(x, weight)]

    def add_rms_norm(x: Any, residual: Any, weight: Any, *scalars: Any) -> Shardings:
        none = [None] * len(scalars)
        return [([rows] * 3, [rows, rows, of_weight, *none]) for rows, of_weight, _ in choices(x, weight)]

    def rms_norm_backward(
        dy: Any, dh: Any, h: Any, weight: Any, rstd: Any, eps: float, offset: float, need_dx: bool, need_dweight: bool
    ) -> Shardings:
        found = []
        for rows, of_weight, gradient in choices(h, weight):
            # What is not needed comes back empty, and is the same everywhere.
            outputs = [
                rows if need_dx else replicate,
                gradient if need_dweight and weight is not None else replicate,
            ]
            inputs = [rows, None if dh is None else rows, rows, of_weight, rows, None, None, None, None]
            found.append((outputs, inputs))
        return found

    return {"rms_norm": rms_norm, "add_rms_norm": add_rms_norm, "rms_norm_backward": rms_norm_backward}
