"""Rotary position embedding, alone and behind QK-norm: inputs, cost and grids."""

from __future__ import annotations

import torch
from torch import Tensor

from kernel_pytorch.cuda_ops.technique.common import CUDA, implementations
from kernel_pytorch.harness.technique import Case, Cost, Direction, Given, Operation, grid, point

EPS = 1e-6
THETA = 10000.0


def _tables(case: Case, rotated: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions from `case.start` on; every sequence has its own where the case is `batched`."""
    shape = case.shape[:-2] if case.sizes.get("batched", False) else case.shape[-3:-2]
    tokens = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape) + case.sizes.get("start", 0)
    angles = tokens.unsqueeze(-1) * THETA ** (-torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
    dtype = case.sizes.get("table_dtype", torch.float32)
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def _rotated(case: Case) -> int:
    return case.sizes.get("rotated", case.shape[-1])


def _data(shape: tuple[int, ...], case: Case, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device).to(case.dtype)


def rotary_embedding_inputs(case: Case, generator: torch.Generator) -> Given:
    """Give x `(..., S, H, D)`, cos and sin `(S, R/2)` or `(..., S, R/2)`, interleaved."""
    x = _data(case.shape, case, generator)
    return (x, *_tables(case, _rotated(case), x.device), case.sizes.get("interleaved", False)), {}


def qk_norm_rope_inputs(case: Case, generator: torch.Generator) -> Given:
    """Give q `(..., S, H, D)`, k `(..., S, K, D)`, weights `(D,)`, cos, sin, eps, interleaved, offset."""
    offset = case.sizes.get("offset", 0.0)
    q = _data(case.shape, case, generator)
    k = _data((*case.shape[:-2], case.sizes["k_heads"], case.shape[-1]), case, generator)
    weights = [
        (torch.randn(case.shape[-1:], generator=generator, device=q.device) * 0.25 + (1.0 - offset)).to(
            case.sizes.get("weight_dtype", case.dtype)
        )
        for _ in range(2)
    ]
    tables = _tables(case, _rotated(case), q.device)
    return (q, k, *weights, *tables, EPS, case.sizes.get("interleaved", False), offset), {}


def _table_bytes(case: Case) -> int:
    shape = case.shape[:-2] if case.sizes.get("batched", False) else case.shape[-3:-2]
    return torch.Size(shape).numel() * _rotated(case) * case.sizes.get("table_dtype", torch.float32).itemsize


def rotary_embedding_cost(case: Case, direction: Direction) -> Cost:
    """Forward: read x and the tables, write y. Backward: read dy and the tables, write dx."""
    elements = torch.Size(case.shape).numel()
    passes = 2 if direction is Direction.BOTH else 1
    one = 2 * elements * case.dtype.itemsize + _table_bytes(case)
    return Cost(passes * one, passes * 3 * elements, launches=passes)


def qk_norm_rope_cost(case: Case, direction: Direction) -> Cost:
    """Forward: read q, k, weights and tables, write both. Backward: read dy, q and k, write dq, dk and the weights'."""
    *before, heads, columns = case.shape
    elements = torch.Size(before).numel() * (heads + case.sizes["k_heads"]) * columns
    size, tables = case.dtype.itemsize, _table_bytes(case)
    weights = 2 * columns * case.sizes.get("weight_dtype", case.dtype).itemsize
    forward = Cost(2 * elements * size + weights + tables, 7 * elements, launches=1)
    # The second launch adds the shares of the weights' gradients.
    backward = Cost(3 * elements * size + 2 * weights + tables, 14 * elements, launches=2)
    if direction is Direction.FORWARD:
        return forward
    if direction is Direction.BACKWARD:
        return backward
    return Cost(forward.bytes + backward.bytes, forward.flops + backward.flops, launches=3)


def _real_heads(activations: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states seen as heads of 32, the model's own head size, and the angles of their positions."""
    x = activations.to(dtype).unflatten(-1, (-1, 32))
    case = Case("real", dtype, {"shape": tuple(x.shape)})
    return x, *_tables(case, 32, x.device)


def rotary_embedding_real(activations: Tensor, dtype: torch.dtype) -> Given:
    """Hidden states as heads."""
    return (*_real_heads(activations, dtype), False), {}


def qk_norm_rope_real(activations: Tensor, dtype: torch.dtype) -> Given:
    """Hidden states as heads of queries, their first heads as those of keys."""
    x, cos, sin = _real_heads(activations, dtype)
    weight = (1.0 + 0.25 * torch.randn(32, generator=torch.Generator().manual_seed(0))).to(x.device, dtype)
    return (x, x[:, :1], weight, weight.flip(0), cos, sin, EPS, False, 0.0), {}


LOW = (torch.float32, torch.float16, torch.bfloat16)
FLOAT32 = (torch.float32,)
BFLOAT16 = torch.bfloat16

rotary_embedding_tests = grid(
    point("typical", shape=(2, 13, 4, 64), core=True, reason="halves of whole vectors, one table for the batch"),
    point("interleaved", shape=(2, 13, 3, 64), interleaved=True, core=True, reason="neighbours are pairs"),
    point("partial", shape=(7, 3, 80), rotated=32, reason="48 columns pass"),
    point("partial, interleaved", shape=(7, 3, 80), rotated=64, interleaved=True, reason="GPT-J's"),
    point("one pair", shape=(5, 2, 2), reason="the shortest head"),
    point("odd head", shape=(5, 3, 7), rotated=6, reason="the last column passes; nothing is aligned"),
    point("odd half", shape=(3, 2, 70), reason="halves of 35 columns end within a vector"),
    point("odd half, interleaved", shape=(3, 2, 70), interleaved=True, reason="rows end within a vector"),
    point("batched tables", shape=(3, 5, 2, 32), batched=True, reason="every sequence at positions of its own"),
    point(
        "tables in x's dtype", shape=(4, 5, 2, 32), table_dtype=BFLOAT16, reason="rounded cos and sin, as models keep"
    ),
    point("far positions", shape=(9, 2, 64), start=131064, reason="past a context of 131072"),
    point("one token", shape=(1, 32, 128), start=4095, reason="decoding"),
    point("no tokens", shape=(2, 0, 2, 16), reason="nothing to do"),
    point("five dimensions", shape=(2, 2, 3, 2, 24), batched=True, reason="leading dimensions are collapsed"),
    point("long head", shape=(3, 1, 1030), reason="more than a block's vectors, and unaligned"),
    dtypes=LOW,
)

qk_norm_rope_tests = grid(
    point("typical", shape=(3, 5, 4, 64), k_heads=2, core=True, reason="grouped queries, whole vectors"),
    point("interleaved", shape=(2, 7, 3, 64), k_heads=1, interleaved=True, core=True, reason="neighbours are pairs"),
    point(
        "Gemma", shape=(9, 4, 256), k_heads=1, offset=1.0, reason="weights around zero, the longest head in registers"
    ),
    point(
        "partial", shape=(7, 3, 128), k_heads=3, rotated=32, reason="Qwen3-Next's: a quarter is rotated, all is normed"
    ),
    point("one pair", shape=(5, 2, 2), k_heads=1, reason="mean of two numbers"),
    point("odd head", shape=(5, 3, 7), k_heads=2, rotated=6, reason="the last column passes; nothing is aligned"),
    point("odd half", shape=(3, 2, 70), k_heads=2, reason="halves of 35 columns end within a vector"),
    point(
        "three lanes of four", shape=(11, 2, 96), k_heads=5, reason="vectors no power of two; more keys than queries"
    ),
    point("batched tables", shape=(3, 5, 2, 32), k_heads=2, batched=True, reason="positions of their own"),
    point("float32 weights", shape=(9, 4, 32), k_heads=2, weight_dtype=torch.float32, reason="master weights"),
    point("tables in x's dtype", shape=(9, 4, 32), k_heads=2, table_dtype=BFLOAT16, reason="rounded cos and sin"),
    point("many tokens", shape=(1031, 2, 16), k_heads=1, reason="more tokens than shares; a prime number of them"),
    point("one token", shape=(1, 16, 128), k_heads=8, start=4095, reason="decoding"),
    point("no tokens", shape=(0, 2, 16), k_heads=2, reason="nothing to do, weight gradients all zero"),
    point("long head", shape=(3, 1, 1030), k_heads=1, reason="more than a warp's vectors, and unaligned"),
    dtypes=LOW,
)

BENCH = (torch.bfloat16,)
BOTH = (torch.bfloat16, torch.float32)

rotary_embedding_bench = grid(
    point("Llama 3.1 8B queries, decode", shape=(1, 1, 32, 128), start=4095),
    point("Llama 3.1 8B queries, prefill 512", shape=(1, 512, 32, 128), dtypes=BOTH),
    point("Llama 3.1 8B keys, prefill 2048", shape=(1, 2048, 8, 128)),
    point("GPT-J 6B, prefill 512", shape=(1, 512, 16, 256), rotated=64, interleaved=True),
    point("GPT-NeoX 20B, prefill 512", shape=(1, 512, 64, 96), rotated=24),
    point("Llama 3.1 8B queries, decode 64", shape=(64, 1, 32, 128), batched=True, devices=CUDA),
    point("Llama 3.1 8B queries, prefill 16384", shape=(1, 16384, 32, 128), devices=CUDA, dtypes=BOTH),
    point("GPT-J 6B, prefill 2048, batch 8", shape=(8, 2048, 16, 256), rotated=64, interleaved=True, devices=CUDA),
    dtypes=BENCH,
)

qk_norm_rope_bench = grid(
    point("Qwen3 0.6B, decode", shape=(1, 1, 16, 128), k_heads=8, start=4095),
    point("Qwen3 0.6B, prefill 512", shape=(1, 512, 16, 128), k_heads=8, dtypes=BOTH),
    point("Qwen3 8B, prefill 512", shape=(1, 512, 32, 128), k_heads=8),
    point("Gemma 3 1B, prefill 1024", shape=(1, 1024, 4, 256), k_heads=1, offset=1.0),
    point("Qwen3 8B, decode 64", shape=(64, 1, 32, 128), k_heads=8, batched=True, devices=CUDA),
    point("Qwen3 8B, prefill 16384", shape=(1, 16384, 32, 128), k_heads=8, devices=CUDA, dtypes=BOTH),
    point("Gemma 3 27B, prefill 8192", shape=(1, 8192, 32, 128), k_heads=16, offset=1.0, devices=CUDA),
    dtypes=BENCH,
)

HEAD_BY_HEAD = (4.0, "TorchInductor adds the heads of dweight one by one on the CPU, eager in a tree")
OTHER_ORDER = (4.0, "dweight adds tokens and heads in another order: sometimes the definition errs less")

operations = [
    Operation(
        name="rotary_embedding",
        levels=implementations("rotary_embedding"),
        inputs=rotary_embedding_inputs,
        cost=rotary_embedding_cost,
        test_grid=rotary_embedding_tests,
        bench_grid=rotary_embedding_bench,
        adversarial=("x",),
        constants=("cos", "sin"),
        real_input=rotary_embedding_real,
    ),
    Operation(
        name="qk_norm_rope",
        levels=implementations("qk_norm_rope", native=OTHER_ORDER, compile=HEAD_BY_HEAD, cuda=OTHER_ORDER),
        inputs=qk_norm_rope_inputs,
        cost=qk_norm_rope_cost,
        test_grid=qk_norm_rope_tests,
        bench_grid=qk_norm_rope_bench,
        adversarial=("q", "k"),
        constants=("cos", "sin"),
        real_input=qk_norm_rope_real,
    ),
]
