"""The projection, alone and in front of QK-norm and rotary embedding: inputs, cost and grids."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernel_pytorch.harness.exemptions import COMPILED_COUNTED, PRODUCTS, REDUCTIONS, Exemption
from kernel_pytorch.harness.technique import Case, Cost, Direction, Given, Operation, grid, point

from .common import BENCH, CUDA, EPS, LOW, SOME, data, norm_weights, position_ids, public, rotated, table_bytes, tables


def columns_out(case: Case) -> int:
    """Rows of the weight."""
    return (case.sizes["heads"] + 2 * case.sizes["k_heads"]) * case.sizes["head_dim"]


def projection_inputs(case: Case, generator: torch.Generator) -> Given:
    """Give x `(..., S, C)`, weight `((H + 2K) * D, C)`, bias `((H + 2K) * D,)` or None; heads and their size."""
    x, rows = data(case.shape, case, generator), columns_out(case)
    weight = (data((rows, case.shape[-1]), case, generator).float() * case.shape[-1] ** -0.5).to(case.dtype)
    bias = data((rows,), case, generator) if case.sizes.get("bias", False) else None
    names = {"num_heads": "heads", "num_kv_heads": "k_heads", "head_dim": "head_dim"}
    return (x, weight, bias), {name: case.sizes[size] for name, size in names.items()}


def norm_rope_inputs(case: Case, generator: torch.Generator) -> Given:
    """Give the same, then weights of the norm `(D,)`, cos and sin; eps, interleaved, offset, positions."""
    (x, weight, bias), heads = projection_inputs(case, generator)
    columns, tokens = heads.pop("head_dim"), case.shape[:-1]
    weights = norm_weights(case, columns, generator)
    angles = tables(case, tokens, rotated(case, columns), x.device)
    keywords = {name: case.sizes[name] for name in ("interleaved", "offset") if name in case.sizes}
    given = {**heads, **keywords, **position_ids(case, tokens, generator), "eps": EPS}
    return (x, weight, bias, *weights, *angles), given


def projection_cost(case: Case, direction: Direction) -> Cost:
    """Forward: read x, weight and bias, write the product. Backward: read it, x and the weight, write dx, dweight.

    How many kernels a product takes is cuBLAS's affair.
    """
    tokens, inner, rows = torch.Size(case.shape[:-1]).numel(), case.shape[-1], columns_out(case)
    size = case.dtype.itemsize
    bias = rows if case.sizes.get("bias", False) else 0
    forward = Cost((tokens * (inner + rows) + rows * inner + bias) * size, 2 * tokens * inner * rows)
    backward = Cost((tokens * (2 * inner + rows) + 2 * rows * inner + bias) * size, 4 * tokens * inner * rows)
    return direction.cost(forward, backward)


def norm_rope_cost(case: Case, direction: Direction) -> Cost:
    """The projection's, and the tables and weights of the norm: q and k need not leave the chip in between."""
    product = projection_cost(case, direction)
    columns, passes = case.sizes["head_dim"], 2 if direction is Direction.BOTH else 1
    more = table_bytes(case, case.shape[:-1], rotated(case, columns)) + 2 * columns * case.dtype.itemsize
    heads = torch.Size(case.shape[:-1]).numel() * (case.sizes["heads"] + case.sizes["k_heads"]) * columns
    elementwise = {Direction.FORWARD: 7, Direction.BACKWARD: 14, Direction.BOTH: 21}[direction] * heads
    return Cost(product.bytes + passes * more, product.flops + elementwise)


def summands(arguments: dict[str, Any]) -> dict[str, int]:
    """The gradients of the weight and the bias are sums over tokens."""
    tokens = arguments["x"].shape[:-1].numel()
    return {name: tokens for name in ("weight", "bias") if isinstance(arguments[name], Tensor)}


SMALL: dict[str, Any] = {"heads": 2, "k_heads": 1, "head_dim": 8}

projection_tests = grid(
    point(
        "typical", shape=(2, 7, 32), heads=4, k_heads=2, head_dim=16, core=True, dtypes=LOW, reason="grouped queries"
    ),
    point(
        "bias",
        shape=(3, 5, 24),
        heads=3,
        k_heads=3,
        head_dim=8,
        bias=True,
        core=True,
        dtypes=LOW,
        reason="as Qwen2 and BERT",
    ),
    point("one token", shape=(1, 33), **SMALL, reason="decoding; an odd number of channels"),
    point("no tokens", shape=(2, 0, 16), **SMALL, bias=True, reason="nothing to do, gradients all zero"),
    point("four dimensions", shape=(2, 2, 3, 16), **SMALL, reason="leading dimensions are collapsed"),
    dtypes=SOME,
)

norm_rope_tests = grid(
    point(
        "typical", shape=(2, 7, 32), heads=4, k_heads=2, head_dim=16, core=True, dtypes=LOW, reason="grouped queries"
    ),
    point(
        "interleaved, bias",
        shape=(3, 5, 24),
        heads=3,
        k_heads=3,
        head_dim=8,
        bias=True,
        interleaved=True,
        core=True,
        dtypes=LOW,
        reason="neighbours are pairs; every group has one head",
    ),
    point("partial", shape=(5, 16), heads=2, k_heads=1, head_dim=12, rotated=4, reason="eight columns pass"),
    point("Gemma", shape=(5, 16), **SMALL, offset=1.0, reason="weights around zero"),
    point("positions", shape=(2, 3, 16), **SMALL, positions=11, reason="every token at a row of the tables"),
    point("no tokens", shape=(0, 16), **SMALL, reason="nothing to do, gradients all zero"),
    dtypes=SOME,
)

MODELS: dict[str, dict[str, Any]] = {
    "BERT-base": {"channels": 768, "heads": 12, "k_heads": 12, "head_dim": 64, "bias": True},
    "GPT-2": {"channels": 768, "heads": 12, "k_heads": 12, "head_dim": 64, "bias": True},
    "ViT-B": {"channels": 768, "heads": 12, "k_heads": 12, "head_dim": 64, "bias": True},
    "Qwen3 0.6B": {"channels": 1024, "heads": 16, "k_heads": 8, "head_dim": 128},
    "Qwen3 8B": {"channels": 4096, "heads": 32, "k_heads": 8, "head_dim": 128},
    "Llama 3.1 8B": {"channels": 4096, "heads": 32, "k_heads": 8, "head_dim": 128},
    "Mistral 7B": {"channels": 4096, "heads": 32, "k_heads": 8, "head_dim": 128},
    "Gemma 2 9B": {"channels": 3584, "heads": 16, "k_heads": 8, "head_dim": 256},
}
"""The projections of published models, by name."""


def at(model: str, tokens: int, what: str, **more: Any) -> Any:
    """A case of a model with this number of tokens."""
    sizes = dict(MODELS[model])
    return point(f"{model}, {what}", shape=(1, tokens, sizes.pop("channels")), **sizes, **more)


projection_bench = grid(
    at("BERT-base", 512, "512 tokens"),
    at("GPT-2", 1024, "1024 tokens"),
    at("ViT-B", 197, "one image"),
    at("Qwen3 0.6B", 512, "prefill 512"),
    at("Llama 3.1 8B", 1, "decode"),
    at("Mistral 7B", 8192, "prefill 8192", devices=CUDA),
    at("Gemma 2 9B", 8192, "prefill 8192", devices=CUDA),
    dtypes=BENCH,
)
norm_rope_bench = grid(
    at("Qwen3 0.6B", 1, "decode"),
    at("Qwen3 0.6B", 512, "prefill 512"),
    at("Qwen3 0.6B", 8192, "prefill 8192", devices=CUDA),
    at("Qwen3 8B", 8192, "prefill 8192", devices=CUDA),
    dtypes=BENCH,
)

BUDGETS = {
    "native": (4.0, "the norm's dweight adds tokens and heads in another order than the definition"),
    "compile": (4.0, "adds products and dweight in another order than the definition"),
    "triton": (4.0, "the norm's dweight adds tokens and heads in another order than the definition"),
    "cuda": (4.0, "the norm's dweight adds tokens and heads in another order than the definition"),
}
OPERATORS = ("reference", "native", "torchscript")
EXEMPTIONS = (
    Exemption(("FLOP counter",), None, OPERATORS),  # PyTorch's counter knows products
    COMPILED_COUNTED,
    Exemption(("batch invariance",), PRODUCTS),
    Exemption(("batch invariance",), PRODUCTS, (*OPERATORS, "triton", "cuda"), devices=("cuda",)),
    Exemption(("batch invariance",), REDUCTIONS, ("compile",), devices=("cuda",)),
)


def supported(function: str) -> dict[str, Any]:
    """Levels and budgets of a function."""
    fields = public(function)
    return {**fields, "budgets": {n: v for n, v in BUDGETS.items() if n in fields["levels"]}}


OPERATIONS = [
    Operation(
        name="qkv_projection",
        **supported("qkv_projection"),
        exemptions=EXEMPTIONS,
        inputs=projection_inputs,
        cost=projection_cost,
        test_grid=projection_tests,
        bench_grid=projection_bench,
        roles={"data": ("x",)},
        summands=summands,
    ),
    Operation(
        name="qkv_norm_rope",
        **supported("qkv_norm_rope"),
        exemptions=EXEMPTIONS,
        inputs=norm_rope_inputs,
        cost=norm_rope_cost,
        test_grid=norm_rope_tests,
        bench_grid=norm_rope_bench,
        roles={"data": ("x",), "constant": ("cos", "sin")},
        summands=summands,
    ),
]
