"""Run the variants of a model in turns, and record what they cost."""

from __future__ import annotations

import copy
import datetime
import gc
import importlib
import importlib.metadata
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from kernel_pytorch.harness.clock.statistics import compare_paired, median_interval
from kernel_pytorch.harness.clock.wall import host_seconds, step_seconds, wait_for
from kernel_pytorch.harness.environment import describe_environment
from kernel_pytorch.harness.errors import said
from kernel_pytorch.harness.isolation import Worker
from kernel_pytorch.harness.machine import reading_rate
from kernel_pytorch.harness.memory import peak
from kernel_pytorch.harness.models.record import Cost, Kernel, Origin, Row
from kernel_pytorch.harness.models.variants import LIGER, STOCK, Variant, captured
from kernel_pytorch.harness.models.works import Step, Work, elements_read, gradients_of, prepare, result_of, step_of
from kernel_pytorch.harness.models.zoo import Model
from kernel_pytorch.harness.provenance import fingerprint, identify
from kernel_pytorch.harness.tables import PrintableTable, table
from kernel_pytorch.harness.technique import Case, Direction, Implementation, Level, Operation, Technique
from kernel_pytorch.harness.workload import Job, Workload

RECOMPILES = 64
"""All variants of a model run the same code, and each is compiled separately."""

KERNELS = 12
"""Kernels of a step that are recorded: those that take longest."""

LIGER_TIMEOUT = 3600.0
"""Seconds for the process that measures Liger-Kernel."""

TOLERANCE = 0.05
"""Largest relative difference of the first loss or of logits in 16 bits, after all layers."""

OF_GRADIENTS = 0.1
"""The same for the norms of gradients: dropout, which draws other elements, moves them by a few percent, and a missing
piece of a layer by far more."""


@dataclass
class _Prepared:
    """A variant that is ready to run, and what its first steps showed: gradients are their norms, by parameter."""

    variant: Variant
    step: Step
    first_call: float
    replaced: list[str]
    result: torch.Tensor
    gradients: torch.Tensor | None
    losses: list[float]


def measure(
    spec: Model,
    work: Work,
    variants: Sequence[Variant],
    techniques: Sequence[Technique],
    device: torch.device,
    *,
    rounds: int,
    on_step: Callable[[str], None] = lambda what: None,
) -> tuple[Row, ...]:
    """Time the variants of a model at one work, taking turns.

    Args:
        spec: the model.
        work: what it does.
        variants: the others are compared with the first. Those that cannot run here are left out with the reason;
            Liger-Kernel, which changes the classes of transformers, runs in another process with stock beside it.
        techniques: those that are patched in.
        device: where.
        rounds: samples of each variant; at least `statistics.FEWEST_ROUNDS`.
        on_step: called with what is done next.
    """
    here = [variant for variant in variants if variant is not LIGER]
    rows = _measure(spec, work, here, techniques, device, rounds, on_step)
    if LIGER not in variants:
        return rows
    if (reason := LIGER.why_not(spec, work, device)) is not None:
        return (*rows, _row(spec, work, LIGER, reason=reason))
    return (*rows, measure_apart(LIGER, spec, work, device, rounds=rounds, on_step=on_step))


def measure_apart(
    variant: Variant, spec: Model, work: Work, device: torch.device, *, rounds: int,
    on_step: Callable[[str], None] = lambda what: None,
) -> Row:  # fmt: skip
    """The row of a variant without techniques, measured beside stock in another process."""
    with Worker(LIGER_TIMEOUT) as worker:
        outcome = worker.call(_measure, spec, work, (STOCK, variant), (), device, rounds, on_stage=on_step)
    if outcome.failure:
        return _row(spec, work, variant, reason=outcome.failure, failed=True)
    return next(row for row in outcome.value if row.variant == variant.name)


def _measure(
    spec: Model, work: Work, variants: Sequence[Variant], techniques: Sequence[Technique], device: torch.device,
    rounds: int, on_step: Callable[[str], None],
) -> tuple[Row, ...]:  # fmt: skip
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = RECOMPILES
    torch.manual_seed(0)
    spec = spec.as_whole() if work.whole else spec
    base = spec.build()
    ready: list[_Prepared] = []
    rows: dict[str, Row] = {}
    for variant in variants:
        on_step(f"{spec.name}, {work.name}: {variant.name}")
        reason, failed = variant.why_not(spec, work, device), False
        if reason is None and variant.ours and not techniques:
            reason = "no technique is installed"
        if reason is None and variant.decoder == "ours" and not any(each.decoder for each in techniques):
            reason = "no technique that is installed, or named with --only, has a decoder"
        if reason is None:
            try:
                ready.append(_ready(variant, spec, work, base, techniques, device))
                continue
            except Exception as error:
                reason, failed = said(error), True
        rows[variant.name] = _row(spec, work, variant, reason=reason, failed=failed)
    if variants[0].name in rows:  # without it there is nothing to compare with
        reason = f"{variants[0].name} did not run"
        rows |= {each.variant.name: _row(spec, work, each.variant, reason=reason, failed=True) for each in ready}
        ready.clear()
    on_step(f"{spec.name}, {work.name}: {rounds} rounds")
    steps = {str(index): each.step for index, each in enumerate(ready)}
    timed = step_seconds(steps, device, rounds) if steps else {}
    limit = None
    if ready and work.cached and device.type == "cuda":
        limit = 2 * elements_read(work, spec, base) / reading_rate(device)  # of bfloat16
    for each, times in zip(ready, timed.values(), strict=True):
        on_step(f"{spec.name}, {work.name}: memory and kernels of {each.variant.name}")
        ratio = compare_paired(timed["0"][0], times[0]).speedup
        cost = _cost(each, ready[0], times, device, limit)
        rows[each.variant.name] = _row(spec, work, each.variant, cost=cost, ratio=ratio)
    del ready, steps
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return tuple(rows[variant.name] for variant in variants)


def _row(spec: Model, work: Work, variant: Variant, **found: Any) -> Row:
    return Row(model=spec.name, work=work.name, variant=variant.name, **found)


def _ready(
    variant: Variant, spec: Model, work: Work, base: torch.nn.Module, techniques: Sequence[Technique],
    device: torch.device,
) -> _Prepared:  # fmt: skip
    model = prepare(work, copy.deepcopy(base), device)
    call, replaced = variant.prepare(spec, work, model, techniques)
    torch.manual_seed(0)
    began = time.perf_counter()
    gradients = gradients_of(work, spec, model, call, device) if work.training else None
    decodes = variant.decoder is not None
    step = step_of(work, spec, model, call, device, mode=variant.compiled, decodes=decodes)
    result = result_of(work, model, step()).float().cpu()
    wait_for(device)
    seconds = time.perf_counter() - began
    if variant.graph:
        step = captured(step)
    last = [step() for _ in range(3)]
    losses = [float(loss) for loss in last] if work.training else []
    return _Prepared(variant, step, seconds, replaced, result, gradients, losses)


def _cost(
    each: _Prepared, baseline: _Prepared, times: tuple[Sequence[float], Sequence[float]], device: torch.device,
    limit: float | None,
) -> Cost:  # fmt: skip
    wall, host = map(median_interval, times)
    on_gpu = device.type == "cuda"
    kernels = profile(each.step) if on_gpu else []
    return Cost(
        wall=wall.median, wall_low=wall.low, wall_high=wall.high, host=host.median,
        device=sum(kernel.seconds for kernel in kernels) or None, launches=sum(kernel.count for kernel in kernels),
        peak_bytes=peak(each.step, device) if on_gpu else None, first_call=each.first_call,
        kernels=tuple(kernels[:KERNELS]), losses=tuple(each.losses), replaced=len(each.replaced), limit=limit,
        difference=_difference(each.result, baseline.result),
        gradients=None if each.gradients is None or baseline.gradients is None
        else _difference(each.gradients, baseline.gradients),
    )  # fmt: skip


def _difference(result: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest, over the largest that is expected; infinite where something is not finite, or of another shape."""
    if result.shape != expected.shape or not bool(result.isfinite().all()):
        return math.inf
    return float((result - expected).abs().max() / expected.abs().max())


def profile(step: Step) -> list[Kernel]:
    """The kernels, copies and fills of a step on a GPU, the longest first."""
    step()
    with torch_profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
    found = [
        Kernel(name=event.key, seconds=event.self_device_time_total / 1e6, count=event.count)
        for event in profiler.key_averages()
        if event.device_type == DeviceType.CUDA and event.self_device_time_total > 0
    ]
    return sorted(found, key=lambda kernel: -kernel.seconds)


def failures(rows: Sequence[Row], variants: Sequence[Variant]) -> list[str]:
    """One line for each of these variants that raised an error, or whose result or gradients differ from stock's."""
    found = []
    for row in rows:
        name = f"{row.model}, {row.work}, {row.variant}"
        if row.variant not in [variant.name for variant in variants]:
            continue
        if row.failed:
            found.append(f"{name}: {row.reason}")
        elif row.cost is not None:
            for what, difference, allowed in (
                ("result is", row.cost.difference, TOLERANCE),
                ("gradients are", row.cost.gradients or 0.0, OF_GRADIENTS),
            ):
                if not difference <= allowed:
                    found.append(f"{name}: its {what} {difference:.1%} from stock's; allowed is {allowed:.0%}")
    return found


def origin(techniques: Sequence[Technique], device: torch.device, *, tiny: bool) -> Origin:
    """When, where and from which sources a run of now is measured."""
    environment = describe_environment(device)
    return Origin(
        date=datetime.date.today().isoformat(),
        environment=environment,
        tiny=tiny,
        transformers=importlib.metadata.version("transformers"),
        packages=tuple(technique.name for technique in techniques),
        identities={technique.name: fingerprint(identify(technique, environment)) for technique in techniques},
    )


WAYS = ("forward", "with gradients", "and backward")


HostCost = tuple[str, str, tuple[float, ...], tuple[float, ...]]
"""A function, its default level here, and seconds of a call by `WAYS` of that level, and of level "native"."""


def host_costs(techniques: Iterable[Technique], device: torch.device) -> Iterable[HostCost]:
    """Measure every function whose default level here is not "native" and can be timed beside it."""
    for technique in techniques:
        for operation in technique.operations:
            cases = [case for case in operation.bench_grid.cases(device.type) if case.dtype.itemsize == 2]
            if not operation.function or not cases:
                continue
            case = min(cases, key=lambda case: operation.cost(case, Direction.FORWARD).bytes)
            name = operation.function.rpartition(":")[2]
            level = technique.ladder().default(name, device, case.dtype)
            native = next((i for i in operation.implementations if i.level is Level.NATIVE), None)
            ours = next((i for i in operation.implementations if i.level.value == level), None)
            if ours is None or native is None or ours is native:
                continue
            each = {"ours": ours, "native": native}
            calls = {
                f"{who} {way}": call
                for who, implementation in each.items()
                for way, call in _ways(technique, operation, case, implementation, device).items()
            }
            found = host_seconds(calls, device).items()
            own, other = (tuple(seconds for name, seconds in found if name.startswith(who)) for who in each)
            yield operation.name, level, own, other


def _ways(
    technique: Technique, operation: Operation, case: Case, implementation: Implementation, device: torch.device
) -> dict[str, Callable[[], Any]]:
    """The call without gradients and, of an operation that has them, with a graph and with the backward."""

    def of(direction: Direction) -> Workload:
        return Workload.of(Job(technique, operation, case, direction), 1, torch.Generator(device).manual_seed(0))

    without = of(Direction.FORWARD).timed_call(implementation)
    if not operation.differentiable:
        return {WAYS[0]: lambda: without(0)}
    both = of(Direction.BOTH)
    with_backward, with_graph = both.timed_call(implementation), implementation.bound_to(both.arguments[0])
    return dict(zip(WAYS, (lambda: without(0), with_graph, lambda: with_backward(0)), strict=True))


def host_table(costs: Iterable[HostCost], device: torch.device) -> PrintableTable:
    """Microseconds, and the ratio to PyTorch's own level."""
    whole = "On a CPU there is no device to launch on: these are whole calls." if device.type == "cpu" else ""
    rows = []
    for function, level, ours, native in costs:
        pairs = zip([1e6 * seconds for seconds in ours], ours, native, strict=True)
        cells = [f"{us:{'.0f' if us >= 1000.0 else '.3g'}} ({own / other:.2f}x)" for us, own, other in pairs]
        rows.append((function, level, *cells, *["-"] * (len(WAYS) - len(cells))))
    title = "Host time of a call, us (x of level native)"
    return table(title, ("function", "level", *WAYS), rows, whole, text=2, width=80)
