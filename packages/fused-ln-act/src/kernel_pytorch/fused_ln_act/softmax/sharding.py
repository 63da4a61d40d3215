"""Sharding rules of the softmax operators.

Rows are independent, so x may be sharded over every dimension but the last, and nothing is sent. A mask that has this
dimension is sharded with it; one that is broadcast over it is replicated, and each rank holds its own rows' part of its
gradient.
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

    def choices(x: Any, mask: Any) -> list[tuple[Any, Any, Any]]:
        """Placements of x, the mask and its gradient that belong together."""
        found = [(replicate, replicate, replicate)]
        for dimension in range(x.ndim - 1):
            of_mask = -1 if mask is None else dimension - (x.ndim - mask.ndim)
            has_it = of_mask >= 0 and mask.shape[of_mask] == x.shape[dimension] != 1
            found.append((shard(dimension), *((shard(of_mask),) * 2 if has_it else (replicate, partial))))
        return found

    def softmax(x: Any, mask: Any, scale: float) -> Shardings:
        return [([rows], [rows, None if mask is None else of_mask, None]) for rows, of_mask, _ in choices(x, mask)]

    def softmax_backward(dy: Any, y: Any, mask: Any, scale: float, need_dx: bool, need_dmask: bool) -> Shardings:
        found = []
        for rows, of_mask, gradient in choices(y, mask):
            # What is not needed comes back empty, and is the same everywhere.
            outputs = [rows if need_dx else replicate, gradient if need_dmask and mask is not None else replicate]
            found.append((outputs, [rows, rows, None if mask is None else of_mask, None, None, None]))
        return found

    return {"softmax": (2, softmax), "softmax_backward": (3, softmax_backward)}
