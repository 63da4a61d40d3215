"""Sharding rules of the operators, for DTensor: data, sequence and tensor parallelism.

Each group of operations states its rules; here they are registered. Importing `torch.distributed.tensor` takes half a
second, which importing this package must not; so that happens when somebody else imports it, before there is a DTensor.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from .after_import import after_import

Shardings = list[tuple[list[Any], list[Any]]]
"""Acceptable placements of the outputs, then of all arguments; None for what is no tensor."""
Rules = dict[str, tuple[int, Callable[..., Shardings]]]
"""By operator: the position of its first argument that is no tensor, and its rule."""


def register_when_distributed(rules: Callable[[ModuleType], Rules]) -> None:
    """Register the rules of a group now if DTensor is imported already, else as soon as it is.

    Args:
        rules: makes them of `torch.distributed.tensor`.
    """
    after_import("torch.distributed.tensor", lambda tensor: register(tensor, rules(tensor)))


def register(tensor: ModuleType, rules: Rules) -> None:
    """Register rules with `torch.distributed.tensor`; a torch that has no place for them is told of in a warning.

    DTensor remembers its decisions by placements, shapes and dtypes, and `register_sharding` adds no more than integers
    to that key. Here scalars decide about placements and shapes, so all of them must be added.
    """
    try:
        from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
        from torch.distributed.tensor.experimental import register_sharding

        remembered = tensor.DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    except (ImportError, AttributeError) as error:
        warnings.warn(
            "kernel_pytorch.fused_ln_act: level 'triton' will not accept DTensors, "
            f"torch {torch.__version__} registers sharding rules in another way ({error})",
            stacklevel=2,
        )
        return
    for name, (first_scalar, rule) in rules.items():
        operator = getattr(torch.ops.kernel_pytorch, name).default
        register_sharding(operator)(rule)
        remembered[operator] = RuntimeSchemaInfo(first_scalar)
