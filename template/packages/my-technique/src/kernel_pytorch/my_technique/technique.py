"""The declaration: what this package offers the harness. Imports nothing but torch and the declaration's types."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernel_pytorch.harness.technique import (
    Case,
    Cost,
    Direction,
    Given,
    Operation,
    Technique,
    grid,
    point,
)

HERE = "kernel_pytorch.my_technique"
FUNCTION = "my_technique"
LEVELS = ("reference", "native", "torchscript", "compile")


def inputs(case: Case, generator: torch.Generator) -> Given:
    """Give x `(*shape)`; beta."""
    x = torch.randn(case.shape, generator=generator, device=generator.device)
    return (x.to(case.dtype),), {"beta": case.sizes.get("beta", 1.0)}


def cost(case: Case, direction: Direction) -> Cost:
    """Forward: read x, write y. Backward: read dy and x, write dx. Five FLOPs an element forward, nine backward."""
    elements = torch.Size(case.shape).numel()
    passes = {Direction.FORWARD: 2, Direction.BACKWARD: 3, Direction.BOTH: 5}[direction]
    flops = {Direction.FORWARD: 5, Direction.BACKWARD: 9, Direction.BOTH: 14}[direction]
    return Cost(passes * elements * case.dtype.itemsize, flops * elements)


def real_input(activations: Tensor, dtype: torch.dtype) -> Given:
    """Hidden states as they are."""
    return (activations.to(dtype),), {"beta": 1.0}


X = [-40.0, -1.0, 0.0, 1e-9, 2.0]
known = [((X,), {"beta": 3.0}, [value / (1.0 + math.exp(-3.0 * value)) for value in X])]
"""Results that do not come from the definition, which is held against them."""

test_grid = grid(
    point("typical", shape=(61, 96), core=True, reason="no size a power of two"),
    point("steep", shape=(31, 64), beta=1.702, core=True, reason="a scalar that no 16-bit float holds"),
    point("one column", shape=(257, 1), reason="one more than a power of two; nothing to vectorise in a row"),
    point("no rows", shape=(0, 64), reason="nothing to do"),
    point("one dimension", shape=(4099,), reason="a prime number of elements: blocks end in the middle"),
    point("four dimensions", shape=(2, 3, 5, 7), reason="leading dimensions are collapsed"),
    dtypes=(torch.float32, torch.float16, torch.bfloat16),
)

# Shapes of published models: replace them by those that meet your technique.
bench_grid = grid(
    point("Llama 3.1 8B MLP, prefill 128", shape=(128, 14336)),
    point("Llama 3.1 8B MLP, prefill 8192", shape=(8192, 14336), devices=("cuda",)),
    dtypes=(torch.bfloat16,),
)

technique = Technique(
    name="my-technique",
    title="My technique",
    paper="https://arxiv.org/abs/1710.05941",
    operations=[
        Operation(
            name=FUNCTION,
            function=f"{HERE}:{FUNCTION}",
            levels=LEVELS,
            inputs=inputs,
            cost=cost,
            test_grid=test_grid,
            bench_grid=bench_grid,
            known=known,
            roles={"data": ("x",)},
            real_input=real_input,
        )
    ],
    levels=f"{HERE}.levels:LADDER",
)
