"""Sharding rules of the linear operators, for DTensor.

Rows are independent: x may be sharded over every dimension but the last with replicated weights, and nothing is sent;
each rank holds its own rows' part of the gradient of the bias. A linear layer may be sharded by the rows of its weight
too, with the bias: column parallelism, which shards y over its last dimension. A gated MLP may not, since the rows of
gate and up would part; nor may K be sharded, since the activation needs the whole sum. What comes in otherwise is
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

    def of_rows(x: Any) -> list[tuple[Any, Any]]:
        """Placements of x, and of a sum over its rows, with replicated weights."""
        return [(replicate, replicate), *((shard(d), partial) for d in range(x.ndim - 1))]

    def given(tensor: Any, placement: Any) -> Any:
        return None if tensor is None else placement

    def linear_act(x: Any, weight: Any, bias: Any, activation: str, save_preactivation: bool) -> Shardings:
        columns = shard(x.ndim - 1)
        found = [(rows, rows, replicate) for rows, _ in of_rows(x)]
        found.append((replicate, columns, shard(0)))
        # What is not saved is empty, and the same everywhere.
        return [
            ([y, y if save_preactivation else replicate], [of_x, of_weight, given(bias, of_weight), None, None])
            for of_x, y, of_weight in found
        ]

    def linear_act_backward(
        dy: Any, saved: Any, x: Any, weight: Any, bias: Any, activation: str, need_dz: bool, need_dbias: bool
    ) -> Shardings:
        has_dz, has_dbias = need_dz and activation != "identity", need_dbias and bias is not None
        found = [(rows, rows, replicate, of_sum) for rows, of_sum in of_rows(x)]
        found.append((replicate, shard(x.ndim - 1), shard(0), shard(0)))
        return [
            (
                [of_y if has_dz else replicate, of_dbias if has_dbias else replicate],
                [of_y, given(saved, of_y), of_x, of_weight, given(bias, of_weight), None, None, None],
            )
            for of_x, of_y, of_weight, of_dbias in found
        ]

    def gated_mlp(x: Any, w_gate_up: Any, w_down: Any, activation: str, save_preactivation: bool) -> Shardings:
        return [
            ([rows, rows if save_preactivation else replicate], [rows, replicate, replicate, None, None])
            for rows, _ in of_rows(x)
        ]

    def gated_mlp_backward(
        dh: Any, saved: Any, x: Any, w_gate_up: Any, activation: str, need_h: bool, need_dz: bool
    ) -> Shardings:
        return [
            (
                [rows if need_h else replicate, rows if need_dz else replicate],
                [rows, given(saved, rows), rows, replicate, None, None, None],
            )
            for rows, _ in of_rows(x)
        ]

    return {
        "linear_act": (3, linear_act),
        "linear_act_backward": (5, linear_act_backward),
        "gated_mlp": (3, gated_mlp),
        "gated_mlp_backward": (4, gated_mlp_backward),
    }
