"""The losses of the first steps of training, stock beside ours: what shows that a model learns the same.

In float32 both must be the same to 1e-4. In 16 bits they cannot be: rounding moves a loss, and AdamW, which divides by
the size of a gradient, carries that on. How far rounding moves it is measured too: stock runs again with other rounding
errors, of two seeds, and ours may be as far from stock as these runs are from each other, but for luck.

Stock is also trained with weights in 16 bits and everything else in float32. The distances of ours and of stock from
that run decide nothing. They help to explain a difference: which of the two has the larger rounding errors.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from kernel_pytorch.harness.models.variants import STOCK, VARIANTS, Variant
from kernel_pytorch.harness.models.works import find_work, prepare, step_of
from kernel_pytorch.harness.models.zoo import Model
from kernel_pytorch.harness.technique import Technique

STEPS = 20
IN_FLOAT32 = 1e-4
SEEDS = (1, 2)
LUCK = 2.0
"""How many times the spread of three runs a fourth may be away: the largest of three distances is one draw."""
SHARE = 1 / 12
"""Of the elements that are moved by a unit in the last place: as large a variance as that of rounding to nearest."""
COPIES = {
    "cat", "clone", "constant_pad_nd", "embedding", "gather", "index", "index_select", "neg", "select_backward",
    "slice_backward", "stack", "where",
}  # fmt: skip
"""Operators whose results are elements of what they are given."""
OURS = next(each for each in VARIANTS if each.name == "ours")


@dataclass(frozen=True)
class Curves:
    """Losses of `STEPS` steps from the same weights on the same batch, without dropout.

    Attributes:
        dtype: of weights and products.
        stock: of the model as it comes.
        ours: with the techniques patched in.
        seeds: of stock with other rounding errors, by seed; none in float32.
        exact: of stock that keeps weights in 16 bits and computes in float32; none in float32.
    """

    dtype: str
    stock: tuple[float, ...]
    ours: tuple[float, ...]
    seeds: tuple[tuple[float, ...], ...] = ()
    exact: tuple[float, ...] = ()

    @property
    def difference(self) -> float:
        """How far ours is from stock."""
        return distance(self.ours, self.stock)

    @property
    def allowed(self) -> float:
        """How far it may be."""
        if not self.seeds:
            return IN_FLOAT32
        return LUCK * max(distance(a, b) for a, b in itertools.combinations((self.stock, *self.seeds), 2))

    @property
    def errors(self) -> tuple[float, float] | None:
        """How far ours and stock are from float32; None where they are in it."""
        return (distance(self.ours, self.exact), distance(self.stock, self.exact)) if self.exact else None


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
    *,
    tiny: bool,
    on_step: Callable[[str], None] = lambda what: None,
) -> Curves:
    """Train a model for `STEPS` steps, as it comes and patched; in 16 bits also with other rounding errors.

    Args:
        spec: the model.
        techniques: those that are patched in.
        device: where; float32 on a CPU, bfloat16 on a GPU.
        tiny: whether it is the model for a CPU.
        on_step: called with what is done next.
    """
    torch.manual_seed(0)
    base = without_dropout(spec.build(tiny=tiny))

    def trained(variant: Variant, seed: int | None = None, *, exact: bool = False) -> tuple[str, tuple[float, ...]]:
        how = "" if seed is None else f", seed {seed} of rounding"
        on_step(f"{spec.name}: {STEPS} steps, {variant.name}{', in float32' if exact else how}")
        return _trained(variant, spec, base, techniques, device, seed, exact=exact, tiny=tiny)

    (dtype, stock), (_, ours) = trained(STOCK), trained(OURS)
    if dtype == "float32":
        return Curves(dtype, stock, ours)
    seeds = tuple(trained(STOCK, seed)[1] for seed in SEEDS)
    return Curves(dtype, stock, ours, seeds, trained(STOCK, exact=True)[1])


def _trained(
    variant: Variant, spec: Model, base: torch.nn.Module, techniques: Sequence[Technique], device: torch.device,
    seed: int | None, *, exact: bool, tiny: bool,
) -> tuple[str, tuple[float, ...]]:  # fmt: skip
    """The dtype of the weights, and the losses."""
    work = find_work("training")
    model = prepare(work, copy.deepcopy(base), device)
    call, _ = variant.prepare(spec, work, model, techniques)
    step = step_of(work, spec, model, in_float32(model) if exact else call, device, tiny=tiny)
    with contextlib.nullcontext() if seed is None else OtherRounding(seed, device):
        losses = [step() for _ in range(STEPS)]  # read at the end: the device need not wait for the host
    dtype = next(model.parameters()).dtype
    del model, call, step
    gc.collect()  # what is patched refers to itself, and the next run needs the memory
    return str(dtype).removeprefix("torch."), tuple(float(loss) for loss in losses)


def in_float32(model: torch.nn.Module) -> Callable[..., Any]:
    """A call of a model that computes in float32, and rounds nothing but the gradients of its weights."""

    def call(**inputs: Any) -> Any:
        tensors = itertools.chain(model.named_parameters(), model.named_buffers())
        wide = {name: t.float() if t.is_floating_point() else t for name, t in tensors}
        return torch.func.functional_call(model, wide, (), widened(inputs))

    return call


def widened(inputs: Any) -> Any:
    """The same tensors in float32, if they are floating-point ones."""
    return tree_map_only(torch.Tensor, lambda t: t.float() if t.is_floating_point() else t, inputs)


def without_dropout(model: torch.nn.Module) -> torch.nn.Module:
    """The same model: which elements are dropped depends on the kernel, and would be all that the losses show."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


class OtherRounding(TorchDispatchMode):
    """Gives what PyTorch computes in 16 bits, forward and backward, other rounding errors of the same size.

    Args:
        seed: of the elements that are moved.
        device: where the results are.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__()
        self._generator = torch.Generator(device).manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Call the operator, and move what it rounded."""
        result = func(*args, **(kwargs or {}))
        return tree_map_only(torch.Tensor, self._move, result) if _rounds(func, args) else result

    def _move(self, result: torch.Tensor) -> torch.Tensor:
        if result.dtype not in (torch.bfloat16, torch.float16):
            return result
        drawn = torch.rand(result.shape, generator=self._generator, device=result.device)
        # Between half and one unit in the last place, which rounding makes a whole one.
        unit = torch.finfo(result.dtype).eps / 2
        factor = 1.0 + unit * ((drawn < SHARE / 2).float() - (drawn > 1 - SHARE / 2).float())
        moved = (result * factor).to(result.dtype)
        return torch.where(moved.isfinite(), moved, result)  # the largest number, which masks hold, stays finite


def _rounds(func: Any, args: Sequence[Any]) -> bool:
    """Whether an operator rounds its results, and returns them in new memory."""
    if any(each.alias_info is not None for each in func._schema.returns):
        return False
    name, first = func.overloadpacket.__name__, next(iter(args), None)
    if name == "_to_copy":
        return isinstance(first, torch.Tensor) and first.dtype in (torch.float32, torch.float64)
    return name not in COPIES and any(isinstance(each, torch.Tensor) for each in args)
