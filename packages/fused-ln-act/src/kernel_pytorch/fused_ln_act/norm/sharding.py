"""Sharding rules of the norm's operators.

Rows are independent, so x may be sharded over every dimension but the last, the parameters are replicated, and nothing
is sent: y, h and the statistics are sharded like x, and each rank holds its own rows' part of the parameters'
gradients. With dropout the mask goes by the place of an element in the whole tensor, which a rank that holds a part
does not know: then everything is replicated. Anything else that comes in (a sharded last dimension, a pending sum) is
redistributed first, by DTensor, to what costs least.
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
        """Placements of x, the statistics and the parameters' gradients that belong together."""
        found = [(replicate, replicate, replicate)]
        if dropout_p == 0.0:
            # The statistics have a dimension more, in front: mean and rstd.
            found += [(shard(d), shard(d + 1), partial) for d in range(x.ndim - 1)]
        return found

    def norm_act(
        x: Any,
        residual: Any,
        weight: Any,
        bias: Any,
        seed: Any,
        eps: float,
        dropout_p: float,
        norm: str,
        activation: str,
    ) -> Shardings:
        found = []
        for rows, statistics, _ in choices(x, dropout_p):
            outputs = [rows, replicate if residual is None else rows, statistics]
            whole = [None if t is None else replicate for t in (weight, bias, seed)]
            found.append((outputs, [rows, None if residual is None else rows, *whole, None, None, None, None]))
        return found

    def norm_act_backward(
        dy: Any, dh: Any, h: Any, weight: Any, bias: Any, seed: Any, statistics: Any,
        eps: float, dropout_p: float, norm: str, activation: str, has_residual: bool,
        need_dx: bool, need_dresidual: bool, need_dweight: bool, need_dbias: bool,
    ) -> Shardings:  # fmt: skip
        found = []
        for rows, of_rows, gradient in choices(h, dropout_p):
            # What is not needed comes back empty, and is the same everywhere.
            outputs = [
                rows if need_dx else replicate,
                rows if need_dresidual else replicate,
                gradient if need_dweight and weight is not None else replicate,
                gradient if need_dbias and bias is not None else replicate,
            ]
            whole = [None if t is None else replicate for t in (weight, bias, seed)]
            inputs = [rows, None if dh is None else rows, rows, *whole, of_rows, *[None] * 9]
            found.append((outputs, inputs))
        return found

    return {"norm_act": (5, norm_act), "norm_act_backward": (7, norm_act_backward)}
