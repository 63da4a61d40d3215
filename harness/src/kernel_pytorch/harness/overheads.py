"""Overheads of a call beside its device time: host time, memory, compilation and launches."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

from kernel_pytorch.harness.availability import why_unavailable
from kernel_pytorch.harness.clock.cuda import graph_of
from kernel_pytorch.harness.clock.wall import host_seconds, wait_for
from kernel_pytorch.harness.discovery import discover
from kernel_pytorch.harness.exemptions import NO_GRADIENT
from kernel_pytorch.harness.interpreter import is_interpreting
from kernel_pytorch.harness.isolation import Announce, Worker, set_environment
from kernel_pytorch.harness.launches import watch_device
from kernel_pytorch.harness.memory import peak, profile_memory
from kernel_pytorch.harness.oracle import random_like, run
from kernel_pytorch.harness.results import CaseRecord, WholeCost
from kernel_pytorch.harness.scratch import scratch_folder
from kernel_pytorch.harness.technique import Case, Implementation, Level, Operation, Technique

INTERPRETED = "Triton's interpreter replaces the device"
STARTS = ("cold_start", "warm_start")
COMPILERS = (Level.COMPILE, Level.TRITON)
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
TIMEOUT = 300.0

FIGURES = tuple(name for name, field in WholeCost.model_fields.items() if field.default is None)
"""Fields of a `WholeCost` that hold a measured figure, or None."""


def call_cost(
    technique: Technique, operation: Operation, implementation: Implementation, case: Case, device: torch.device
) -> WholeCost:
    """Measure the overheads of a call that is not the first, and say of the other figures why they are missing.

    Args:
        technique: installed, so that child processes find it.
        operation: of the technique.
        implementation: of the operation.
        case: of its bench grid; on a small one the host takes longer than the device and its time shows.
        device: where.
    """
    reason = why_unavailable(technique, implementation, device, case.dtype)
    if reason is not None:
        return no_cost(operation, implementation, case, reason)
    figures: dict[str, Any] = {}
    missing: dict[str, str] = {}
    if implementation.level is Level.TRITON and device.type == "cpu" and is_interpreting():
        missing |= dict.fromkeys(("eager", "compiled", "graph", *STARTS), INTERPRETED)
    else:
        figures |= host_time(operation, implementation, case, device)
        why = {
            "compiled": "torch.compile(fullgraph=True) cannot trace it",
            "graph": "no CUDA" if device.type != "cuda" else "it cannot be captured",
        }
        missing |= {name: reason for name, reason in why.items() if name not in figures}
    arguments = operation.arguments(case, torch.Generator(device).manual_seed(0))
    call = implementation.bound_to(arguments)
    if operation.differentiable:
        figures |= asdict(profile_memory(implementation.load(), *arguments))
    else:
        missing |= dict.fromkeys(("training_peak", "saved_for_backward"), NO_GRADIENT)
        with torch.no_grad():
            figures["forward_peak"] = peak(call, device)
    if device.type == "cuda" or implementation.level is Level.TRITON:
        figures["launches"] = _launches(call, device)
    else:
        missing["launches"] = "no CUDA"
    return no_cost(operation, implementation, case).model_copy(update={**figures, "missing": missing})


def no_cost(operation: Operation, implementation: Implementation, case: Case, reason: str = "") -> WholeCost:
    """Return a record without any figure; `reason` says why."""
    missing = dict.fromkeys(FIGURES, reason) if reason else {}
    return WholeCost(
        operation=operation.name, implementation=implementation.name, case=CaseRecord.of(case), missing=missing
    )


def with_starts(
    cost: WholeCost,
    technique: Technique,
    operation: Operation,
    implementation: Implementation,
    case: Case,
    device: torch.device,
) -> WholeCost:
    """Add the cost of the first call, measured in separate processes; arguments as in `call_cost`."""
    if set(STARTS) <= set(cost.missing):
        return cost
    figures: dict[str, float] = {}
    reason = "nothing is compiled at the first call"
    if implementation.level in COMPILERS:
        figures, reason = first_calls(technique.name, operation.name, implementation.name, case, device)
    missing = dict.fromkeys(STARTS, reason) if reason else {}
    return cost.model_copy(update={**figures, "missing": cost.missing | missing})


def host_time(
    operation: Operation, implementation: Implementation, case: Case, device: torch.device
) -> dict[str, float]:
    """Measure the host time of a call, on a case small enough for the device to be faster than the host.

    Args:
        operation: makes the arguments.
        implementation: of the operation.
        case: of its bench grid.
        device: on a CPU there is no device to launch on, and the figures are those of the whole call.

    Returns:
        Seconds per call: "eager", called from Python; "compiled", from a function under
        `torch.compile(fullgraph=True)`, if it can be traced; "graph", the replay of a CUDA graph, if one can hold it.
    """
    arguments = operation.arguments(case, torch.Generator(device).manual_seed(0))
    function, call = implementation.load(), implementation.bound_to(arguments)
    calls = {"eager": call}
    torch._dynamo.reset()
    with torch.no_grad():
        with contextlib.suppress(Exception):  # TorchScript functions, and others that cannot be traced as one graph
            traced = torch.compile(lambda *a: function(*a), fullgraph=True)
            traced(*arguments)
            calls["compiled"] = lambda: traced(*arguments)
        if device.type == "cuda":
            with contextlib.suppress(RuntimeError):  # a call that waits for the device cannot be captured
                calls["graph"] = graph_of(call)[0].replay
        return host_seconds(calls, device)


def _launches(call: Callable[[], object], device: torch.device) -> int:
    """Count the kernels of one forward: all of them on CUDA, Triton's own in the interpreter."""
    with torch.no_grad():
        call()
        with watch_device(device) as names:
            call()
    return len(names)


def first_calls(
    technique: str, operation: str, implementation: str, case: Case, device: torch.device
) -> tuple[dict[str, float], str]:
    """Measure the first call in two processes, the first with empty caches on disk, the second with those it left.

    Returns:
        Seconds that the first forward and backward take longer than the second, by `STARTS`; why there are none, or "".
    """
    seconds: list[float] = []
    with scratch_folder() as folder:
        prepare = functools.partial(set_environment, dict.fromkeys(CACHES, folder))
        for _ in STARTS:
            with Worker(TIMEOUT, prepare) as worker:
                outcome = worker.call(_first_call, technique, operation, implementation, case, str(device))
            if outcome.failure:
                return {}, outcome.failure
            seconds.append(outcome.value)
    return dict(zip(STARTS, seconds, strict=True)), ""


def _first_call(
    technique: str, operation_name: str, implementation: str, case: Case, device: str, announce: Announce
) -> float:
    """In the child: seconds of the first forward and any backward beyond those of the second."""
    operation = discover().get(technique).operation(operation_name)
    function, names = operation.implementation(implementation).load(), operation.signature()
    generator = torch.Generator(device).manual_seed(0)
    arguments = operation.arguments(case, generator)
    incoming = []
    if operation.differentiable:
        incoming = random_like(run(operation.reference.load(), names, arguments).outputs, generator)
    seconds = []
    for turn in ("first call", "second call"):
        announce(turn)
        begin = time.perf_counter()
        run(function, names, arguments, incoming)
        wait_for(torch.device(device))
        seconds.append(time.perf_counter() - begin)
    return max(0.0, seconds[0] - seconds[1])
