"""Sharding rules of operators: their registration with DTensor, and the placements that many of them share."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch

Shardings = Iterator[tuple[Sequence[Any], Sequence[Any]]]
"""Acceptable placements of the outputs, then of the tensors among the arguments, None for one that is absent."""


def row_placements(placements: ModuleType, dimensions: int) -> Iterator[tuple[Any, Any]]:
    """Where the rows of a tensor may lie, and what a sum over all rows is then.

    Args:
        placements: `torch.distributed.tensor`.
        dimensions: of the tensor; the last one is the row, which is whole.
    """
    yield placements.Replicate(), placements.Replicate()
    for dimension in range(dimensions - 1):
        yield placements.Shard(dimension), placements.Partial()


def shard(placements: ModuleType, operator: Any, rule: Callable[..., Any]) -> None:
    """Register a rule with DTensor, which caches decisions by tensors and integers; here all scalars are in the key."""
    try:
        from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
        from torch.distributed.tensor.experimental import register_sharding

        remembered = placements.DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    except (ImportError, AttributeError) as error:
        warnings.warn(
            f"{operator} will not accept DTensors, torch {torch.__version__} registers sharding rules in another way "
            f"({error})",
            stacklevel=2,
        )
        return
    kinds = ["Tensor" in str(argument.type) for argument in operator._schema.arguments]

    def complete(*arguments: Any) -> list[tuple[list[Any], list[Any]]]:
        found = []
        for outputs, tensors in rule(placements, *arguments):
            rest = iter(tensors)
            found.append((list(outputs), [next(rest) if kind else None for kind in kinds]))
        return found

    register_sharding(operator)(complete)
    remembered[operator] = RuntimeSchemaInfo(kinds.index(False) if False in kinds else len(kinds))
