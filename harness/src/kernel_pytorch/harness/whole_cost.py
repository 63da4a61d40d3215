"""Everything that a call costs beside device time: host time, memory, compilation, launches."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from kernel_pytorch.harness.availability import why_unavailable
from kernel_pytorch.harness.compile_cost import compile_cost, host_time
from kernel_pytorch.harness.exemptions import NO_GRADIENT
from kernel_pytorch.harness.interpreter import is_interpreting
from kernel_pytorch.harness.launches import watch_device
from kernel_pytorch.harness.memory import peak, profile_memory
from kernel_pytorch.harness.results import CaseRecord, WholeCost
from kernel_pytorch.harness.technique import Case, Implementation, Level, Operation, Technique

INTERPRETED = "Triton's interpreter stands in for the device"
STARTS = ("cold_start", "warm_start")
COMPILERS = (Level.COMPILE, Level.TRITON)


def call_cost(
    technique: Technique, operation: Operation, implementation: Implementation, case: Case, device: torch.device
) -> WholeCost:
    """Measure what a call costs in a process that has called before, and say of the rest why it is not measured.

    Args:
        technique: installed, so that child processes find it.
        operation: of the technique.
        implementation: of the operation.
        case: of its bench grid; a small one shows the host, since the device does not hide it.
        device: where.
    """
    figures: dict[str, Any] = {}
    missing: dict[str, str] = {}
    reason = why_unavailable(technique, implementation, device, case.dtype)
    if reason is not None:
        return no_cost(operation, implementation, case, reason)
    interpreted = implementation.level is Level.TRITON and device.type == "cpu" and is_interpreting()
    if interpreted:
        missing |= dict.fromkeys(("eager", "compiled", "graph", *STARTS), INTERPRETED)
    else:
        host = host_time(operation, implementation.name, case, device)
        figures |= {"eager": host.eager, "compiled": host.compiled, "graph": host.graph}
        if host.compiled is None:
            missing["compiled"] = "torch.compile(fullgraph=True) cannot trace it"
        if host.graph is None:
            missing["graph"] = "no CUDA" if device.type != "cuda" else "it cannot be captured"
    figures |= _memory(operation, implementation, case, device, missing)
    figures["launches"] = _launches(operation, implementation, case, device, missing)
    return no_cost(operation, implementation, case).model_copy(update={**figures, "missing": missing})


def _memory(
    operation: Operation, implementation: Implementation, case: Case, device: torch.device, missing: dict[str, str]
) -> dict[str, int]:
    """Bytes that a call needs, and its backward if it has one."""
    arguments = operation.arguments(case, torch.Generator(device).manual_seed(0))
    if operation.differentiable:
        return asdict(profile_memory(implementation.load(), *arguments))
    missing |= dict.fromkeys(("training_peak", "saved_for_backward"), NO_GRADIENT)
    with torch.no_grad():
        return {"forward_peak": peak(implementation.call(arguments), device)}


def no_cost(operation: Operation, implementation: Implementation, case: Case, reason: str = "") -> WholeCost:
    """A record without any figure."""
    missing = dict.fromkeys(FIGURES, reason) if reason else {}
    return WholeCost(
        operation=operation.name, implementation=implementation.name, case=CaseRecord.of(case), missing=missing
    )


FIGURES = tuple(name for name, field in WholeCost.model_fields.items() if field.default is None)
"""Fields of a `WholeCost` that hold a measured figure, or None."""


def with_starts(
    cost: WholeCost,
    technique: Technique,
    operation: Operation,
    implementation: Implementation,
    case: Case,
    device: torch.device,
) -> WholeCost:
    """Add what the first call costs, measured in processes of its own."""
    if set(STARTS) <= set(cost.missing):
        return cost
    if implementation.level not in COMPILERS:
        nothing = dict.fromkeys(STARTS, "nothing is compiled at the first call")
        return cost.model_copy(update={"missing": cost.missing | nothing})
    start = compile_cost(technique.name, operation.name, implementation.name, case, device)
    failed = dict.fromkeys(STARTS, start.failure) if start.failure else {}
    figures = {"cold_start": start.cold, "warm_start": start.warm}
    return cost.model_copy(update={**figures, "missing": cost.missing | failed})


def _launches(
    operation: Operation, implementation: Implementation, case: Case, device: torch.device, missing: dict[str, str]
) -> int | None:
    """Kernels of one forward: all of them on CUDA, Triton's own in the interpreter."""
    call = implementation.call(operation.arguments(case, torch.Generator(device).manual_seed(0)))
    if device.type != "cuda" and implementation.level is not Level.TRITON:
        missing["launches"] = "no CUDA"
        return None
    with torch.no_grad():
        call()
        with watch_device(device) as names:
            call()
    return len(names)
