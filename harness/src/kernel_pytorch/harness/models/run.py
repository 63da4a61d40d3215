"""Run the variants of a model in turns, and keep what they cost."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from kernel_pytorch.harness.clock.statistics import compare_paired, median_interval
from kernel_pytorch.harness.clock.wall import step_seconds, wait_for
from kernel_pytorch.harness.isolation import Announce
from kernel_pytorch.harness.memory import peak
from kernel_pytorch.harness.models.profiles import profile
from kernel_pytorch.harness.models.record import Cost, Ratio, Row
from kernel_pytorch.harness.models.variants import Variant, captured
from kernel_pytorch.harness.models.works import Step, Work, gradients_of, prepare, step_of
from kernel_pytorch.harness.models.zoo import Model
from kernel_pytorch.harness.technique import Technique

RECOMPILES = 64
"""All variants of a model run the same code, and each is a compilation of its own."""


@dataclass
class Prepared:
    """A variant that is ready to run.

    Attributes:
        variant: which one.
        step: does its work once.
        first_call: seconds of the first step, which compiles.
        replaced: what was patched in.
        result: of the first step.
        gradients: their norms, by parameter, where there is training.
        times: seconds of a step, one a round.
        host: seconds until a step returned, without waiting for the device, one a round.
    """

    variant: Variant
    step: Step
    first_call: float
    replaced: list[str]
    result: torch.Tensor
    gradients: torch.Tensor | None = None
    losses: list[float] = field(default_factory=list)
    times: Sequence[float] = ()
    host: Sequence[float] = ()


def measure(
    spec: Model,
    work: Work,
    variants: Sequence[Variant],
    techniques: Sequence[Technique],
    device: torch.device,
    *,
    tiny: bool,
    rounds: int,
    on_step: Callable[[str], None] = lambda what: None,
) -> tuple[Row, ...]:
    """Time the variants of a model at one work, taking turns.

    Args:
        spec: the model.
        work: what it does.
        variants: the first is what the others are compared with. What cannot run here is left out with its reason.
        techniques: those that are patched in.
        device: where.
        tiny: whether it is the model for a CPU.
        rounds: of a step, or several, each; at least `statistics.FEWEST_ROUNDS`.
        on_step: called with what is done next.
    """
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = RECOMPILES
    torch.manual_seed(0)
    base = spec.build(tiny=tiny)
    ready: list[Prepared] = []
    rows: dict[str, Row] = {}
    for variant in variants:
        on_step(f"{spec.name}, {work.name}: {variant.name}")
        reason, failed = variant.why_not(spec, work, device), False
        if reason is None and variant.ours and not techniques:
            reason = "no technique is installed"
        if reason is None:
            try:
                ready.append(_ready(variant, spec, work, base, techniques, device, tiny=tiny))
                continue
            except Exception as error:
                reason, failed = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}", True
        rows[variant.name] = Row(model=spec.name, work=work.name, variant=variant.name, reason=reason, failed=failed)
    if variants[0].name in rows:  # without it there is nothing to compare with
        reason = f"{variants[0].name} did not run"
        names = [each.variant.name for each in ready]
        rows |= {n: Row(model=spec.name, work=work.name, variant=n, reason=reason, failed=True) for n in names}
        ready.clear()
    on_step(f"{spec.name}, {work.name}: {rounds} rounds")
    steps = {str(index): each.step for index, each in enumerate(ready)}
    timed = step_seconds(steps, device, rounds) if steps else {}
    for each, (times, host) in zip(ready, timed.values(), strict=True):
        each.times, each.host = times, host
    for each in ready:
        on_step(f"{spec.name}, {work.name}: memory and kernels of {each.variant.name}")
        rows[each.variant.name] = _row(spec, work, each, ready[0], device)
    del ready
    _free(device)
    return tuple(rows[variant.name] for variant in variants)


def measure_in_child(
    spec: Model, work: Work, variants: Sequence[Variant], device: torch.device, tiny: bool, rounds: int,
    announce: Announce,
) -> tuple[Row, ...]:  # fmt: skip
    """`measure` without techniques, for `isolation.Worker`."""
    return measure(spec, work, variants, (), device, tiny=tiny, rounds=rounds, on_step=announce)


def _ready(
    variant: Variant, spec: Model, work: Work, base: torch.nn.Module, techniques: Sequence[Technique],
    device: torch.device, *, tiny: bool,
) -> Prepared:  # fmt: skip
    model = prepare(work, copy.deepcopy(base), device)
    call, replaced = variant.prepare(spec, work, model, techniques)
    torch.manual_seed(0)
    began = time.perf_counter()
    gradients = gradients_of(work, spec, model, call, device, tiny=tiny) if work.training else None
    step = step_of(work, spec, model, call, device, tiny=tiny)
    result = step().float().cpu()
    wait_for(device)
    seconds = time.perf_counter() - began
    if variant.graph:
        step = captured(step)
    ready = Prepared(variant, step, seconds, replaced, result, gradients)
    for _ in range(3):
        last = step()
        if work.training:
            ready.losses.append(float(last))
    return ready


def _row(spec: Model, work: Work, each: Prepared, baseline: Prepared, device: torch.device) -> Row:
    wall = median_interval(each.times)
    speedup = compare_paired(baseline.times, each.times).speedup
    on_gpu = device.type == "cuda"
    kernels = profile(each.step) if on_gpu else []
    cost = Cost(
        wall=wall.median, wall_low=wall.low, wall_high=wall.high, host=median_interval(each.host).median,
        device=sum(kernel.seconds for kernel in kernels) or None, launches=sum(kernel.count for kernel in kernels),
        peak_bytes=peak(each.step, device) if on_gpu else None, first_call=each.first_call,
        kernels=tuple(kernels[:12]), losses=tuple(each.losses), replaced=len(each.replaced),
        difference=_difference(each.result, baseline.result),
        gradients=None if each.gradients is None or baseline.gradients is None
        else _difference(each.gradients, baseline.gradients),
    )  # fmt: skip
    ratio = Ratio(median=speedup.median, low=speedup.low, high=speedup.high)
    return Row(model=spec.name, work=work.name, variant=each.variant.name, cost=cost, ratio=ratio)


def _difference(result: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest, over the largest that is expected; infinite where something is not finite, or of another shape."""
    if result.shape != expected.shape or not bool(result.isfinite().all()):
        return float("inf")
    return float((result - expected).abs().max() / expected.abs().max())


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
