"""The operations of the gated group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernel_pytorch.fused_ln_act.rules.activations import FLOPS
from kernel_pytorch.harness.contracts import KernelContract
from kernel_pytorch.harness.technique import Case, Cost, Direction, Exemption, Given, Grid, Operation, grid, point

from .common import BENCH, BF16, CPU, CUDA, F16, F32, GELU_OF_INFINITY, LOW, ONE, bytes_of, data, normal, public

BUDGETS = {
    "native": (4.0, "rounds after every kernel: the activation, up + offset, the product"),
    "compile": (4.0, "TorchInductor's error function on the CPU is not that of eager"),
}


def _up_dtype(case: Case) -> torch.dtype:
    return case.sizes.get("up_dtype", case.dtype)


def _halves(case: Case, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
    """Gate `(*shape)` and up `(*shape)`, or packed `(..., 2I)` and None."""
    if case.sizes.get("packed", False):
        return normal((*case.shape[:-1], 2 * case.shape[-1]), case.dtype, generator), None
    return data(case, generator), normal(case.shape, _up_dtype(case), generator)


def _named(case: Case, *names: str) -> dict[str, Any]:
    """The keywords that a case names; the others have their defaults."""
    return {name: case.sizes[name] for name in names if name in case.sizes}


def swiglu_inputs(case: Case, generator: torch.Generator) -> Given:
    """Give gate `(*shape)` and up `(*shape)`, or packed `(..., 2I)` and None; alpha, limit, offset."""
    return _halves(case, generator), _named(case, "alpha", "limit", "offset")


def geglu_inputs(case: Case, generator: torch.Generator) -> Given:
    """Give gate and up as for swiglu; approximate, limit."""
    return _halves(case, generator), _named(case, "approximate", "limit")


def reglu_inputs(case: Case, generator: torch.Generator) -> Given:
    """Give gate and up as for swiglu; limit."""
    return _halves(case, generator), _named(case, "limit")


def _cost(function: str, case: Case, direction: Direction) -> Cost:
    """Forward: read gate and up, write y. Backward: read dy, gate and up, write dgate and dup. One launch each."""
    gate, up = bytes_of(case.shape, case.dtype), bytes_of(case.shape, _up_dtype(case))
    y = max(gate, up)  # no case pairs float16 with bfloat16
    tanh = case.sizes.get("approximate", "none") == "tanh"
    activation = {"swiglu": "silu", "geglu": "gelu_tanh" if tanh else "gelu", "reglu": "relu"}[function]
    value, slope = FLOPS[activation]
    elements = torch.Size(case.shape).numel()
    one = Cost(gate + up + y, elements * (value + 1), launches=1)
    two = Cost(y + 2 * (gate + up), elements * (value + slope + 3), launches=1)
    return direction.cost(one, two)


def _real(activations: Tensor, dtype: torch.dtype) -> Given:
    """Hidden states as gate, those of the neighbouring token as up."""
    x = activations.to(dtype)
    return (x, x.roll(1, 0)), {}


GPT_OSS: dict[str, Any] = {"alpha": 1.702, "offset": 1.0}

swiglu_tests = grid(
    point("two tensors", shape=(61, 96), core=True, reason="the last block of columns has lanes to spare"),
    point("packed", shape=(29, 96), packed=True, core=True, reason="both gradients go into one tensor"),
    point("one column", shape=(7, 1), reason="as narrow as it gets", dtypes=ONE),
    point("one packed column", shape=(7, 1), packed=True, reason="up begins one element behind gate", dtypes=ONE),
    point("one row", shape=(1, 257), reason="one more column than a power of two"),
    point("no rows", shape=(0, 64), packed=True, reason="nothing to do", dtypes=ONE),
    point("four dimensions", shape=(2, 3, 2, 33), packed=True, reason="up is not aligned", dtypes=(F32, F16)),
    point("many short rows", shape=(1031, 3), reason="more rows than a tile has", dtypes=ONE),
    point("long rows", shape=(3, 5000), packed=True, reason="many blocks, the last one not full", dtypes=ONE),
    # The limit lies inside the data, where gpt-oss has 7: what is clamped must be common.
    point("gpt-oss", shape=(13, 90), limit=0.7, **GPT_OSS, reason="much of gate and up is clamped"),
    point("gpt-oss, packed", shape=(5, 90), packed=True, limit=0.7, **GPT_OSS, reason="clamped halves", dtypes=ONE),
    point("alpha", shape=(5, 40), alpha=-0.5, reason="a sigmoid that falls", dtypes=ONE),
    point("float32 up", shape=(4, 100), up_dtype=F32, reason="y and dy are float32, dgate is not", dtypes=(F16, BF16)),
    dtypes=LOW,
)  # fmt: skip

geglu_tests = grid(
    point("exact", shape=(61, 96), core=True, reason="the error function"),
    point("tanh, packed", shape=(29, 100), packed=True, approximate="tanh", core=True, reason="approximate, packed"),
    point("tanh", shape=(5, 100), approximate="tanh", reason="the approximation of two tensors", dtypes=ONE),
    point("limit", shape=(5, 100), limit=0.7, reason="much of gate and up is clamped", dtypes=(F16,)),
    # Exactly, PyTorch's own erf on the CPU is too rough for the small numbers that are left.
    point("limit, tanh", shape=(29, 100), approximate="tanh", limit=0.7, reason="as limit", dtypes=ONE),
    point("no rows", shape=(0, 64), reason="nothing to do", dtypes=ONE),
    dtypes=LOW,
)  # fmt: skip

reglu_tests = grid(
    point("two tensors", shape=(61, 96), core=True, reason="half of gate is zero"),
    point("packed", shape=(5, 100), packed=True, reason="both gradients go into one tensor"),
    point("limit", shape=(5, 100), limit=0.7, reason="clamped on both sides", dtypes=ONE),
    dtypes=LOW,
)

swiglu_bench = grid(
    point("Llama 3.1 8B, decode", shape=(1, 14336), packed=True),
    point("Llama 3.1 8B, prefill 64", shape=(64, 14336), packed=True),
    point("Llama 3.1 8B, prefill 64", shape=(64, 14336), packed=True, devices=CPU, dtypes=(F32,)),
    point("Llama 3.1 8B, prefill 512", shape=(512, 14336), packed=True, devices=CUDA),
    point("Llama 3.1 8B, prefill 16384", shape=(16384, 14336), packed=True, devices=CUDA),
    point("Llama 3.1 8B, two tensors", shape=(16384, 14336), devices=CUDA),
    point("Mixtral 8x7B expert, 4096 tokens", shape=(4096, 14336), devices=CUDA),
    point("Qwen3 0.6B, prefill 512", shape=(512, 3072)),
    point("Qwen3 0.6B, prefill 32768", shape=(32768, 3072), packed=True, devices=CUDA, dtypes=(BF16, F32)),
    point("gpt-oss 20B expert, 4096 tokens", shape=(4096, 2880), limit=7.0, **GPT_OSS, devices=CUDA),
    dtypes=BENCH,
)

geglu_bench = grid(
    point("Gemma 2 9B, decode", shape=(1, 14336), approximate="tanh"),
    point("Gemma 2 9B, prefill 64", shape=(64, 14336), approximate="tanh"),
    point("Gemma 2 9B, prefill 64", shape=(64, 14336), approximate="tanh", devices=CPU, dtypes=(F32,)),
    point("Gemma 2 9B, prefill 256", shape=(256, 14336), approximate="tanh", devices=CUDA),
    point("Gemma 2 9B, prefill 8192", shape=(8192, 14336), approximate="tanh", devices=CUDA),
    point("ModernBERT-base, 64 x 1024", shape=(65536, 1152), packed=True, devices=CUDA),
    dtypes=BENCH,
)

reglu_bench = grid(
    point("T5-base of the paper, 1 x 512", shape=(512, 2048)),
    point("T5-base of the paper, 1 x 512", shape=(512, 2048), devices=CPU, dtypes=(F32,)),
    point("T5-base of the paper, 128 x 512", shape=(65536, 2048), devices=CUDA),
    dtypes=BENCH,
)

EXEMPTIONS = {
    "geglu": (GELU_OF_INFINITY,),
    "reglu": (
        Exemption(
            ("infinities",),
            "TorchScript, once it fuses, multiplies what is infinite by a zero derivative, where PyTorch writes zero",
            ("torchscript",),
        ),
    ),
}


def _operation(function: str, inputs: Callable[[Case, torch.Generator], Given], tests: Grid, bench: Grid) -> Operation:
    return Operation(
        name=function,
        **public(function),
        budgets=BUDGETS,
        inputs=inputs,
        cost=lambda case, direction: _cost(function, case, direction),
        test_grid=tests,
        bench_grid=bench,
        roles={"data": ("gate", "up")},
        exemptions=EXEMPTIONS.get(function, ()),
        real_input=_real,
    )


OPERATIONS = [
    _operation("swiglu", swiglu_inputs, swiglu_tests, swiglu_bench),
    _operation("geglu", geglu_inputs, geglu_tests, geglu_bench),
    _operation("reglu", reglu_inputs, reglu_tests, reglu_bench),
]

CONTRACTS = {
    "_gated_forward_kernel": KernelContract(max_registers=128, min_load_bits=128, min_store_bits=128),
    # Four elements a thread: with five tensors there is enough under way, and 128 bits of 16-bit numbers were slower.
    "_gated_backward_kernel": KernelContract(max_registers=128, min_load_bits=64, min_store_bits=64),
}
