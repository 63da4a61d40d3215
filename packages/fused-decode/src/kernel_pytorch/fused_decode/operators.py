"""The operators of level "triton", each with the arguments of the function of its name. None has a gradient."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor

from ._core.operator import declare
from ._core.sharding import Shardings, row_placements

LAUNCHERS = f"{__package__}.launchers"
TENSORS = ("x", "weight", "norm_weight", "bias", "norm_bias", "residual")
OF_ROWS, OF_OUTPUTS = ("x", "residual"), ("weight", "bias")


def fake_product(a: Any) -> Tensor:
    """What it allocates."""
    return a.x.new_empty((*a.x.shape[:-1], a.weight.shape[0]))


def fake_gated(a: Any) -> Tensor:
    """What it allocates."""
    return a.x.new_empty((*a.x.shape[:-1], a.weight.shape[0] // 2))


def fake_attention(a: Any) -> Tensor:
    """What it allocates."""
    return a.qkv.new_empty((a.qkv.shape[0], a.num_heads * a.k_cache.shape[3]))


def product_flops(x: Any, weight: Any, *others: Any, **names: Any) -> int:
    """A product; what is done beside it is nothing to that."""
    return int(2 * torch.Size(x).numel() * weight[0])


def attention_flops(a: Any) -> int:
    """Two products with all slots: how many hold a key is known on the device only."""
    slots = a.k_cache[2] if a.block_table is None else a.block_table[1] * a.k_cache[2]
    return int(4 * a.qkv[0] * a.num_heads * slots * a.k_cache[3])


def _choose(names: Container[str], there: Any, elsewhere: Any) -> Callable[[str], Any]:
    return lambda name: there if name in names else elsewhere


def sharding_rows(placements: Any, a: Any) -> Shardings:
    """Rows are independent."""
    for rows, _ in row_placements(placements, a.x.ndim):
        yield [rows], _placed(a, _choose(OF_ROWS, rows, placements.Replicate()))


def sharding_outputs(placements: Any, a: Any) -> Shardings:
    """Rows are independent, and so are outputs."""
    yield from sharding_rows(placements, a)
    last, first, whole = placements.Shard(a.x.ndim - 1), placements.Shard(0), placements.Replicate()
    yield [last], _placed(a, lambda name: first if name in OF_OUTPUTS else last if name == "residual" else whole)


def _placed(a: Any, place: Callable[[str], Any]) -> list[Any]:
    return [None if getattr(a, name) is None else place(name) for name in a._fields if name in TENSORS]


OF_NORM = "str norm, Tensor? norm_bias, float norm_offset, float eps"

norm_linear = declare(
    f"norm_linear(Tensor x, Tensor weight, Tensor norm_weight, Tensor? bias, {OF_NORM}) -> Tensor y",
    launch=f"{LAUNCHERS}:norm_linear",
    fake=fake_product,
    flops=product_flops,
    sharding=sharding_outputs,
)
norm_gated_linear = declare(
    "norm_gated_linear(Tensor x, Tensor weight, Tensor norm_weight, Tensor? bias, str activation,"
    f" {OF_NORM}) -> Tensor y",
    launch=f"{LAUNCHERS}:norm_gated_linear",
    fake=fake_gated,
    flops=product_flops,
    sharding=sharding_rows,
)
linear_residual = declare(
    "linear_residual(Tensor x, Tensor weight, Tensor residual, Tensor? bias) -> Tensor y",
    launch=f"{LAUNCHERS}:linear_residual",
    fake=fake_product,
    flops=product_flops,
    sharding=sharding_outputs,
)
rotary_cache_attention = declare(
    "rotary_cache_attention(Tensor qkv, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor lengths, Tensor cos, Tensor sin,"
    " SymInt num_heads, float? scale, SymInt? window, float? softcap, Tensor? q_norm, Tensor? k_norm,"
    " float norm_offset, float eps, Tensor? sinks, Tensor? block_table) -> Tensor o",
    launch=f"{LAUNCHERS}:rotary_cache_attention",
    fake=fake_attention,
    flops=attention_flops,
)
