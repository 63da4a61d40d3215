"""Host time of calls of public functions: the default level beside PyTorch's own, on the smallest bench case.

Models with small batches wait for the host, so a kernel that is fast on the device may lose there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table

from kernel_pytorch.harness.clock.wall import host_seconds
from kernel_pytorch.harness.jobs import Job
from kernel_pytorch.harness.technique import Case, Direction, Implementation, Level, Operation, Technique
from kernel_pytorch.harness.workload import Workload

WAYS = ("forward", "with gradients", "and backward")


@dataclass(frozen=True)
class HostCost:
    """Host time of one function.

    Attributes:
        function: its name.
        level: its default level here.
        ours: seconds of a call without gradients, and where there are any, with a graph for them and with the backward.
        native: the same of level "native".
    """

    function: str
    level: str
    ours: tuple[float, ...]
    native: tuple[float, ...]


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
            calls = {
                f"{who} {way}": call
                for who, implementation in (("ours", ours), ("native", native))
                for way, call in _ways(technique, operation, case, implementation, device).items()
            }
            found = host_seconds(calls, device)
            of_each = (
                tuple(found[f"{who} {way}"] for way in WAYS if f"{who} {way}" in found) for who in ("ours", "native")
            )
            yield HostCost(operation.name, level, *of_each)


def _ways(
    technique: Technique, operation: Operation, case: Case, implementation: Implementation, device: torch.device
) -> dict[str, Callable[[], Any]]:
    """The call without gradients and, of an operation that has them, with a graph and with the backward."""

    def of(direction: Direction) -> Workload:
        return Workload.of(Job(technique, operation, case, direction), 1, torch.Generator(device).manual_seed(0))

    without = of(Direction.FORWARD).call(implementation)
    if not operation.differentiable:
        return {WAYS[0]: lambda: without(0)}
    both = of(Direction.BOTH)
    with_backward, with_graph = both.call(implementation), implementation.call(both.arguments[0])
    return dict(zip(WAYS, (lambda: without(0), with_graph, lambda: with_backward(0)), strict=True))


def host_table(costs: Iterable[HostCost], device: torch.device) -> Table:
    """Microseconds, and the ratio to PyTorch's own level."""
    whole = "On a CPU there is no device to launch on: these are whole calls." if device.type == "cpu" else None
    title = "Host time of a call, us (x of level native)"
    shown = Table(title=title, title_justify="left", caption=whole, caption_justify="left", width=80)
    shown.add_column("function", no_wrap=True, overflow="ellipsis", ratio=1)
    shown.add_column("level", no_wrap=True)
    for way in WAYS:
        shown.add_column(way, justify="right", no_wrap=True)
    for cost in costs:
        pairs = zip(cost.ours, cost.native, strict=True)
        cells = [f"{_digits(own * 1e6)} ({own / other:.2f}x)" for own, other in pairs]
        shown.add_row(cost.function, cost.level, *cells, *["-"] * (len(WAYS) - len(cells)))
    return shown


def _digits(number: float) -> str:
    return f"{number:.3g}" if number < 1000.0 else f"{number:.0f}"
