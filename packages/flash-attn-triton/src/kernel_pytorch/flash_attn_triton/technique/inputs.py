"""What the cases of attention with gradients are given, and what they cost."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from kernel_pytorch.harness.implementation import imported
from kernel_pytorch.harness.technique import Case, Cost, Direction, Given
from kernel_pytorch.harness.tensors import as_tuple

HEADS = {"q": 1, "k": 1, "v": 1, "alibi_slopes": -1, "sinks": -1}
"""Dimension of the heads, by argument."""


def by_group(target: str) -> Callable[..., Any]:
    """Compute a definition for one head of k and v after the other; the backward computes the scores again.

    Scores of all heads of a long sequence are too large in float64, and a graph holds them several times.
    """

    def attend(**arguments: Any) -> Any:
        definition, groups = imported(target), arguments["k"].shape[1]
        if arguments.get("dropout_p"):  # its mask is a function of the head's index
            return definition(**arguments)
        split = {n: arguments[n].chunk(groups, at) for n, at in HEADS.items() if arguments.get(n) is not None}
        parts = [{name: each[group] for name, each in split.items()} for group in range(groups)]
        found = [as_tuple(checkpoint(definition, use_reentrant=False, **{**arguments, **part})) for part in parts]
        joined = tuple(torch.cat(heads, 1) for heads in zip(*found, strict=True))
        return joined if len(joined) > 1 else joined[0]

    return attend


def _kv_shape(case: Case) -> tuple[int, ...]:
    batch, heads, queries, depth = case.shape
    return batch, case.sizes.get("kv_heads", heads), case.sizes.get("keys", queries), depth


def _qkv(case: Case, generator: torch.Generator) -> tuple[Tensor, ...]:
    shapes = case.shape, _kv_shape(case), _kv_shape(case)
    return tuple(torch.randn(shape, generator=generator, device=generator.device).to(case.dtype) for shape in shapes)


def flash_attention_inputs(case: Case, generator: torch.Generator) -> Given:
    """Give q `(B, H, Sq, D)`, k and v `(B, Hkv, Sk, D)`; scale, causal and every feature that the case names."""
    sizes, heads = case.sizes, case.shape[1]
    scale = sizes.get("gain", 1.0) * case.shape[-1] ** -0.5
    keywords: dict[str, Any] = {"scale": scale, "causal": sizes.get("causal", False)}
    qkv = _qkv(case, generator)
    for name in ("window", "softcap"):
        if name in sizes:
            keywords[name] = sizes[name]
    if sizes.get("alibi"):
        keywords["alibi_slopes"] = torch.tensor([2.0 ** -(8.0 * (h + 1) / heads) for h in range(heads)]).to(
            qkv[0].device
        )
    if sizes.get("sinks"):
        keywords["sinks"] = torch.randn(heads, generator=generator, device=generator.device).to(case.dtype)
    if sizes.get("dropout"):
        seed = torch.tensor(2**40 + 7, device=generator.device)
        keywords |= {"dropout_p": sizes["dropout"], "seed": seed}
    return qkv, keywords


def flash_attention_masked_inputs(case: Case, generator: torch.Generator) -> Given:
    """Give q `(B, H, Sq, D)`, k and v `(B, Hkv, Sk, D)`, mask that broadcasts to `(B, H, Sq, Sk)`; causal."""
    qkv, shape = _qkv(case, generator), case.sizes["mask"]
    mask = torch.randn(shape, generator=generator, device=generator.device)
    mask = mask > -0.5 if case.sizes.get("boolean") else mask.to(case.dtype)
    return (*qkv, mask), {"causal": case.sizes.get("causal", False)}


def _lengths(case: Case) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Queries and keys of each sequence. `sequences=(count, least, most)` draws both, short ones more often."""
    if "sequences" not in case.sizes:
        return case.sizes["queries"], case.sizes["lengths"]
    count, least, most = case.sizes["sequences"]
    draw = random.Random(0).random  # noqa: S311 - lengths of a benchmark
    drawn = tuple(round(least * (most / least) ** draw()) for _ in range(count))
    return drawn, drawn


def flash_attention_varlen_inputs(case: Case, generator: torch.Generator) -> Given:
    """Give q `(S, H, D)`, k and v `(T, Hkv, D)`, cu_seqlens_q and cu_seqlens_k `(B + 1,)`, longest lengths; causal."""
    heads, depth = case.shape
    device, (of_q, of_k) = generator.device, _lengths(case)
    shapes = (sum(of_q), heads, depth), *[(sum(of_k), case.sizes.get("kv_heads", heads), depth)] * 2
    qkv = (torch.randn(shape, generator=generator, device=device).to(case.dtype) for shape in shapes)
    starts = (torch.tensor([0, *n]).cumsum(0).to(torch.int32).to(device) for n in (of_q, of_k))
    return (*qkv, *starts, max(of_q), max(of_k)), {"causal": case.sizes.get("causal", False)}


def flash_attention_varlen_cost(case: Case, direction: Direction) -> Cost:
    """As of `flash_attention`, for each sequence."""
    heads, depth = case.shape
    sizes = {name: case.sizes[name] for name in ("causal", "kv_heads") if name in case.sizes}
    costs = [
        flash_attention_cost(
            Case(case.name, case.dtype, {"shape": (1, heads, q, depth), "keys": k, **sizes}), direction
        )
        for q, k in zip(*_lengths(case), strict=True)
    ]
    launches = 4 if direction is Direction.FORWARD else None  # three fill what tokens in no sequence leave
    return Cost(sum(c.bytes for c in costs), sum(c.flops for c in costs), launches=launches)


def _pairs(case: Case) -> int:
    """Pairs of a query and a key that it sees, in one head."""
    queries, keys = case.shape[-2], _kv_shape(case)[-2]
    left, right = case.sizes.get("window", (-1, -1))
    right = 0 if case.sizes.get("causal", False) else right
    if left < 0 and right < 0:
        return queries * keys
    ends = [i + keys - queries for i in range(queries)]
    first = [0 if left < 0 else max(0, at - left) for at in ends]
    last = [keys - 1 if right < 0 else min(keys - 1, at + right) for at in ends]
    return sum(max(0, b - a + 1) for a, b in zip(first, last, strict=True))


def flash_attention_cost(case: Case, direction: Direction) -> Cost:
    """Forward: two products; read q, k, v, write o. Backward: five; read do besides, write dq, dk, dv instead.

    Levels may take more launches backward than the three of "triton": that of "cuda" is computed by PyTorch.
    """
    batch, heads, _, depth = case.shape
    queries, keys = torch.Size(case.shape).numel(), torch.Size(_kv_shape(case)).numel()
    product, size = 2 * batch * heads * depth * _pairs(case), case.dtype.itemsize
    forward = Cost((2 * queries + 2 * keys) * size, 2 * product, launches=1)
    backward = Cost((3 * queries + 4 * keys) * size, 5 * product)
    return direction.cost(forward, backward)


def flash_attention_real(activations: Tensor, dtype: torch.dtype) -> Given:
    """Normalised hidden states as heads of 32, the model's own head size: queries, and of other heads keys and values.

    Without a norm, which every model has in front, one channel alone would make scores of hundreds.
    """
    x = torch.nn.functional.layer_norm(activations, activations.shape[-1:])
    x = x.to(dtype).unflatten(-1, (-1, 32)).transpose(0, 1).unsqueeze(0).contiguous()
    return (x, x.roll(1, 1), x.roll(2, 1)), {"scale": 32**-0.5}
