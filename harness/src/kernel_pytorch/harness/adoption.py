"""Choose defaults for this machine: levels that are right, and faster than native in every case.

They are written into a file of the user, which the packages read: `core/adoption.py` documents it. A row names a
device, a function and a dtype, and never a shape: levels round differently, and the bits of a result must not depend on
the number of rows.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import statistics
import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch

from kernel_pytorch.harness.availability import why_not_timed
from kernel_pytorch.harness.benchmark import Plan
from kernel_pytorch.harness.environment import Environment
from kernel_pytorch.harness.implementation import OUR_KERNELS, PublicLevel
from kernel_pytorch.harness.records import write_atomically
from kernel_pytorch.harness.results import Measurement, Results
from kernel_pytorch.harness.sources import package_digest
from kernel_pytorch.harness.technique import Operation, Technique
from kernel_pytorch.harness.verification import Verification

Wanted = dict[str, dict[torch.dtype, tuple[str, ...]]]
"""Levels that could become defaults, by the names of functions and dtypes."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether a level is to be the default of a function in a dtype.

    Attributes:
        operation: name of the function.
        dtype: of its principal tensor.
        level: which one.
        reason: why it is not adopted; empty if it is.
        speedup: over native in the case that gained least, lower end of the interval; 0.0 where that is not known.
    """

    operation: str
    dtype: torch.dtype
    level: str
    reason: str = ""
    speedup: float = 0.0


def user_file(techniques: Iterable[Technique]) -> Any:
    """The module of a package that knows the user's file; None where no package here reads one."""
    return next((found for t in techniques if (found := getattr(t.ladder(), "user_file", None))), None)


def candidates(technique: Technique, device: torch.device, operations: Collection[str] | None = None) -> Wanted:
    """Levels of these functions or all that could become defaults, but where the package's own table has a row."""
    found: Wanted = {}
    for operation in technique.operations if hasattr(technique.ladder(), "user_file") else ():
        if operations is not None and operation.name not in operations:
            continue
        ours = [i for i in operation.implementations if isinstance(i, PublicLevel) and i.name in OUR_KERNELS]
        for dtype in dict.fromkeys(case.dtype for case in operation.bench_grid.cases(device.type)):
            levels = tuple(i.name for i in ours if why_not_timed(technique, i, device, dtype) is None)
            if levels and own_default(technique, operation, device, dtype) is None:
                found.setdefault(operation.name, {})[dtype] = levels
    return found


def own_default(technique: Technique, operation: Operation, device: torch.device, dtype: torch.dtype) -> str | None:
    """The level that the package's own table names there; None where it has no row of a level that can run."""
    ladder = technique.ladder()
    able = (
        row.level for row in ladder.defaults if row.covers(operation.name, device, dtype)
        and row.level in ladder.levels(operation.name) and ladder.unavailable(row.level, device, dtype) is None
    )  # fmt: skip
    return next(able, None)


def plan_for(wanted: Wanted) -> Plan:
    """Every case of the candidates, in the rounds of a short run: a level that needs more rounds is not adopted."""
    levels = sorted({level for dtypes in wanted.values() for levels in dtypes.values() for level in levels})
    return Plan(tuple(levels), quick=True, operations=tuple(wanted), cases=sys.maxsize)


def judged(
    technique: Technique, device: torch.device, wanted: Wanted, verified: Iterable[Verification], results: Results
) -> list[Verdict]:
    """A verdict on each candidate; one level at most is adopted per function and dtype, that of the best mean."""
    wrong: dict[tuple[str, str], str] = {}
    right: set[tuple[str, str, torch.dtype]] = set()
    for each in verified:
        if not each.passed:
            wrong.setdefault((each.operation, each.implementation), each.failures()[0])
        elif each.unavailable is None:
            right.add((each.operation, each.implementation, each.trial.case.dtype))
    by_case: dict[tuple[str, ...], Measurement] = {
        (m.operation, m.case.label, m.direction, m.implementation): m for m in results.measurements
    }
    jobs = plan_for(wanted).jobs(technique, device)
    found = []
    for operation, dtype, levels in ((name, dtype, each[dtype]) for name, each in wanted.items() for dtype in each):
        reasons, least, means = {}, dict.fromkeys(levels, 0.0), {}
        for level in levels:
            measured = {
                f"{job.direction.value}, {job.key[2]}": by_case.get((operation, *job.key[2:], level))
                for job in jobs
                if (job.operation.name, job.case.dtype) == (operation, dtype)
                and job.operation.why_lacking(level, job.case) is None
            }
            reasons[level] = next(
                (f"{case}: {why}" for case, m in measured.items() if (why := _why_not(m))),
                "" if measured else "not measured",
            )
            if (operation, level) in wrong:
                reasons[level] = f"wrong: {wrong[operation, level]}"
            elif (operation, level, dtype) not in right:
                reasons[level] = "no case of this dtype was verified"
            if not reasons[level]:
                gains = [m.comparisons["native"].speedup for m in measured.values() if m is not None]
                least[level] = min(gain.low for gain in gains)
                means[level] = statistics.geometric_mean(gain.median for gain in gains)
        best = max(means, key=means.__getitem__, default=None)
        for level in levels:
            slower = "" if level == best else f"{best!r} is faster still"
            found.append(Verdict(operation, dtype, level, reasons[level] or slower, least[level]))
    return found


def _why_not(m: Measurement | None) -> str:
    """The reason in one case against a level; empty if there is none."""
    if m is None or m.status != "measured":
        return "not measured" if m is None else f"{m.status}: {m.reason}"
    if "native" not in m.comparisons:
        return "native could not be timed beside it"
    gain = m.comparisons["native"].speedup
    return "" if gain.low > 1.0 else f"{gain.low:.2f} to {gain.high:.2f} times as fast as native"


def rows(
    technique: Technique, verdicts: Iterable[Verdict], environment: Environment, device: torch.device
) -> list[Any]:
    """A row of the user's file for each adopted level."""
    file = technique.ladder().user_file
    return [
        file.Row(
            package=technique.name,
            function=v.operation,
            dtype=str(v.dtype).removeprefix("torch."),
            level=v.level,
            device_type=device.type,
            device=file.device_name(device),
            version=file.version_of(v.level),
            date=datetime.date.today().isoformat(),
            torch=environment.torch,
            triton=environment.triton or "",
            kernels=package_digest(technique),
            speedup=round(v.speedup, 3),
        )
        for v in verdicts
        if not v.reason
    ]


def save(file: Path, found: Iterable[Any], schema_version: int) -> None:
    """Write the file, or the target of a link, in one step; without rows remove it."""
    file = file.resolve()
    every = sorted((dataclasses.asdict(row) for row in found), key=lambda row: [str(value) for value in row.values()])
    if not every:
        file.unlink(missing_ok=True)
        return
    write_atomically(file, json.dumps({"schema_version": schema_version, "rows": every}, indent=1) + "\n")


def state(row: Any, techniques: Iterable[Technique], device: torch.device) -> str:
    """Whether a row of the file is used on a device, and why not."""
    technique = next((t for t in techniques if t.name == row.package and hasattr(t.ladder(), "user_file")), None)
    if technique is None:
        return "not used: its package is not installed"
    ladder = technique.ladder()
    if (reason := ladder.why_ignored(row)) is not None:
        return f"not used: {reason}"
    here = ladder.user_file.device_name(device)
    if (row.device_type, row.device) != (device.type, here):
        return f"not used: this device is {here}"
    dtype, operation = ladder.user_file.DTYPES[row.dtype], technique.operation(row.function)
    if (own := own_default(technique, operation, device, dtype)) is not None:
        return f"not used: the package's own table says {own!r}"
    if (reason := ladder.unavailable(row.level, device, dtype)) is not None:
        return f"not used: {reason}"
    if package_digest(technique) != row.kernels:
        return "used, though its package has changed since: adopt it again"
    return "used"
