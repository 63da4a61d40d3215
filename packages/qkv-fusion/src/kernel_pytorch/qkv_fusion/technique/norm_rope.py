"""Norm of every head and then rotary position embedding: inputs, cost and grids."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernel_pytorch.harness.contracts import KernelContract
from kernel_pytorch.harness.technique import Case, Cost, Direction, Given, Operation, grid, point

from .common import (
    BENCH,
    BOTH,
    CUDA,
    EPS,
    LOW,
    SOME,
    data,
    keys_shape,
    norm_weights,
    position_ids,
    public,
    real_heads,
    rotated,
    table_bytes,
    tables,
)


def inputs(case: Case, generator: torch.Generator) -> Given:
    """Give q `(..., S, H, D)`, k `(..., S, K, D)`, weights `(D,)`, cos and sin `(S, R/2)`, `(..., S, R/2)` or
    `(P, R/2)`; eps, interleaved, offset; positions `(..., S)` for the last.
    """
    tokens, columns = case.shape[:-2], case.shape[-1]
    q, k = data(case.shape, case, generator), data(keys_shape(case), case, generator)
    weights = norm_weights(case, columns, generator)
    angles = tables(case, tokens, rotated(case, columns), q.device)
    return (q, k, *weights, *angles), {**keywords(case), **position_ids(case, tokens, generator)}


def keywords(case: Case) -> dict[str, Any]:
    """What is no tensor."""
    sizes = case.sizes
    return {"eps": EPS, "interleaved": sizes.get("interleaved", False), "offset": sizes.get("offset", 0.0)}


def cost(case: Case, direction: Direction) -> Cost:
    """Forward: read q, k, weights and tables, write both. Backward: read dy, q and k, write dq, dk and the weights'."""
    columns = case.shape[-1]
    elements = torch.Size(case.shape).numel() + torch.Size(keys_shape(case)).numel()
    size, angles = case.dtype.itemsize, table_bytes(case, case.shape[:-2], rotated(case, columns))
    weights = 2 * columns * case.sizes.get("weight_dtype", case.dtype).itemsize
    forward = Cost(2 * elements * size + weights + angles, 7 * elements, launches=1)
    # The second launch adds the shares of the weights' gradients.
    backward = Cost(3 * elements * size + 2 * weights + angles, 14 * elements, launches=2)
    return direction.cost(forward, backward)


def real(activations: Tensor, dtype: torch.dtype) -> Given:
    """Hidden states as heads of queries, their first heads as those of keys."""
    x, cos, sin = real_heads(activations, dtype)
    weight = (1.0 + 0.25 * torch.randn(32, generator=torch.Generator().manual_seed(0))).to(x.device, dtype)
    return (x, x[:, :1], weight, weight.flip(0), cos, sin), {"eps": EPS}


tests = grid(
    point("typical", shape=(3, 5, 4, 64), k_heads=2, core=True, dtypes=LOW, reason="grouped queries, whole vectors"),
    point(
        "interleaved",
        shape=(2, 7, 3, 64),
        k_heads=1,
        interleaved=True,
        core=True,
        dtypes=LOW,
        reason="neighbours are pairs",
    ),
    point("Gemma", shape=(9, 4, 256), k_heads=1, offset=1.0, reason="weights around zero, a long head"),
    point("partial", shape=(7, 3, 128), k_heads=3, rotated=32, reason="Qwen3-Next's: a quarter is rotated, all normed"),
    point("positions", shape=(3, 5, 2, 32), k_heads=1, positions=19, reason="every token at a row of the tables"),
    point("one pair", shape=(5, 2, 2), k_heads=1, reason="mean of two numbers"),
    point("odd head", shape=(5, 3, 7), k_heads=2, rotated=6, reason="the last column passes; nothing is aligned"),
    point("odd half", shape=(3, 2, 70), k_heads=2, reason="halves of 35 columns end within a vector"),
    point("three quarters", shape=(11, 2, 96), k_heads=5, reason="vectors no power of two; more keys than queries"),
    point("batched tables", shape=(3, 5, 2, 32), k_heads=2, batched=True, reason="positions of their own"),
    point("float32 weights", shape=(9, 4, 32), k_heads=2, weight_dtype=torch.float32, reason="master weights"),
    point("tables in 16 bits", shape=(9, 4, 32), k_heads=2, table_dtype=torch.bfloat16, reason="as models keep them"),
    point("many tokens", shape=(1031, 2, 16), k_heads=1, reason="more tokens than shares; a prime number of them"),
    point("one token", shape=(1, 16, 128), k_heads=8, start=4095, reason="decoding"),
    point("no tokens", shape=(0, 2, 16), k_heads=2, reason="nothing to do, weight gradients all zero"),
    point("long head", shape=(3, 1, 1030), k_heads=1, reason="more than a tile of rows, and unaligned"),
    dtypes=SOME,
)

tests_of_layer_norm = grid(
    point("typical", shape=(3, 5, 4, 64), k_heads=2, core=True, dtypes=LOW, reason="grouped queries"),
    point("partial", shape=(7, 3, 24), k_heads=3, rotated=8, interleaved=True, reason="what passes is normed too"),
    point("Gemma", shape=(9, 4, 32), k_heads=1, offset=1.0, reason="weights around zero"),
    point("positions", shape=(3, 5, 2, 32), k_heads=1, positions=19, reason="every token at a row of the tables"),
    point("odd head", shape=(5, 3, 7), k_heads=2, rotated=6, reason="the last column passes; nothing is aligned"),
    point("odd half", shape=(3, 2, 70), k_heads=2, reason="the mean is of 35 columns of a block of 64"),
    point("float32 weights", shape=(9, 4, 32), k_heads=2, weight_dtype=torch.float32, reason="master weights"),
    point("many tokens", shape=(1031, 2, 16), k_heads=1, reason="more tokens than shares; a prime number of them"),
    point("no tokens", shape=(0, 2, 16), k_heads=2, reason="nothing to do, weight gradients all zero"),
    point("long head", shape=(3, 1, 1030), k_heads=1, reason="more than a tile of rows, and unaligned"),
    dtypes=SOME,
)

bench = grid(
    point("Qwen3 0.6B, decode", shape=(1, 1, 16, 128), k_heads=8, start=4095),
    point("Qwen3 0.6B, prefill 512", shape=(1, 512, 16, 128), k_heads=8, dtypes=BOTH),
    point("Qwen3 8B, prefill 512", shape=(1, 512, 32, 128), k_heads=8),
    point("Gemma 3 1B, prefill 1024", shape=(1, 1024, 4, 256), k_heads=1, offset=1.0),
    point("Qwen3 8B, decode 64", shape=(64, 1, 32, 128), k_heads=8, batched=True, devices=CUDA),
    point("Qwen3 8B, prefill 16384", shape=(1, 16384, 32, 128), k_heads=8, devices=CUDA, dtypes=BOTH),
    point("Gemma 3 27B, prefill 8192", shape=(1, 8192, 32, 128), k_heads=16, offset=1.0, devices=CUDA),
    dtypes=BENCH,
)

bench_of_layer_norm = grid(
    point("ViT-22B, batch 1", shape=(1, 256, 48, 128), k_heads=48),
    point("ViT-22B, batch 32", shape=(32, 256, 48, 128), k_heads=48, devices=CUDA, dtypes=BOTH),
    dtypes=BENCH,
)

HEAD_BY_HEAD = (4.0, "TorchInductor adds the heads of dweight one by one on the CPU, eager in a tree")
OTHER_ORDER = (4.0, "dweight adds tokens and heads in another order: sometimes the definition errs less")
BUDGETS = {"native": OTHER_ORDER, "compile": HEAD_BY_HEAD, "triton": OTHER_ORDER, "cuda": OTHER_ORDER}

OPERATIONS = [
    Operation(
        name="qk_norm_rope",
        **public("qk_norm_rope"),
        budgets=BUDGETS,
        inputs=inputs,
        cost=cost,
        test_grid=tests,
        bench_grid=bench,
        roles={"data": ("q", "k"), "constant": ("cos", "sin")},
        real_input=real,
    ),
    Operation(
        name="qk_layer_norm_rope",
        **public("qk_layer_norm_rope"),
        budgets={level: BUDGETS[level] for level in ("native", "compile", "triton")},
        inputs=inputs,
        cost=cost,
        test_grid=tests_of_layer_norm,
        bench_grid=bench_of_layer_norm,
        roles={"data": ("q", "k"), "constant": ("cos", "sin")},
    ),
]

TOLERATED_SPILL_BYTES = 32  # in bytes
CONTRACTS = {
    "_norm_rope_kernel": KernelContract(max_registers=128, min_load_bits=128, min_store_bits=128),
    # The weights are read once, a number or two at a time. For sm_100 ptxas keeps a value or two on the stack.
    "_backward_kernel": KernelContract(max_spill_bytes=TOLERATED_SPILL_BYTES, min_store_bits=128),
    # It stores the sum over a tile: one row, too short for wide stores.
    "_add_shares_kernel": KernelContract(max_registers=128, min_load_bits=128),
}
