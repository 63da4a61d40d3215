"""The operations of the linear group."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernel_pytorch.fused_ln_act.rules.activations import ACTIVATIONS, FLOPS
from kernel_pytorch.harness.contracts import KernelContract
from kernel_pytorch.harness.exemptions import COMPILED_COUNTED, PRODUCTS
from kernel_pytorch.harness.technique import Case, Cost, Direction, Exemption, Given, Operation, grid, point

from .common import (
    BENCH,
    BF16,
    CUDA,
    F16,
    F32,
    GELU_OF_INFINITY,
    LOW,
    ONE,
    TOLERATED_SPILL_BYTES,
    bytes_of,
    data,
    normal,
    public,
)

BUDGETS = {
    "native": (4.0, "rounds after every kernel: the product, the activation, the product with up"),
    "compile": (4.0, "rounds the product, as native does"),
    "triton": (4.0, "adds K products in another order than the reference, and rounds dz before it is multiplied"),
}

EXEMPTIONS = (
    Exemption(("batch invariance",), PRODUCTS),
    Exemption(("FLOP counter",), None, ("reference", "native", "torchscript")),  # PyTorch's counter knows products
    COMPILED_COUNTED,
)

# Kernels of one of cuBLAS' products at most: where K is split it clears its workspace and adds the parts.
PRODUCT = 3


def _matrix(rows: int, columns: int, case: Case, generator: torch.Generator) -> Tensor:
    """A weight `(rows, columns)`, as layers are initialised: what comes out is as large as what goes in."""
    weight = torch.randn((rows, columns), generator=generator, device=generator.device) / math.sqrt(columns)
    return weight.to(case.dtype)


def _activation(case: Case, default: str) -> str:
    return case.sizes.get("activation", default)


def linear_act_inputs(case: Case, generator: torch.Generator) -> Given:
    """Give x `(*shape)`, weight `(out, K)`, bias `(out,)` or None, activation; save_preactivation."""
    sizes = case.sizes
    bias = normal((case.out,), case.dtype, generator) if sizes.get("bias", True) else None
    weight = _matrix(case.out, case.shape[-1], case, generator)
    arguments = data(case, generator), weight, bias, _activation(case, "gelu")
    return arguments, {"save_preactivation": sizes.get("save", True)}


def gated_mlp_inputs(case: Case, generator: torch.Generator) -> Given:
    """Give x `(*shape)`, w_gate_up `(2 hidden, K)`, w_down `(out, hidden)`, activation; recompute."""
    first = _matrix(2 * case.hidden, case.shape[-1], case, generator) * case.sizes.get("scale", 1.0)
    second = _matrix(case.out, case.hidden, case, generator)
    arguments = data(case, generator), first, second, _activation(case, "silu")
    return arguments, {"recompute": case.sizes.get("recompute", False)}


def gradients(products: tuple[tuple[int, int, int], ...]) -> tuple[tuple[int, int, int], ...]:
    """The products that the gradients of both factors of `(m, k) @ (n, k).T` are."""
    return tuple(shape for m, n, k in products for shape in ((m, k, n), (n, k, m)))


def linear_act_cost(case: Case, direction: Direction) -> Cost:
    """Forward: read x, weight and bias, write y. Backward: read dy, x and weight, write dx, dweight and dbias."""
    rows, depth = torch.Size(case.shape[:-1]).numel(), case.shape[-1]
    product, results = 2 * rows * case.out * depth, rows * case.out
    value, slope = FLOPS[_activation(case, "gelu")]
    x, weight, y, bias = (
        bytes_of(shape, case.dtype) for shape in ((rows, depth), (case.out, depth), (rows, case.out), (case.out,))
    )
    products = ((rows, case.out, depth),)
    one = Cost(x + weight + bias + y, product + results * (value + 1), 1, products)
    # dz, the sum of the shares of dbias, and two products.
    flops = 2 * product + results * (slope + 2)
    two = Cost(y + 2 * (x + weight) + bias, flops, 2 + 2 * PRODUCT, gradients(products))
    return direction.cost(one, two)


def gated_mlp_cost(case: Case, direction: Direction) -> Cost:
    """Forward: read x and both weights, write y. Backward: read dy, x and both weights, write their gradients."""
    rows, depth = torch.Size(case.shape[:-1]).numel(), case.shape[-1]
    products = 2 * rows * case.hidden * (2 * depth + case.out)
    value, slope = FLOPS[_activation(case, "silu")]
    x, first, second, y = (
        bytes_of(shape, case.dtype)
        for shape in ((rows, depth), (2 * case.hidden, depth), (case.out, case.hidden), (rows, case.out))
    )
    hidden = rows * case.hidden
    both = ((rows, 2 * case.hidden, depth), (rows, case.out, case.hidden))
    one = Cost(x + first + second + y, products + hidden * (value + 1), 2, both)
    # dz and h, and four products.
    flops = 2 * products + hidden * (slope + 4)
    two = Cost(y + 2 * (x + first + second), flops, 1 + 4 * PRODUCT, gradients(both))
    return direction.cost(one, two)


def _random_weight(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return (torch.randn((rows, columns), generator=torch.Generator().manual_seed(0)) / math.sqrt(columns)).to(dtype)


def linear_act_real(activations: Tensor, dtype: torch.dtype) -> Given:
    """Hidden states as they are, without a bias."""
    return (activations.to(dtype), _random_weight(96, activations.shape[-1], dtype), None, "gelu"), {}


def gated_mlp_real(activations: Tensor, dtype: torch.dtype) -> Given:
    """Hidden states as they are."""
    weights = _random_weight(128, activations.shape[-1], dtype), _random_weight(64, 64, dtype)
    return (activations.to(dtype), *weights), {}


# On the CPU oneDNN takes denormal bfloat16 numbers for zero, so no core case, which those are planted in, is bfloat16.
linear_act_tests = grid(
    point("typical", shape=(61, 100), out=96, core=True, reason="no size is a multiple of a tile", dtypes=(F32, F16)),
    point("typical, bfloat16", shape=(61, 100), out=96, reason="what networks are trained in", dtypes=(BF16,)),
    point("computed again", shape=(33, 48), out=48, save=False, reason="dz is the epilogue of a product",
          dtypes=ONE),
    point("computed again, half", shape=(33, 48), out=48, save=False, reason="the same in 16 bits", dtypes=(F16, BF16)),
    point("aligned", shape=(40, 48), out=80, activation="silu", reason="what the copy engine can move, in every dtype"),
    point("odd", shape=(7, 33), out=5, activation="silu", reason="what it cannot: rows of 66 bytes"),
    point("odd, computed again", shape=(9, 35), out=37, save=False, reason="the same in the backward"),
    point("odd result", shape=(9, 32), out=37, reason="x and weight could be moved, y could not", dtypes=ONE),
    point("one number", shape=(1, 1), out=1, reason="as small as it gets", dtypes=ONE),
    point("some rows", shape=(300, 16), out=24, reason="so few that one program sums up dbias", dtypes=ONE),
    point("one row", shape=(1, 96), out=64, reason="most of the tile has no row"),
    point("no rows", shape=(0, 16), out=8, reason="nothing to do, gradients of the parameters all zero", dtypes=ONE),
    point("no bias", shape=(2, 3, 40), out=33, bias=False, reason="leading dimensions are collapsed", dtypes=ONE),
    *(point(name, shape=(9, 16), out=24, activation=name, reason="every activation", dtypes=ONE)
      for name in ACTIVATIONS),
    *(point(f"{name}, computed again", shape=(9, 16), out=24, activation=name, save=False,
            reason="every derivative", dtypes=ONE) for name in ACTIVATIONS),
    dtypes=LOW,
)  # fmt: skip

gated_mlp_tests = grid(
    point("typical", shape=(29, 100), hidden=72, out=60, recompute=True, core=True,
          reason="no size is a multiple of a tile", dtypes=ONE),
    point("small weights", shape=(29, 48), hidden=40, out=48, scale=7e-3, recompute=True, core=True, dtypes=(F16,),
          reason="a product of outliers stays below the largest float16"),
    point("typical, half", shape=(29, 100), hidden=72, out=60, recompute=True, reason="rows of 200 bytes",
          dtypes=(F16, BF16)),
    point("saved", shape=(29, 48), hidden=40, out=48, reason="a pass over what was saved",
          dtypes=ONE),
    point("saved, half", shape=(29, 48), hidden=40, out=48, reason="halves that can be moved",
          dtypes=(F16, BF16)),
    point("odd", shape=(7, 33), hidden=5, out=9, recompute=True, reason="what the copy engine cannot move"),
    point("odd, saved", shape=(7, 33), hidden=5, out=9, reason="up begins at an odd column"),
    point("one number", shape=(1, 1), hidden=1, out=1, reason="as small as it gets", dtypes=ONE),
    point("no rows", shape=(0, 16), hidden=8, out=8, reason="nothing to do, gradients of the weights all zero",
          dtypes=ONE),
    point("four dimensions", shape=(2, 3, 2, 40), hidden=33, out=40, recompute=True,
          reason="leading dimensions are collapsed", dtypes=ONE),
    *(point(name, shape=(9, 16), hidden=24, out=8, activation=name, recompute=True, reason="every activation",
            dtypes=ONE) for name in ACTIVATIONS),
    dtypes=LOW,
)  # fmt: skip


def _rows_of(*weights: str) -> Callable[[dict[str, Any]], dict[str, int]]:
    """The gradients of these weights are sums over the rows of x."""
    return lambda arguments: dict.fromkeys(weights, arguments["x"].numel() // max(1, arguments["x"].shape[-1]))


linear_act_bench = grid(
    point("BERT-base, 64 tokens", shape=(64, 768), out=3072),
    point("BERT-base, 16 x 512", shape=(8192, 768), out=3072, devices=CUDA),
    point("BERT-base, 16 x 512, computed again", shape=(8192, 768), out=3072, save=False, devices=CUDA),
    point("GPT-2 XL, 8 x 1024", shape=(8192, 1600), out=6400, activation="gelu_tanh", devices=CUDA),
    point("ViT-L/16, 64 images", shape=(12608, 1024), out=4096, devices=CUDA),
    point("Llama 3.1 8B gate, 4096 tokens", shape=(4096, 4096), out=14336, bias=False, activation="silu", devices=CUDA),
    point("Qwen3 0.6B gate, 64 tokens", shape=(64, 1024), out=3072, bias=False, activation="silu"),
    point("Nemotron-4 15B, 2048 tokens", shape=(2048, 6144), out=24576, bias=False, activation="relu_squared",
          devices=CUDA),
    dtypes=BENCH,
)  # fmt: skip

gated_mlp_bench = grid(
    point("Qwen3 0.6B, 64 tokens", shape=(64, 1024), hidden=3072, out=1024),
    point("Qwen3 0.6B, 16384 tokens", shape=(16384, 1024), hidden=3072, out=1024, devices=CUDA),
    point("Qwen3 0.6B, 16384 tokens, computed again", shape=(16384, 1024), hidden=3072, out=1024, recompute=True,
          devices=CUDA),
    point("Llama 3.1 8B, decode", shape=(1, 4096), hidden=14336, out=4096, devices=CUDA),
    point("Llama 3.1 8B, 4096 tokens", shape=(4096, 4096), hidden=14336, out=4096, devices=CUDA),
    point("Mixtral 8x7B expert, 1024 tokens", shape=(1024, 4096), hidden=14336, out=4096, devices=CUDA),
    dtypes=BENCH,
)  # fmt: skip

OPERATIONS = [
    Operation(
        name="linear_act",
        **public("linear_act"),
        budgets=BUDGETS,
        exemptions=(*EXEMPTIONS, GELU_OF_INFINITY),
        inputs=linear_act_inputs,
        cost=linear_act_cost,
        test_grid=linear_act_tests,
        bench_grid=linear_act_bench,
        roles={"data": ("x",)},
        summands=_rows_of("weight", "bias"),
        real_input=linear_act_real,
    ),
    Operation(
        name="gated_mlp",
        **public("gated_mlp"),
        budgets=BUDGETS,
        exemptions=EXEMPTIONS,
        inputs=gated_mlp_inputs,
        cost=gated_mlp_cost,
        test_grid=gated_mlp_tests,
        bench_grid=gated_mlp_bench,
        roles={"data": ("x",)},
        summands=_rows_of("w_gate_up", "w_down"),
        real_input=gated_mlp_real,
    ),
]

TENSOR_CORES = {"sm_80": "mma", "sm_90": "wgmma", "sm_100": "tcgen05", "sm_120": "mma"}

# Tiles of 16 rows are less than wgmma multiplies.
FEW_ROWS = TENSOR_CORES | {"sm_90": "mma"}


def _product(spilled: int = TOLERATED_SPILL_BYTES, instructions: dict[str, str] = TENSOR_CORES) -> KernelContract:
    return KernelContract(spilled, min_load_bits=128, min_store_bits=128, matrix_instructions=instructions)


CONTRACTS = {
    "_linear_kernel<* ROWS=16 *>": _product(instructions=FEW_ROWS),
    "_gated_linear_kernel<* ROWS=16 *>": _product(instructions=FEW_ROWS),
    "_linear_kernel": _product(),
    "_linear_backward_kernel": _product(),
    "_gated_linear_kernel": _product(48),  # two tiles, and both are stored
    "_gated_linear_backward_kernel": _product(),
    "_linear_saved_backward_kernel": KernelContract(min_load_bits=128, min_store_bits=128),
    "_gated_linear_saved_backward_kernel": KernelContract(min_load_bits=128, min_store_bits=128),
}
