"""The linear layers of a step: inputs, cost and grids."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from kernel_pytorch.harness.contracts import KernelContract
from kernel_pytorch.harness.exemptions import Exemption
from kernel_pytorch.harness.technique import Case, Cost, Direction, Given, Operation, Point, grid, point

from .common import BENCH, CUDA, EXEMPTIONS, LOW, SOME, TENSOR_CORES, norm_weight, normal, public

FEW_ROWS = "one or two rows are computed by another kernel than more"


def _weight(case: Case, parts: int, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
    outputs = parts * case.sizes["outputs"]
    weight = normal((outputs, case.shape[-1]), case, generator, case.shape[-1] ** -0.5)
    return weight, normal((outputs,), case, generator) if case.sizes.get("bias") else None


def norm_inputs(case: Case, generator: torch.Generator) -> Given:
    """Give x `(..., K)`, weight `(N, K)`, norm_weight `(K,)`, bias `(N,)` or None; the case's options."""
    return _norm_inputs(case, generator, 1)


def gated_inputs(case: Case, generator: torch.Generator) -> Given:
    """Give x `(..., K)`, weight `(2 N, K)`, norm_weight `(K,)`, bias `(2 N,)` or None; the case's options."""
    return _norm_inputs(case, generator, 2)


def _norm_inputs(case: Case, generator: torch.Generator, parts: int) -> Given:
    weight, bias = _weight(case, parts, generator)
    columns = case.shape[-1]
    keywords: dict[str, Any] = {n: case.sizes[n] for n in ("activation", "norm", "norm_offset") if n in case.sizes}
    if case.sizes.get("norm_bias"):
        keywords["norm_bias"] = normal((columns,), case, generator)
    x = normal(case.shape, case, generator, case.sizes.get("gain", 1.0))
    return (x, weight, norm_weight(columns, case, generator), bias), keywords


def residual_inputs(case: Case, generator: torch.Generator) -> Given:
    """Give x `(..., K)`, weight `(N, K)`, residual `(..., N)`, bias `(N,)` or None."""
    weight, bias = _weight(case, 1, generator)
    residual = normal((*case.shape[:-1], case.sizes["outputs"]), case, generator)
    return (normal(case.shape, case, generator), weight, residual, bias), {}


def cost(case: Case, direction: Direction, parts: int = 1, norm: bool = True) -> Cost:
    """Read the weight, and what is small beside it: x, the norm's weight or the residual, the result. One launch."""
    rows, inner, outputs = torch.Size(case.shape[:-1]).numel(), case.shape[-1], case.sizes["outputs"]
    small = rows * (inner + outputs) + (inner if norm else rows * outputs)
    small += parts * outputs if case.sizes.get("bias") else 0
    product = rows, parts * outputs, inner
    size = (parts * outputs * inner + small) * case.dtype.itemsize
    return Cost(size, 2 * rows * parts * outputs * inner, launches=1, products=(product,))


def real(activations: Tensor, dtype: torch.dtype, parts: int = 1, norm: bool = True) -> Given:
    """Eight hidden states."""
    x = activations[:8].to(dtype)
    columns = x.shape[-1]
    drawn = torch.randn(columns + 1, columns, generator=torch.Generator().manual_seed(0))
    weight = (drawn[:columns] * columns**-0.5).to(dtype)
    if not norm:
        return (x, weight, activations[8:16].to(dtype)), {}
    return (x, weight, (1.0 + 0.25 * drawn[columns]).to(dtype)), {}


def _tests(*others: Point, **sizes: Any) -> Any:
    return grid(
        point("typical", shape=(5, 96), outputs=72, core=True, **sizes, reason="several rows; no size a tile's"),
        point("one row", shape=(1, 96), outputs=72, core=True, **sizes, reason="the kernel of few rows"),
        point("all rows", shape=(16, 128), outputs=64, **sizes, reason="as many rows as there may be; whole tiles"),
        point("bias", shape=(2, 3, 80), outputs=48, bias=True, **sizes, reason="leading dimensions; a bias"),
        point("bias of one row", shape=(1, 1, 80), outputs=48, bias=True, **sizes, reason="a model's batch of one"),
        point("odd", shape=(3, 33), outputs=17, bias=True, **sizes, reason="rows end within a vector"),
        point("odd, one row", shape=(1, 33), outputs=17, **sizes, reason="rows end within a vector"),
        point("odd, two rows", shape=(2, 33), outputs=17, **sizes, reason="several rows of the kernel of few"),
        point("one column", shape=(2, 1), outputs=3, dtypes=SOME, **sizes, reason="a product of one number"),
        point("one output", shape=(9, 40), outputs=1, **sizes, reason="a vector as weight; more than 8 rows"),
        point("long rows", shape=(3, 1500), outputs=8, dtypes=SOME, **sizes, reason="many blocks of K"),
        point("long, two rows", shape=(2, 1500), outputs=8, dtypes=SOME, **sizes, reason="many blocks of K"),
        *others,
        dtypes=LOW,
    )


OF_NORM = (
    point("gemma", shape=(4, 64), outputs=40, norm_offset=1.0, reason="weights around zero"),
    point("gemma, one row", shape=(1, 64), outputs=40, norm_offset=1.0, reason="weights around zero"),
    point("layer norm", shape=(4, 64), outputs=40, norm="layer", norm_bias=True, bias=True, reason="mean and bias"),
    point("layer norm, one row", shape=(1, 64), outputs=40, norm="layer", norm_bias=True, reason="mean and bias"),
    point("layer norm, two rows", shape=(2, 64), outputs=40, norm="layer", norm_bias=True, reason="a mean of each"),
    point("layer norm, no bias", shape=(3, 64), outputs=40, norm="layer", reason="as Cohere's"),
    point("float32 norm", shape=(3, 64), outputs=40, norm_dtype=torch.float32, reason="a weight of another dtype"),
    point("large", shape=(3, 64), outputs=40, gain=3e3, reason="sums of squares beyond float16; normalised first"),
)
OF_GATE = (
    point("GeGLU", shape=(3, 64), outputs=40, activation="gelu", reason="the error function"),
    point("Gemma's", shape=(1, 64), outputs=40, activation="gelu_tanh", norm_offset=1.0, reason="and the offset"),
)

SIZES = {"Llama 3.2 1B": (2048, 3072, 8192), "Llama 3 8B": (4096, 6144, 14336)}
"""By model: hidden size, columns of q, k and v, columns of the MLP."""


def _bench(outputs: str) -> Any:
    """The layers of both models at 1 and 8 rows; on a CPU the smaller one's at 1."""
    found = []
    for model, (hidden, of_qkv, of_mlp) in SIZES.items():
        layers = {
            "qkv": [("qkv", hidden, of_qkv)],
            "mlp": [("gate and up", hidden, of_mlp)],
            "residual": [("down", of_mlp, hidden), ("output", hidden, hidden)],
        }[outputs]
        for layer, inner, columns in layers:
            for rows in (1, 8):
                where: Any = {} if (hidden, rows) == (2048, 1) else {"devices": CUDA}
                found.append(point(f"{model}, {layer}, {rows} rows", shape=(rows, inner), outputs=columns, **where))
    return grid(*found, dtypes=BENCH)


THREE_FOUR = ([[3.0, 4.0], [-4.0, 3.0]], [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, -1.0]])
ROOT = 12.5**0.5
"""Root of the mean of the squares of 3 and 4."""
EXACT = {"norm": "rms", "eps": 0.0}

_EXEMPTIONS = (*EXEMPTIONS, Exemption(("batch invariance",), FEW_ROWS, ("triton",)))

OPERATIONS = [
    Operation(
        name="norm_linear",
        **public("norm_linear"),
        exemptions=_EXEMPTIONS,
        inputs=norm_inputs,
        cost=cost,
        test_grid=_tests(*OF_NORM),
        bench_grid=_bench("qkv"),
        roles={"data": ("x",)},
        real_input=real,
        known=[
            (
                (*THREE_FOUR, [1.0, 2.0], [0.0, 0.0, 1.0, 0.0]),
                EXACT,
                [[3 / ROOT, 8 / ROOT, 11 / ROOT + 1, -5 / ROOT], [-4 / ROOT, 6 / ROOT, 2 / ROOT + 1, -10 / ROOT]],
            ),
            (
                (*THREE_FOUR, [1.0, 1.0]),
                {"norm": "layer", "eps": 0.0},
                [[-1.0, 1.0, 0.0, -2.0]] * 2,
            ),
        ],
    ),
    Operation(
        name="norm_gated_linear",
        **public("norm_gated_linear"),
        exemptions=_EXEMPTIONS,
        inputs=gated_inputs,
        cost=functools.partial(cost, parts=2),
        test_grid=_tests(*OF_NORM, *OF_GATE),
        bench_grid=_bench("mlp"),
        roles={"data": ("x",)},
        real_input=functools.partial(real, parts=2),
        # x / (1 + exp(-x)) is x / 2 plus half of x tanh(x / 2): of large x it is x, of its negative 0.
        known=[((*THREE_FOUR, [1e3, 1e3]), EXACT, [[7e6 * 3 / 12.5, -4e6 / 12.5], [0.0, -7e6 * 3 / 12.5]])],
    ),
    Operation(
        name="linear_residual",
        **public("linear_residual"),
        exemptions=_EXEMPTIONS,
        inputs=residual_inputs,
        cost=functools.partial(cost, norm=False),
        test_grid=_tests(),
        bench_grid=_bench("residual"),
        roles={"data": ("x", "residual")},
        real_input=functools.partial(real, norm=False),
        known=[((*THREE_FOUR, [[10.0, 20.0, 30.0, 40.0], [0.0, 0.0, 0.0, 1.0]]), {},
                [[13.0, 24.0, 37.0, 39.0], [-4.0, 3.0, -1.0, -6.0]])],
    ),
]  # fmt: skip

CONTRACTS = {
    "vector_kernel": KernelContract(min_load_bits=128),
    "rows_kernel": KernelContract(min_load_bits=128, matrix_instructions=TENSOR_CORES),
    "ring_kernel": KernelContract(min_load_bits=128, matrix_instructions={"sm_90": "wgmma"}),
}
