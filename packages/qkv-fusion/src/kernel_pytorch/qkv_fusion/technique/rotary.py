"""Rotary position embedding of queries and keys: inputs, cost and grids."""

from __future__ import annotations

import torch
from torch import Tensor

from kernel_pytorch.harness.contracts import KernelContract
from kernel_pytorch.harness.technique import Case, Cost, Direction, Given, Operation, grid, point

from .common import (
    BENCH,
    BOTH,
    CUDA,
    LOW,
    SOME,
    data,
    keys_shape,
    position_ids,
    public,
    real_heads,
    rotated,
    table_bytes,
    tables,
)


def inputs(case: Case, generator: torch.Generator) -> Given:
    """Give q `(..., S, H, D)`, k `(..., S, K, D)`, cos and sin `(S, R/2)`, `(..., S, R/2)` or `(P, R/2)`; positions
    `(..., S)` for the last.
    """
    tokens, columns = case.shape[:-2], case.shape[-1]
    q, k = data(case.shape, case, generator), data(keys_shape(case), case, generator)
    keywords = {name: case.sizes.get(name, False) for name in ("interleaved", "inverse")}
    angles = tables(case, tokens, rotated(case, columns), q.device)
    return (q, k, *angles), {**keywords, **position_ids(case, tokens, generator)}


def cost(case: Case, direction: Direction) -> Cost:
    """Forward: read q, k and the tables, write both. Backward: the same of their gradients. Each is one launch."""
    elements = torch.Size(case.shape).numel() + torch.Size(keys_shape(case)).numel()
    passes = 2 if direction is Direction.BOTH else 1
    one = 2 * elements * case.dtype.itemsize + table_bytes(case, case.shape[:-2], rotated(case, case.shape[-1]))
    return Cost(passes * one, passes * 3 * elements, launches=passes)


def real(activations: Tensor, dtype: torch.dtype) -> Given:
    """Hidden states as heads of queries, their first ones as those of keys."""
    x, cos, sin = real_heads(activations, dtype)
    return (x, x[:, :1], cos, sin), {}


tests = grid(
    point(
        "typical",
        shape=(3, 13, 4, 64),
        k_heads=2,
        core=True,
        dtypes=LOW,
        reason="whole vectors, one table for the batch",
    ),
    point(
        "interleaved",
        shape=(2, 13, 3, 64),
        k_heads=3,
        interleaved=True,
        core=True,
        dtypes=LOW,
        reason="neighbours are pairs",
    ),
    point("partial", shape=(7, 3, 80), k_heads=1, rotated=32, reason="48 columns pass"),
    point("partial, interleaved", shape=(7, 3, 80), k_heads=3, rotated=64, interleaved=True, reason="GPT-J's"),
    point("inverse", shape=(5, 3, 24), k_heads=2, inverse=True, reason="rotated back"),
    point("positions", shape=(3, 5, 2, 32), k_heads=1, positions=19, reason="every token at a row of the tables"),
    point(
        "positions, interleaved",
        shape=(4, 2, 24),
        k_heads=2,
        positions=7,
        rotated=16,
        interleaved=True,
        reason="gathered, and columns that pass",
    ),
    point("one pair", shape=(5, 2, 2), k_heads=1, reason="the shortest head"),
    point("odd head", shape=(5, 3, 7), k_heads=2, rotated=6, reason="the last column passes; nothing is aligned"),
    point("odd half", shape=(3, 2, 70), k_heads=5, reason="halves of 35 columns end within a vector; more keys"),
    point("odd half, interleaved", shape=(3, 2, 70), k_heads=1, interleaved=True, reason="rows end within a vector"),
    point("batched tables", shape=(3, 5, 2, 32), k_heads=1, batched=True, reason="sequences at positions of their own"),
    point(
        "tables in 16 bits", shape=(4, 5, 2, 32), k_heads=2, table_dtype=torch.bfloat16, reason="as models keep them"
    ),
    point("far positions", shape=(9, 2, 64), k_heads=2, start=131064, reason="past a context of 131072"),
    point("one token", shape=(1, 32, 128), k_heads=8, start=4095, reason="decoding"),
    point("no tokens", shape=(2, 0, 2, 16), k_heads=1, reason="nothing to do"),
    point(
        "five dimensions", shape=(2, 2, 3, 2, 24), k_heads=2, batched=True, reason="leading dimensions are collapsed"
    ),
    point("long head", shape=(3, 1, 1030), k_heads=1, reason="more than a tile of rows, and unaligned"),
    dtypes=SOME,
)

bench = grid(
    point("Llama 3.1 8B, decode", shape=(1, 1, 32, 128), k_heads=8, start=4095),
    point("Llama 3.1 8B, prefill 512", shape=(1, 512, 32, 128), k_heads=8, dtypes=BOTH),
    point("GPT-J 6B, prefill 512", shape=(1, 512, 16, 256), k_heads=16, rotated=64, interleaved=True),
    point("GPT-NeoX 20B, prefill 512", shape=(1, 512, 64, 96), k_heads=64, rotated=24),
    point("Gemma 2 9B, prefill 1024", shape=(1, 1024, 16, 256), k_heads=8),
    point("Llama 3.1 8B, decode 64", shape=(64, 1, 32, 128), k_heads=8, batched=True, devices=CUDA),
    point("Llama 3.1 8B, prefill 16384", shape=(1, 16384, 32, 128), k_heads=8, devices=CUDA, dtypes=BOTH),
    point(
        "GPT-J 6B, prefill 2048, batch 8",
        shape=(8, 2048, 16, 256),
        k_heads=16,
        rotated=64,
        interleaved=True,
        devices=CUDA,
    ),
    dtypes=BENCH,
)

OPERATIONS = [
    Operation(
        name="rotary_embedding",
        **public("rotary_embedding"),
        inputs=inputs,
        cost=cost,
        test_grid=tests,
        bench_grid=bench,
        roles={"data": ("q", "k"), "constant": ("cos", "sin")},
        real_input=real,
    )
]

# Heads are read in 16 bytes where they can be; tables in fewer, where a thread has no four pairs that lie side by side.
CONTRACTS = {"_rotate_kernel": KernelContract(max_registers=128, min_store_bits=128)}
