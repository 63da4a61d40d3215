"""Flash attention: inputs, cost and grid."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernel_pytorch.cuda_ops.technique.common import CUDA, implementations
from kernel_pytorch.harness.exemptions import COUNTED_MODE
from kernel_pytorch.harness.technique import Case, Cost, Direction, Given, Level, Operation, Spared, grid, point


def _kv_shape(case: Case) -> tuple[int, ...]:
    batch, heads, queries, depth = case.shape
    return batch, case.sizes.get("kv_heads", heads), case.sizes.get("keys", queries), depth


def flash_attention_inputs(case: Case, generator: torch.Generator) -> Given:
    """Give q `(B, H, S, D)`, k and v `(B, K, T, D)`, scale, causal."""
    q, k, v = (
        torch.randn(shape, generator=generator, device=generator.device).to(case.dtype)
        for shape in (case.shape, _kv_shape(case), _kv_shape(case))
    )
    return (q, k, v, case.sizes.get("gain", 1.0) * case.shape[-1] ** -0.5, case.sizes.get("causal", False)), {}


def _pairs(case: Case) -> int:
    """Of a query and a key that it sees, in one head."""
    queries, keys = case.shape[-2], _kv_shape(case)[-2]
    if not case.sizes.get("causal", False):
        return queries * keys
    return sum(max(0, keys - queries + i + 1) for i in range(queries))


def flash_attention_cost(case: Case, direction: Direction) -> Cost:
    """Forward: two products; read q, k, v, write o. Backward: five; read do besides, write dq, dk, dv instead.

    How many kernels the backward launches is no promise: PyTorch computes it, of the scores.
    """
    batch, heads, _, depth = case.shape
    queries, keys = torch.Size(case.shape).numel(), torch.Size(_kv_shape(case)).numel()
    product, size = 2 * batch * heads * depth * _pairs(case), case.dtype.itemsize
    forward = Cost((2 * queries + 2 * keys) * size, 2 * product, launches=1)
    backward = Cost((3 * queries + 4 * keys) * size, 5 * product)
    if direction is Direction.FORWARD:
        return forward
    return backward if direction is Direction.BACKWARD else Cost(forward.bytes + backward.bytes, 7 * product)


def flash_attention_real(activations: Tensor, dtype: torch.dtype) -> Given:
    """Normalised hidden states as heads of 32, the model's own head size: queries, and of other heads keys and values.

    Without a norm, which every model has in front, one channel alone would make scores of hundreds.
    """
    x = torch.nn.functional.layer_norm(activations, activations.shape[-1:])
    x = x.to(dtype).unflatten(-1, (-1, 32)).transpose(0, 1).unsqueeze(0).contiguous()
    return (x, x.roll(1, 1), x.roll(2, 1), 32**-0.5, False), {}


def _summands(arguments: dict[str, Any]) -> dict[str, int]:
    """Gradients of keys and values add up what comes from all queries of their group of heads."""
    q, k = arguments["q"], arguments["k"]
    return dict.fromkeys(("k", "v"), q.shape[1] // k.shape[1] * q.shape[2])


LOW = (torch.float32, torch.float16, torch.bfloat16)

flash_attention_tests = grid(
    point("typical", shape=(3, 4, 33, 40), kv_heads=2, keys=77, core=True, reason="grouped queries, no size a tile's"),
    point("causal", shape=(2, 2, 70, 64), causal=True, core=True, reason="the diagonal crosses tiles"),
    point("whole tiles", shape=(1, 2, 64, 64), keys=128, reason="nothing is masked"),
    point("decoding", shape=(3, 32, 1, 128), kv_heads=8, keys=200, causal=True, reason="the last query sees all keys"),
    point("blind queries", shape=(1, 2, 37, 16), keys=9, causal=True, reason="queries that see no key: zeros"),
    point("steep", shape=(1, 2, 40, 64), keys=200, gain=4.0, reason="scores to 20: tiles outweigh those before"),
    point("one of each", shape=(1, 1, 1, 1), reason="softmax of one number"),
    point("odd depth", shape=(1, 3, 17, 19), reason="rows end within a vector"),
    point("deep", shape=(1, 1, 20, 256), causal=True, reason="the deepest head of the CUDA kernels"),
    dtypes=LOW,
)

flash_attention_bench = grid(
    point("BERT, 16 x 128", shape=(16, 12, 128, 64)),
    point("GPT-2, 1024", shape=(1, 12, 1024, 64), causal=True),
    point("Llama 3.1 8B, prefill 512", shape=(1, 32, 512, 128), kv_heads=8, causal=True),
    point("Llama 3.1 8B, decode at 4096", shape=(1, 32, 1, 128), kv_heads=8, keys=4096, causal=True),
    point("Llama 3.1 8B, prefill 4096", shape=(1, 32, 4096, 128), kv_heads=8, causal=True, devices=CUDA),
    dtypes=(torch.bfloat16,),
)

REMADE = (4.0, "the backward makes the probabilities again of their rounded logsumexp")
REPLACED = (4.0, "TorchInductor puts PyTorch's attention in place of the definition where that has no mask")
GROUPED = (4.0, "PyTorch's product of a matrix, as of the heads of a group, adds in another order than of a row")

BATCHED: dict[str, str | None] = {
    "batch invariance on cuda": "PyTorch's products, in the backward at least, go by the size of the batch"
}
COUNTED = {"FLOP counter": None}  # PyTorch's counter knows products
ON_CPU = {
    "FLOP counter on cpu": "PyTorch's counter has no formula for its attention on the CPU",
    "double backward on cpu": "PyTorch's attention on the CPU has no second derivative",
    "FSDP2/DTensor on cpu": "PyTorch has no sharding rule for its attention on the CPU",
}
# A policy finds an operator in what is compiled: PyTorch's attention.
ATTENTION_FOUND = {
    "selective checkpointing": None,
    "selective checkpointing on cuda": "PyTorch's attention, which TorchInductor calls, changes a tensor that was kept",
}
UNSUPPORTED: dict[Level, dict[str, str | None]] = {
    Level.REFERENCE: {**BATCHED, **COUNTED},
    Level.NATIVE: {**BATCHED, **COUNTED, **ON_CPU},
    Level.COMPILE: {**BATCHED, **COUNTED_MODE, **ATTENTION_FOUND},
    Level.CUDA: BATCHED,
}

SPARED = (
    Spared(
        ("q", "k"),
        ("outlier channels", "large mean"),
        "scores of 20,000 and more, which float32 rounds by a thousandth: a softmax of them, or what a backward makes"
        " again of its logsumexp, has three digits or none",
    ),
    Spared(
        ("v",),
        ("large mean",),
        "next to 10,000 neighbours are 8 and 64 apart: values are all but equal, and gradients cancel",
        dtypes=(torch.float16, torch.bfloat16),
    ),
    Spared(
        ("q", "k", "v"),
        ("denormals",),
        "PyTorch's attention takes what is below 2^-126 for zero on a GPU",
        dtypes=(torch.bfloat16,),
        devices=CUDA,
    ),
    Spared(
        ("q", "k", "v"),
        ("denormals",),
        "oneDNN's attention takes what is below 2^-126 for zero on some processors",
        dtypes=(torch.bfloat16,),
        devices=("cpu",),
        levels=("native", "compile"),
    ),
    Spared(
        ("q", "k", "v"),
        ("imitated activations",),
        "tokens are much alike, so that gradients of scores cancel, and PyTorch's attention keeps fewer digits of them",
        levels=("native", "compile"),
    ),
)

operations = [
    Operation(
        name="flash_attention",
        levels=implementations("flash_attention", UNSUPPORTED, native=REMADE, compile=REPLACED, cuda=GROUPED),
        inputs=flash_attention_inputs,
        cost=flash_attention_cost,
        test_grid=flash_attention_tests,
        bench_grid=flash_attention_bench,
        adversarial=("q", "k", "v"),
        spared=SPARED,
        summands=_summands,
        real_input=flash_attention_real,
    ),
]
