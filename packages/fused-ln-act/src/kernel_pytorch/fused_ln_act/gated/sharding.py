"""Sharding rules of the gated operators, for DTensor.

Nothing crosses an element, so two tensors may be sharded alike over every dimension, the last one too: what a
column-parallel projection leaves behind goes in as it is. A packed input may not be cut across its last dimension,
where gate and up would part. Nothing is sent.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from kernel_pytorch.fused_ln_act.sharding import Rules, Shardings


def rules(tensor: ModuleType) -> Rules:
    """The rule of each operator.

    Args:
        tensor: `torch.distributed.tensor`.
    """

    def choices(gate: Any, up: Any) -> list[Any]:
        dimensions = gate.ndim - 1 if up is None else gate.ndim
        return [tensor.Replicate(), *(tensor.Shard(d) for d in range(dimensions))]

    def gated(gate: Any, up: Any, *scalars: Any) -> Shardings:
        none = [None] * len(scalars)
        return [([p], [p, None if up is None else p, *none]) for p in choices(gate, up)]

    def gated_backward(dy: Any, gate: Any, up: Any, *scalars: Any) -> Shardings:
        none = [None] * len(scalars)
        needed = (scalars[-2], scalars[-1] and up is not None)
        found = []
        for p in choices(gate, up):
            # What is not needed comes back empty, and is the same everywhere.
            outputs = [p if need else tensor.Replicate() for need in needed]
            found.append((outputs, [p, p, None if up is None else p, *none]))
        return found

    return {"gated": (2, gated), "gated_backward": (3, gated_backward)}
