"""FLOPs and bytes of one call of an operator, and the least time that a named GPU needs for them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

VIEWS = {
    "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "transpose", "permute", "t", "expand", "alias", "detach",
    "slice", "select", "split", "split_with_sizes", "chunk", "unbind", "getitem", "as_strided", "lift_fresh", "renewed",
    "parameter", "input", "_reshape_alias", "_local_scalar_dense", "empty", "empty_like", "new_empty", "unfold",
    "view_as_real", "view_as_complex", "diagonal", "scalar_tensor", "empty_strided", "_conj", "real",
}  # fmt: skip
"""Operators that launch nothing."""
ATTENTION = re.compile(r"_scaled_dot_product_\w*attention(_for_cpu)?$")


@dataclass(frozen=True)
class Gpu:
    """What large copies and large bfloat16 products reach on a GPU: not its data sheet."""

    bytes_per_second: float  # of a copy, read and written
    flops_per_second: float  # of a matrix product
    launch_seconds: float = 2.0e-6  # the least time of a kernel
    source: str = "measured"  # where the figures are from


GPUS = {
    "h100": Gpu(3.0e12, 0.78e15),
    "h200": Gpu(4.3e12, 0.79e15),
    "a100": Gpu(1.7e12, 0.26e15, source="estimated from its data sheet"),
}


@dataclass(frozen=True)
class Cost:
    """Cost of a call: floating-point operations, distinct bytes read and written, and whether it launches anything."""

    flops: int = 0
    bytes: int = 0
    launches: bool = False

    def least_seconds(self, gpu: Gpu) -> float:
        """A lower bound: the call takes at least this on the GPU."""
        if not self.launches:
            return 0.0
        return max(self.flops / gpu.flops_per_second, self.bytes / gpu.bytes_per_second, gpu.launch_seconds)

    def limit(self, gpu: Gpu) -> str:
        """What bounds it: "FLOPs", "bytes" or "launch"."""
        bounds = {
            "FLOPs": self.flops / gpu.flops_per_second,
            "bytes": self.bytes / gpu.bytes_per_second,
            "launch": gpu.launch_seconds,
        }
        return max(bounds, key=bounds.__getitem__)


NO_COST = Cost()


def cost_of(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Cost:
    """What one call costs.

    FLOPs come from the formulas of `torch.utils.flop_counter`; those of attention are ours, since PyTorch's refuse
    grouped heads and do not know the operator of the CPU.
    """
    packet = getattr(function, "_overloadpacket", None)
    name = packet.__name__.rstrip("_") if packet is not None else function.__name__
    if name in VIEWS:
        return NO_COST
    return Cost(_flops(name, packet, args, kwargs, out), _bytes((args, kwargs, out)), True)


def _flops(name: str, packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    if ATTENTION.match(name):
        q, k, v = args[:3]
        return int(2 * q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * (q.shape[3] + v.shape[3]))
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=out))
    return 0


def _bytes(values: Any) -> int:
    """Distinct bytes: a broadcast dimension and a tensor that is given twice count once."""
    seen: dict[tuple[int, int], int] = {}
    for t in tree_leaves(values):
        if isinstance(t, Tensor) and t.layout is torch.strided:
            size = t.numel() * t.itemsize
            for length, stride in zip(t.shape, t.stride(), strict=True):
                size //= length if stride == 0 and length else 1
            place = (t.untyped_storage().data_ptr(), t.storage_offset())
            seen[place] = max(size, seen.get(place, 0))
    return sum(seen.values())
