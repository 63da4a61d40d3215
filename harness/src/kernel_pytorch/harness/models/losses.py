"""The losses of the first steps of training, stock beside ours, which show that a patched model learns the same.

In float32 both must be the same to 1e-4. In 16 bits rounding moves a loss, and AdamW, which divides by the size of a
gradient, carries that on. So stock is also trained with weights in 16 bits and everything else in float32, and ours may
be no farther from that run than stock is, apart from chance.
"""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from kernel_pytorch.harness.models.record import Curves
from kernel_pytorch.harness.models.variants import OURS, STOCK, Variant
from kernel_pytorch.harness.models.works import find_work, prepare, step_of
from kernel_pytorch.harness.models.zoo import Model
from kernel_pytorch.harness.technique import Technique

STEPS = 20
IN_FLOAT32 = 1e-4
CHANCE = 2.0
"""Each distance from float32 is one draw of rounding errors, so ours may be larger than stock's by this factor."""


def curves(dtype: str, stock: Sequence[float], ours: Sequence[float], exact: Sequence[float] = ()) -> Curves:
    """The losses with their distances, and the largest that is allowed."""
    errors = (distance(ours, exact), distance(stock, exact)) if exact else None
    return Curves(
        dtype=dtype, stock=tuple(stock), ours=tuple(ours), exact=tuple(exact), errors=errors,
        difference=distance(ours, stock), allowed=CHANCE * errors[1] if errors else IN_FLOAT32,
    )  # fmt: skip


def distance(losses: Sequence[float], others: Sequence[float]) -> float:
    """The largest difference of a step, over the loss; infinite where one is not finite."""
    found = torch.tensor([losses, others], dtype=torch.float64)
    if not bool(found.isfinite().all()):
        return float("inf")
    return float(((found[0] - found[1]) / found[1]).abs().max())


def compare_losses(
    spec: Model,
    techniques: Sequence[Technique],
    device: torch.device,
    on_step: Callable[[str], None] = lambda what: None,
) -> Curves:
    """Train a model for `STEPS` steps, as it comes and patched; in 16 bits, as on a GPU, also stock in float32."""
    torch.manual_seed(0)
    base = spec.build()
    for module in base.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # which elements are dropped depends on the kernel
    work, dtype = find_work("training"), torch.float32

    def trained(variant: Variant, *, exact: bool = False) -> list[float]:
        nonlocal dtype
        on_step(f"{spec.name}: {STEPS} steps, {variant.name}{', in float32' if exact else ''}")
        model = prepare(work, copy.deepcopy(base), device)
        call, _ = variant.prepare(spec, work, model, techniques)
        step = step_of(work, spec, model, in_float32(model) if exact else call, device)
        losses = [step() for _ in range(STEPS)]  # read at the end: the device need not wait for the host
        dtype = next(model.parameters()).dtype
        del model, call, step
        gc.collect()  # a patched model refers to itself, and the next run needs the memory
        return [float(loss) for loss in losses]

    stock, ours = trained(STOCK), trained(OURS)
    exact = [] if dtype == torch.float32 else trained(STOCK, exact=True)
    return curves(str(dtype).removeprefix("torch."), stock, ours, exact)


def in_float32(model: torch.nn.Module) -> Callable[..., Any]:
    """A call of a model that computes in float32, and rounds only the gradients of its weights."""

    def call(**inputs: Any) -> Any:
        tensors = dict(itertools.chain(model.named_parameters(), model.named_buffers()))
        return torch.func.functional_call(model, widened(tensors), (), widened(inputs))

    return call


def widened(tensors: Any) -> Any:
    """The same in float32 where they are floating-point tensors."""
    return tree_map_only(torch.Tensor, lambda t: t.float() if t.is_floating_point() else t, tensors)
