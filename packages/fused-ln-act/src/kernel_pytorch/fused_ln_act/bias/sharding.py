"""Sharding rules of the bias operators.

Nothing crosses an element, so x and residual may be sharded alike over every dimension: over the last one too, then
with the bias, as a column-parallel projection leaves them behind. Nothing is sent; of a bias that every rank has, each
rank holds its own rows' part of the gradient. With dropout the mask goes by the place of an element in the whole
tensor, which a rank that holds a part does not know: then everything is replicated.
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
    replicate, partial, shard = tensor.Replicate(), tensor.Partial(), tensor.Shard

    def choices(x: Any, dropout_p: float) -> list[tuple[Any, Any, Any]]:
        """Placements of x, the bias and its gradient that belong together."""
        found = [(replicate, replicate, replicate)]
        if dropout_p == 0.0:
            found += [(shard(d), replicate, partial) for d in range(x.ndim - 1)]
            found += [(shard(x.ndim - 1), shard(0), shard(0))]
        return found

    def bias_act(x: Any, bias: Any, residual: Any, seed: Any, dropout_p: float, activation: str) -> Shardings:
        found = []
        for rows, of_bias, _ in choices(x, dropout_p):
            inputs = [rows, None if bias is None else of_bias, None if residual is None else rows]
            found.append(([rows], [*inputs, None if seed is None else replicate, None, None]))
        return found

    def bias_act_backward(
        dy: Any, x: Any, bias: Any, seed: Any, dropout_p: float, activation: str, need_dx: bool, need_dbias: bool
    ) -> Shardings:
        found = []
        for rows, of_bias, gradient in choices(dy, dropout_p):
            # What is not needed comes back empty, and is the same everywhere.
            outputs = [rows if need_dx else replicate, gradient if need_dbias and bias is not None else replicate]
            inputs = [rows, None if x is None else rows, None if bias is None else of_bias]
            found.append((outputs, [*inputs, None if seed is None else replicate, None, None, None, None]))
        return found

    return {"bias_act": (4, bias_act), "bias_act_backward": (4, bias_act_backward)}
