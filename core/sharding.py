"""Sharding rules of operators: their registration with DTensor, and the placements that many of them share."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

Sharding = tuple[Sequence[Any], Sequence[Any]] | Mapping[str, Any]
"""Acceptable placements: of the outputs, then of the tensors among the arguments, None for one that is absent; or, by
name, of those that are not replicated, among which may be names that this operator does not have."""

Shardings = Iterator[Sharding]


def row_placements(placements: ModuleType, dimensions: int) -> Iterator[tuple[Any, Any]]:
    """Where the rows of a tensor may lie, and what a sum over all rows is then.

    Args:
        placements: `torch.distributed.tensor`.
        dimensions: of the tensor; the last one is the row, which is whole.
    """
    yield placements.Replicate(), placements.Replicate()
    for dimension in range(dimensions - 1):
        yield placements.Shard(dimension), placements.Partial()


def by_rows(rows: str, sums: str = "") -> Callable[..., Shardings]:
    """The rule of operators whose rows are independent.

    Args:
        rows: names of the tensors that have these rows. The last dimension of the first one is the row.
        sums: names of the outputs that are sums over all rows.
    """
    first = rows.split()[0]

    def rule(placements: ModuleType, a: Any) -> Shardings:
        for own, share in row_placements(placements, getattr(a, first).ndim):
            yield {**dict.fromkeys(rows.split(), own), **dict.fromkeys(sums.split(), share)}

    return rule


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
        for one in rule(placements, *arguments):
            outputs, tensors = _in_order(one, operator._schema, arguments, placements.Replicate())
            rest = iter(tensors)
            found.append((list(outputs), [next(rest) if kind else None for kind in kinds]))
        return found

    register_sharding(operator)(complete)
    remembered[operator] = RuntimeSchemaInfo(kinds.index(False) if False in kinds else len(kinds))


def _in_order(one: Sharding, schema: Any, arguments: Sequence[Any], whole: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    """Placements of outputs and tensors, of those that go by name."""
    if not isinstance(one, Mapping):
        return one
    given = dict(zip((a.name for a in schema.arguments), arguments, strict=False))
    results = [result.name or "y" for result in schema.returns]

    def is_empty(name: str) -> bool:
        """Whether a gradient is not needed, or of what is absent, which the first one never is."""
        absent = name != results[0] and name.startswith("d") and name[1:] in given and given[name[1:]] is None
        return absent or not given.get(f"need_{name}", True)

    # What comes back empty is the same everywhere.
    outputs = [whole if is_empty(name) else one.get(name, whole) for name in results]
    tensors = [a.name for a in schema.arguments if "Tensor" in str(a.type)]
    return outputs, [None if given.get(name) is None else one.get(name, whole) for name in tensors]
