"""What calls of single functions cost the host, beside PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch

from kernel_pytorch.harness.clock.wall import host_seconds
from kernel_pytorch.harness.tables import PrintableTable, table
from kernel_pytorch.harness.technique import Case, Direction, Implementation, Operation, Technique
from kernel_pytorch.harness.workload import Job, Workload

WAYS = ("forward", "with gradients", "and backward")


def host_table(techniques: Iterable[Technique], device: torch.device) -> PrintableTable:
    """Microseconds of each function whose default level here is not "native", and the ratio to that level."""
    rows = []
    for technique in techniques:
        for operation in technique.operations:
            cases = [case for case in operation.bench_grid.cases(device.type) if case.dtype.itemsize == 2]
            if not operation.function or not cases:
                continue
            case = min(cases, key=lambda case: operation.cost(case, Direction.FORWARD).bytes)
            level = technique.ladder().default(operation.function.rpartition(":")[2], device, case.dtype)
            first = {i.level.value: i for i in reversed(operation.implementations)}
            if level == "native" or not {level, "native"} <= first.keys():
                continue
            calls = {
                f"{name} {way}": call
                for name in (level, "native")
                for way, call in _calls(technique, operation, case, first[name], device)
            }
            seconds = host_seconds(calls, device)
            cells = ["-"] * len(WAYS)
            for place, way in enumerate(WAYS[: len(calls) // 2]):
                own = seconds[f"{level} {way}"]
                us, ratio = 1e6 * own, own / seconds[f"native {way}"]
                cells[place] = f"{us:{'.0f' if us >= 1000.0 else '.3g'}} ({ratio:.2f}x)"
            rows.append((operation.name, level, *cells))
    whole = "On a CPU there is no device to launch on: these are whole calls." if device.type == "cpu" else ""
    title = "Host time of a call, us (x of level native)"
    return table(title, ("function", "level", *WAYS), rows, whole, text=2, width=80)


def _calls(
    technique: Technique, operation: Operation, case: Case, level: Implementation, device: torch.device
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """By way: the call without gradients and, of an operation that has them, with a graph and with the backward."""
    forward, *both = (
        Workload.of(Job(technique, operation, case, direction), 1, torch.Generator(device).manual_seed(0))
        for direction in (Direction.FORWARD, Direction.BOTH)[: 1 + operation.differentiable]
    )
    yield WAYS[0], partial(forward.timed_call(level), 0)
    for workload in both:
        yield WAYS[1], level.bound_to(workload.arguments[0])
        yield WAYS[2], partial(workload.timed_call(level), 0)
