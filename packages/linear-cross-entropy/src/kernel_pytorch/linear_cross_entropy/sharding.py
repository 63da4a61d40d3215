"""Sharding rules of the operators, for DTensor: data and sequence parallelism.

Tokens are independent: hidden states, logits and targets may be sharded over every dimension of tokens, with replicated
parameters, and nothing is sent. Losses, and what is kept for the backward, are sharded like the tokens, and each rank
holds its own tokens' part of the gradients of weight and bias. A weight that is sharded over the vocabulary, or over
the hidden dimension, is gathered first, by DTensor, and so are logits sharded over the vocabulary: the sum of
exponentials would have to be sent between ranks, which these operators do not do.

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

Shardings = list[tuple[list[Any], list[Any]]]
"""Acceptable placements of the outputs, then of all arguments; None for what is no tensor."""
Rules = dict[str, tuple[int, Callable[..., Shardings]]]
"""By operator: the position of its first argument that is no tensor, and its rule."""


def register_when_distributed() -> None:
    """Register the rules now if DTensor is imported already, else as soon as it is."""
    after_import("torch.distributed.tensor", register)


def register(tensor: ModuleType) -> None:
    """Register the rules with `torch.distributed.tensor`; a torch that has no place for them is told of in a warning.

    DTensor remembers its decisions by placements, shapes and dtypes, and `register_sharding` adds no more than integers
    to that key. Here scalars decide about placements and shapes, so all of them must be added.
    """
    try:
        from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
        from torch.distributed.tensor.experimental import register_sharding

        remembered = tensor.DTensor._op_dispatcher.sharding_propagator.op_to_schema_info
    except (ImportError, AttributeError) as error:
        warnings.warn(
            "kernel_pytorch.linear_cross_entropy: levels 'native' and 'triton' will not accept DTensors, "
            f"torch {torch.__version__} registers sharding rules in another way ({error})",
            stacklevel=2,
        )
        return
    for name, (first_scalar, rule) in rules(tensor).items():
        operator = getattr(torch.ops.kernel_pytorch, name).default
        register_sharding(operator)(rule)
        remembered[operator] = RuntimeSchemaInfo(first_scalar)


def rules(tensor: ModuleType) -> Rules:
    """The rule of each operator.

    Args:
        tensor: `torch.distributed.tensor`.
    """
    replicate, partial, shard = tensor.Replicate(), tensor.Partial(), tensor.Shard

    def of_tokens(dimensions: int) -> list[tuple[Any, Any]]:
        """Placements of what has so many dimensions of tokens, and of a sum over them."""
        return [(replicate, replicate), *((shard(dimension), partial) for dimension in range(dimensions))]

    def given(tensor: Any, placement: Any) -> Any:
        return None if tensor is None else placement

    def linear_cross_entropy(hidden: Any, weight: Any, target: Any, bias: Any, *scalars: Any) -> Shardings:
        none = [None] * len(scalars)
        return [
            ([tokens] * 2, [tokens, replicate, tokens, given(bias, replicate), *none])
            for tokens, _ in of_tokens(hidden.ndim - 1)
        ]

    def linear_cross_entropy_backward(
        dloss: Any, normalizer: Any, hidden: Any, weight: Any, target: Any, bias: Any, *scalars: Any
    ) -> Shardings:
        need_dhidden, need_dweight, need_dbias = scalars[-3:]
        found = []
        for tokens, total in of_tokens(hidden.ndim - 1):
            # What is not needed comes back empty, and is the same everywhere.
            outputs = [
                tokens if need_dhidden else replicate,
                total if need_dweight else replicate,
                total if need_dbias and bias is not None else replicate,
            ]
            inputs = [tokens, tokens, tokens, replicate, tokens, given(bias, replicate), *[None] * len(scalars)]
            found.append((outputs, inputs))
        return found

    def cross_entropy(logits: Any, target: Any, *scalars: Any) -> Shardings:
        none = [None] * len(scalars)
        return [([tokens] * 2, [tokens, tokens, *none]) for tokens, _ in of_tokens(logits.ndim - 1)]

    def cross_entropy_backward(dloss: Any, normalizer: Any, logits: Any, target: Any, *scalars: Any) -> Shardings:
        none = [None] * len(scalars)
        return [([tokens], [tokens] * 4 + none) for tokens, _ in of_tokens(logits.ndim - 1)]

    def check_target(target: Any, words: int, ignore_index: int) -> Shardings:
        return [([tokens], [tokens, None, None]) for tokens, _ in of_tokens(target.ndim)]

    return {
        "linear_cross_entropy": (4, linear_cross_entropy),
        "linear_cross_entropy_backward": (6, linear_cross_entropy_backward),
        "cross_entropy": (2, cross_entropy),
        "cross_entropy_backward": (4, cross_entropy_backward),
        "check_target": (1, check_target),
    }
