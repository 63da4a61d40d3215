"""Check by a record that the default level is the fastest of those measured.

`level=None` promises the fastest level. Native, triton and cuda compete, forward alone and forward with backward, for
each function, dtype and set of static features; tables also show `compile`. Over the cases of a record the default may
take at most `MEAN` times as long as the best level, in geometric mean, and in no case more than `CASE` times, unless
the technique lists that case with its reason.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from kernel_pytorch.harness.environment import Environment
from kernel_pytorch.harness.results import CaseRecord, Results
from kernel_pytorch.harness.tables import PrintableTable, table
from kernel_pytorch.harness.technique import Case, Operation, Technique, imported

MEAN = 1.05
CASE = 1.25
CANDIDATES = ("native", "triton", "cuda")
SHOWN = (*CANDIDATES, "compile")
FORWARD, TRAINING = "forward", "forward + backward"

Times = dict[str, float]
"""Seconds by level."""


@dataclass(frozen=True)
class Group:
    """The cases of a record that have one default: same function, dtype and static features.

    Attributes:
        operation: name of the function.
        dtype: of the principal tensor.
        features: static features by which the package chooses the level, such as "window".
        work: `FORWARD` or `TRAINING`.
        default: the level that `level=None` means there.
        cases: seconds by level, by the label of a case.
    """

    operation: str
    dtype: str
    features: str
    work: str
    default: str
    cases: dict[str, Times] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The common properties of the cases."""
        return ", ".join(filter(None, (self.operation, self.dtype, self.features, self.work)))

    def ratio(self, level: str) -> float | None:
        """Geometric mean of the times of a level over those of the default; None unless all cases have both."""
        return _ratio(self.cases.values(), level, self.default)

    def misses(self, listed: Mapping[str, str]) -> list[str]:
        """Return what breaks the promise, a line each.

        Args:
            listed: reasons for cases that may be slower, and are left out of the mean, by "operation: case".
        """
        cases = {name: times for name, times in self.cases.items() if f"{self.operation}: {name}" not in listed}
        ratios = {level: _ratio(cases.values(), level, self.default) for level in CANDIDATES}
        best, least = min(
            ((k, v) for k, v in ratios.items() if v is not None), key=lambda pair: pair[1], default=("", 1)
        )
        found = []
        if least * MEAN < 1:
            found.append(f"{self.label}: {self.default} takes {1 / least:.2f}x the time of {best}")
        for name, times in cases.items() if len(cases) > 1 or not found else ():
            if self.default not in times:
                found.append(f"{self.label}, {name}: {self.default} was not measured")
                continue
            fastest = min((level for level in CANDIDATES if level in times), key=times.__getitem__)
            if (slower := times[self.default] / times[fastest]) > CASE:
                found.append(f"{self.label}, {name}: {self.default} takes {slower:.2f}x the time of {fastest}")
        return found


def _ratio(cases: Collection[Times], level: str, default: str) -> float | None:
    if not cases or not all({level, default} <= times.keys() for times in cases):
        return None
    return statistics.geometric_mean(times[level] / times[default] for times in cases)


def groups(results: Results, technique: Technique) -> list[Group]:
    """Group the times of a record by what their default depends on; cases that are no longer declared are left out."""
    environment = results.machine.environment
    found: dict[tuple[str, ...], Group] = {}
    seconds: dict[tuple[str, str, str], Times] = {}  # by operation, case and direction
    for m in results.measurements:
        if m.time is not None and m.implementation in SHOWN:
            seconds.setdefault((m.operation, m.case.label, m.direction), {})[m.implementation] = m.time.median
    able = {m.implementation for m in results.measurements if m.status == "measured"}
    for operation in technique.operations:
        for case in operation.bench_grid.cases(environment.device_type):
            label = CaseRecord.of(case).label
            forward, backward, both = (
                seconds.get((operation.name, label, direction), {}) for direction in ("forward", "backward", "both")
            )
            both = both or {level: forward[level] + backward[level] for level in forward if level in backward}
            if not (forward or both):
                continue
            default, features = default_level(technique, operation, case, environment, able)
            for name, times in ((FORWARD, forward), (TRAINING, both)):
                key = operation.name, case.dtype_name, features, name, default
                if times:
                    found.setdefault(key, Group(*key)).cases[label] = times
    return list(found.values())


def default_level(
    technique: Technique, operation: Operation, case: Case, environment: Environment, able: Collection[str]
) -> tuple[str, str]:
    """Return the level of a user's call and its features, on the device of an environment where these levels can run.

    The public function is called, on tensors that have no memory, until it reaches a level.
    """
    ladder = technique.ladder()
    capability = tuple(map(int, (environment.compute_capability or "0.0").split(".")))
    levels: Any = sys.modules[type(ladder).__module__]
    features: dict[str, None] = {}
    choose = ladder.chosen

    def chosen(*asked: Any, **given: Any) -> Any:
        features.update(dict.fromkeys(given.get("features", ())))
        return choose(*asked, **given)

    made: dict[int, Tensor] = {}

    def moved(x: Tensor) -> Tensor:
        if id(x) not in made:
            options = {"dtype": x.dtype, "requires_grad": x.requires_grad}
            meta = torch.empty_strided(x.shape, x.stride(), device="meta", **options)  # type: ignore[arg-type]
            device = torch.device(environment.device_type, 0)
            made[id(x)] = mode.fake_tensor_converter.from_meta_and_device(mode, meta, device)
        return made[id(x)]

    with (
        FakeTensorMode(allow_non_fake_inputs=True) as mode,
        mock.patch.object(levels, "compute_capability", return_value=capability),
        mock.patch.object(ladder, "unavailable", lambda level, *_: None if level in able else "it was not measured"),
        mock.patch.object(ladder, "chosen", chosen),
    ):
        given = operation.inputs(case, torch.Generator())
        args, kwargs = tree_map_only(Tensor, moved, given)
        function = imported(str(operation.function))
        level: str = ladder.default_of(lambda: function(*args, **kwargs))
    return level, ", ".join(features)


def defaults_table(found: Iterable[Group], title: str) -> PrintableTable:
    """The times of all levels over those of the defaults, in geometric mean; above 1 the default is faster."""
    rows = []
    for group in found:
        ratios = [group.ratio(level) for level in SHOWN]
        cells = ["-" if ratio is None else f"{ratio:.2f}x" for ratio in ratios]
        rows.append((f"{group.label} ({len(group.cases)})", group.default, *cells))
    return table(title, ("cases", "default", *SHOWN), rows, text=2 + len(SHOWN))
