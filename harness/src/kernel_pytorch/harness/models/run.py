"""Run the variants of a model in turns, and record what they cost."""

from __future__ import annotations

import copy
import datetime
import gc
import importlib.metadata
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType

from kernel_pytorch.harness.clock.statistics import compare_paired, median_interval
from kernel_pytorch.harness.clock.wall import step_seconds, wait_for
from kernel_pytorch.harness.environment import describe_environment
from kernel_pytorch.harness.errors import said
from kernel_pytorch.harness.isolation import Worker
from kernel_pytorch.harness.machine import reading_rate
from kernel_pytorch.harness.memory import peak
from kernel_pytorch.harness.models.record import Cost, Kernel, Origin, Row
from kernel_pytorch.harness.models.variants import LIGER, STOCK, Variant, captured
from kernel_pytorch.harness.models.works import Step, Work, elements_read, gradients_of, prepare, result_of, step_of
from kernel_pytorch.harness.models.zoo import Model
from kernel_pytorch.harness.provenance import compile_ahead, fingerprint, identify
from kernel_pytorch.harness.technique import Technique

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

OnStep = Callable[[str], None]


class _Ready(NamedTuple):
    """A variant that is ready to run, and what its first steps showed."""

    step: Step
    result: torch.Tensor
    gradients: torch.Tensor | None  # their norms, by parameter
    facts: dict[str, Any]  # fields of `Cost`


def measure(
    spec: Model,
    work: Work,
    variants: Sequence[Variant],
    techniques: Sequence[Technique],
    device: torch.device,
    *,
    rounds: int,
    on_step: OnStep = lambda what: None,
) -> tuple[Row, ...]:
    """Time the variants of a model at one work, taking turns for so many rounds; they are compared with the first.

    Those that cannot run here are left out with the reason. Liger-Kernel, which changes the classes of transformers,
    runs in another process with stock beside it.
    """
    here = [variant for variant in variants if variant is not LIGER]
    rows = _measure(spec, work, here, techniques, device, rounds, on_step)
    if LIGER not in variants:
        return rows
    if (reason := LIGER.why_not(spec, work, device)) is not None:
        return (*rows, Row(model=spec.name, work=work.name, variant=LIGER.name, reason=reason))
    return (*rows, measure_apart(LIGER, spec, work, device, rounds=rounds, on_step=on_step))


def measure_apart(
    variant: Variant, spec: Model, work: Work, device: torch.device, *, rounds: int, on_step: OnStep
) -> Row:
    """The row of a variant without techniques, measured beside stock in another process."""
    with Worker(LIGER_TIMEOUT) as worker:
        outcome = worker.call(_measure, spec, work, (STOCK, variant), (), device, rounds, on_stage=on_step)
    if outcome.failure:
        return Row(model=spec.name, work=work.name, variant=variant.name, reason=outcome.failure, failed=True)
    return outcome.value[1]  # type: ignore[no-any-return]


def _measure(
    spec: Model, work: Work, variants: Sequence[Variant], techniques: Sequence[Technique], device: torch.device,
    rounds: int, on_step: OnStep,
) -> tuple[Row, ...]:  # fmt: skip
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = RECOMPILES
    torch.manual_seed(0)
    spec = spec.as_whole() if work.whole else spec
    base = spec.build()
    ready: dict[str, _Ready] = {}
    found: dict[str, dict[str, Any]] = {}
    for variant in variants:
        on_step(f"{spec.name}, {work.name}: {variant.name}")
        if (reason := variant.why_not(spec, work, device, techniques)) is not None:
            found[variant.name] = {"reason": reason}
            continue
        try:
            ready[variant.name] = _ready(variant, spec, work, base, techniques, device)
        except Exception as error:
            found[variant.name] = {"reason": said(error), "failed": True}
    first = variants[0].name
    if first in found:  # without it there is nothing to compare with
        found |= {name: {"reason": f"{first} did not run", "failed": True} for name in ready}
        ready.clear()
    on_step(f"{spec.name}, {work.name}: {rounds} rounds")
    timed = step_seconds({name: each.step for name, each in ready.items()}, device, rounds) if ready else {}
    limit = None
    if ready and work.cached and device.type == "cuda":
        limit = 2 * elements_read(work, spec, base) / reading_rate(device)  # of bfloat16
    for name, each in ready.items():
        on_step(f"{spec.name}, {work.name}: memory and kernels of {name}")
        ratio = compare_paired(timed[first][0], timed[name][0]).speedup
        found[name] = {"cost": _cost(each, ready[first], timed[name], device, limit), "ratio": ratio}
    del ready
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return tuple(Row(model=spec.name, work=work.name, variant=v.name, **found[v.name]) for v in variants)


def _ready(
    variant: Variant, spec: Model, work: Work, base: torch.nn.Module, techniques: Sequence[Technique],
    device: torch.device,
) -> _Ready:  # fmt: skip
    model = prepare(work, copy.deepcopy(base), device)
    call, replaced = variant.prepare(spec, work, model, techniques)
    torch.manual_seed(0)
    began = time.perf_counter()
    gradients = gradients_of(work, spec, model, call, device) if work.training else None
    decodes = variant.decoder is not None
    step = step_of(work, spec, model, call, device, mode=variant.compiled, decodes=decodes)
    result = result_of(work, model, step()).float().cpu()
    wait_for(device)
    facts: dict[str, Any] = {"first_call": time.perf_counter() - began, "replaced": len(replaced)}
    if variant.graph:
        step = captured(step)
    last = [step() for _ in range(3)]
    facts["losses"] = tuple(float(loss) for loss in last) if work.training else ()
    return _Ready(step, result, gradients, facts)


def _cost(
    each: _Ready, baseline: _Ready, times: tuple[Sequence[float], Sequence[float]], device: torch.device,
    limit: float | None,
) -> Cost:  # fmt: skip
    wall, host = map(median_interval, times)
    on_gpu = device.type == "cuda"
    kernels = profile(each.step) if on_gpu else []
    return Cost(
        wall=wall.median, wall_low=wall.low, wall_high=wall.high, host=host.median,
        device=sum(kernel.seconds for kernel in kernels) or None, launches=sum(kernel.count for kernel in kernels),
        peak_bytes=peak(each.step, device) if on_gpu else None, kernels=tuple(kernels[:KERNELS]), limit=limit,
        difference=_difference(each.result, baseline.result),
        gradients=None if each.gradients is None or baseline.gradients is None
        else _difference(each.gradients, baseline.gradients), **each.facts,
    )  # fmt: skip


def _difference(result: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest, over the largest that is expected; infinite where something is not finite, or of another shape."""
    if result.shape != expected.shape or not bool(result.isfinite().all()):
        return math.inf
    return float((result - expected).abs().max() / expected.abs().max())


def profile(step: Step) -> list[Kernel]:
    """The kernels, copies and fills of a step on a GPU, the longest first."""
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step()
    found = [
        Kernel(name=event.key, seconds=event.self_device_time_total / 1e6, count=event.count)
        for event in profiler.key_averages()
        if event.device_type == DeviceType.CUDA and event.self_device_time_total > 0
    ]
    return sorted(found, key=lambda kernel: -kernel.seconds)


def failures(rows: Sequence[Row]) -> list[str]:
    """One line for each row that raised an error, or whose result or gradients differ from stock's."""
    found = []
    for row in rows:
        name, cost = f"{row.model}, {row.work}, {row.variant}", row.cost
        if row.failed:
            found.append(f"{name}: {row.reason}")
        if cost is not None and not cost.difference <= TOLERANCE:
            found.append(f"{name}: its result is {cost.difference:.1%} from stock's; allowed is {TOLERANCE:.0%}")
        if cost is not None and not (cost.gradients or 0.0) <= OF_GRADIENTS:
            found.append(f"{name}: its gradients are {cost.gradients:.1%} from stock's; allowed is {OF_GRADIENTS:.0%}")
    return found


def origin(techniques: Sequence[Technique], device: torch.device, *, tiny: bool) -> Origin:
    """When, where and from which sources a run of now is measured."""
    environment = describe_environment(device)
    compile_ahead(techniques, environment)
    return Origin(
        date=datetime.date.today().isoformat(),
        environment=environment,
        tiny=tiny,
        transformers=importlib.metadata.version("transformers"),
        packages=tuple(technique.name for technique in techniques),
        identities={technique.name: fingerprint(identify(technique, environment)) for technique in techniques},
    )
