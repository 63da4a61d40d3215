"""Sharding rules of the operators, for DTensor: rows are independent, so they may lie on many devices.

Importing `torch.distributed.tensor` takes half a second, which importing this package must not; so the rules are
registered when somebody else imports it, before there is a DTensor.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import torch

from .after_import import after_import

Shardings = Iterator[tuple[Sequence[Any], Sequence[Any]]]
"""Acceptable placements of the outputs, then of the tensors among the arguments, None for one that is absent."""

Rule = Callable[..., Shardings]
"""`rule(placements, *arguments)`: `placements` is the module `torch.distributed.tensor`."""

_rules: dict[str, Rule] = {}


def add_rule(name: str, rule: Rule) -> None:
    """Keep the rule of an operator until there are DTensors; one without takes replicated tensors alone."""
    _rules[name] = rule


def register_when_distributed() -> None:
    """Register all rules now if DTensor is imported already, else as soon as it is."""
    after_import("torch.distributed.tensor", _register)


def row_placements(placements: ModuleType, dimensions: int) -> Iterator[tuple[Any, Any]]:
    """Where the rows of a tensor may lie, and what a sum over all rows is then.

    Args:
        placements: `torch.distributed.tensor`.
        dimensions: of the tensor; the last one is the row, which is whole.
    """
    yield placements.Replicate(), placements.Replicate()
    for dimension in range(dimensions - 1):
        yield placements.Shard(dimension), placements.Partial()


def _register(placements: ModuleType) -> None:
    """Register the rules; a torch that has no place for them is told of in a warning.

    DTensor remembers its decisions by placements, shapes and dtypes, and `register_sharding` adds no more than integers
    to that key. Some scalars decide about a dtype or a shape, so all of them are added.
    """
    try:
        from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
        from torch.distributed.tensor.experimental import register_sharding

        remembered = placements.DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    except (ImportError, AttributeError) as error:
        warnings.warn(
            f"kernel_pytorch.cuda_ops will not accept DTensors, torch {torch.__version__} registers sharding rules in "
            f"another way ({error})",
            stacklevel=2,
        )
        return
    for name, rule in _rules.items():
        operator = getattr(torch.ops.kernel_pytorch_cuda, name).default
        register_sharding(operator)(_with_scalars(rule, placements))
        remembered[operator] = RuntimeSchemaInfo(_first_scalar(operator))


def _with_scalars(rule: Rule, placements: ModuleType) -> Callable[..., list[tuple[list[Any], list[Any]]]]:
    """The rule as DTensor calls it: with None for every argument that is no tensor."""

    def complete(*arguments: Any) -> list[tuple[list[Any], list[Any]]]:
        found = []
        for outputs, tensors in rule(placements, *arguments):
            found.append((list(outputs), [*tensors, *[None] * (len(arguments) - len(tensors))]))
        return found

    return complete


def _first_scalar(operator: Any) -> int:
    """Position of the first argument that is no tensor."""
    types = [str(argument.type) for argument in operator._schema.arguments]
    return next((i for i, kind in enumerate(types) if "Tensor" not in kind), len(types))
