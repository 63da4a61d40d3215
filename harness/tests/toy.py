"""A technique that is read at a glance, for the harness's own tests: a gate, at three levels and one that is absent."""

from __future__ import annotations

import torch
from torch import Tensor

from kernel_pytorch.harness.technique import (
    Case,
    Cost,
    Direction,
    Given,
    Implementation,
    Level,
    Operation,
    Technique,
    grid,
    point,
)


def default(operation: str, device: torch.device, dtype: torch.dtype) -> str:
    return "native"


def unavailable(level: str, device: torch.device, dtype: torch.dtype) -> str | None:
    return "the toy has no kernel" if level == "cuda" else None


def reference(x: Tensor, weight: Tensor, factor: float) -> Tensor:
    return torch.sigmoid(x * weight) * factor


def native(x: Tensor, weight: Tensor, factor: float) -> Tensor:
    return torch.mul(x, weight).sigmoid().mul(factor)


# Not TorchInductor: nothing here depends on it, and it would take seconds per shape.
compiled = torch.compile(reference, fullgraph=True, backend="aot_eager")


def cuda(x: Tensor, weight: Tensor, factor: float) -> Tensor:
    raise AssertionError("never called: this level is unavailable")


def inputs(case: Case, generator: torch.Generator) -> Given:
    """Give x `(rows, columns)`, weight `(columns,)`; factor."""
    shapes = ((case.rows, case.columns), (case.columns,))
    x, weight = (torch.randn(s, generator=generator, device=generator.device).to(case.dtype) for s in shapes)
    return (x, weight), {"factor": 1.5}


def cost(case: Case, direction: Direction) -> Cost:
    return Cost(2 * case.rows * case.columns * case.dtype.itemsize, 3 * case.rows * case.columns)


gate = Operation(
    name="gate",
    levels=[
        Implementation("reference", Level.REFERENCE, "toy:reference"),
        Implementation("native", Level.NATIVE, "toy:native"),
        Implementation("compile", Level.COMPILE, "toy:compiled"),
        Implementation("cuda", Level.CUDA, "toy:cuda"),
    ],
    inputs=inputs,
    cost=cost,
    test_grid=grid(
        point("plain", core=True, rows=4, columns=16),
        point("one column", reason="nothing to vectorise", rows=5, columns=1),
        dtypes=(torch.float32, torch.float16),
    ),
    bench_grid=grid(
        point("small", rows=8, columns=64),
        point("larger", rows=16, columns=64),
        point("largest", rows=32, columns=64),
        dtypes=(torch.float32,),
    ),
    roles={"data": ("x",)},
)

technique = Technique(name="toy", title="a gate [small]", paper="", operations=[gate], levels="toy")
