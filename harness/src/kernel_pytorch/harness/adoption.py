"""Choose defaults for this machine: levels that are right, and faster than native in every case.

They are written into a file of the user, which the packages read: `core/adoption.py` documents it. A row names a
device, a function and a dtype, and never a shape: levels round differently, and the bits of a result must not depend on
the number of rows.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import statistics
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kernel_pytorch.harness.availability import why_not_timed
from kernel_pytorch.harness.benchmark import Plan
from kernel_pytorch.harness.environment import Environment
from kernel_pytorch.harness.implementation import OUR_KERNELS, PublicLevel
from kernel_pytorch.harness.isolation import Workers
from kernel_pytorch.harness.records import write_atomically
from kernel_pytorch.harness.results import Measurement, Results
from kernel_pytorch.harness.sources import package_digest
from kernel_pytorch.harness.technique import Operation, Technique
from kernel_pytorch.harness.verification import Verification, verify

Wanted = dict[str, dict[torch.dtype, tuple[str, ...]]]
"""Levels that could become defaults, by the names of functions and dtypes."""


@dataclass
class Verified:
    """The result of a verification of levels.

    Attributes:
        wrong: by operation and level, the first failure.
        right: operation, level and dtype of each case that was right.
    """

    wrong: dict[tuple[str, str], str] = field(default_factory=dict)
    right: set[tuple[str, str, torch.dtype]] = field(default_factory=set)


@dataclass(frozen=True)
class Verdict:
    """Whether a level is to be the default of a function in a dtype.

    Attributes:
        operation: name of the function.
        dtype: of its principal tensor.
        level: which one.
        reason: why it is not adopted; empty if it is.
        speedup: over native in the case that gained least, lower end of the interval; 0.0 where that is not known.
        wrong: whether it is not adopted because verification found it wrong.
    """

    operation: str
    dtype: torch.dtype
    level: str
    reason: str = ""
    speedup: float = 0.0
    wrong: bool = False


def user_file(techniques: Iterable[Technique]) -> Any:
    """The module of a package that knows the user's file; None where no package here reads one."""
    return next((found for t in techniques if (found := getattr(t.ladder(), "user_file", None))), None)


def candidates(technique: Technique, device: torch.device, operations: Collection[str] | None = None) -> Wanted:
    """The levels that could become defaults there, except where the package's own table has a row.

    Args:
        technique: whose.
        device: where.
        operations: names of functions, or None for all.
    """
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


def verified(
    technique: Technique,
    device: torch.device,
    wanted: Wanted,
    workers: Workers | None = None,
    on_trial: Callable[[Verification], None] = lambda verification: None,
) -> Verified:
    """Check the candidates on all cases, in all dtypes, adversarial inputs among them."""
    part = dataclasses.replace(technique, operations=[o for o in technique.operations if o.name in wanted])
    found = Verified()
    for each in verify(part, device, levels=list(plan_for(wanted).levels or ()), workers=workers):
        on_trial(each)
        key = each.operation, each.implementation
        if not each.passed:
            found.wrong.setdefault(key, each.failures()[0])
        elif each.unavailable is None:
            found.right.add((*key, each.trial.case.dtype))
    return found


def plan_for(wanted: Wanted) -> Plan:
    """Every case of the candidates, in the rounds of a short run: a level that needs more rounds is not adopted."""
    levels = sorted({level for dtypes in wanted.values() for levels in dtypes.values() for level in levels})
    return Plan(tuple(levels), quick=True, operations=tuple(wanted), cases=sys.maxsize)


def judged(
    technique: Technique, device: torch.device, wanted: Wanted, checked: Verified, results: Results
) -> list[Verdict]:
    """A verdict on each candidate; one level at most is adopted per function and dtype, that of the best mean."""
    by_case: dict[tuple[str, ...], Measurement] = {
        (m.operation, m.case.label, m.direction, m.implementation): m for m in results.measurements
    }
    jobs = plan_for(wanted).jobs(technique, device)
    found = []
    for operation, dtypes in wanted.items():
        for dtype, levels in dtypes.items():
            of_dtype = [job for job in jobs if job.operation.name == operation and job.case.dtype == dtype]
            verdicts, gains = [], {}
            for level in levels:
                able = [job.key[2:] for job in of_dtype if job.operation.why_lacking(level, job.case) is None]
                measured = {(case, way): by_case.get((operation, case, way, level)) for case, way in able}
                verdicts.append(_verdict(operation, dtype, level, measured, checked))
                if not verdicts[-1].reason:
                    medians = (m.comparisons["native"].speedup.median for m in measured.values() if m is not None)
                    gains[level] = statistics.geometric_mean(medians)
            best = max(gains, key=lambda level: gains[level], default=None)
            slower = f"{best!r} is faster still"
            found += [v if v.reason or v.level == best else dataclasses.replace(v, reason=slower) for v in verdicts]
    return found


def _verdict(
    operation: str,
    dtype: torch.dtype,
    level: str,
    measured: dict[tuple[str, str], Measurement | None],
    checked: Verified,
) -> Verdict:
    """The first reason against a level, or the least that it gains."""
    if (wrong := checked.wrong.get((operation, level))) is not None:
        return Verdict(operation, dtype, level, f"wrong: {wrong}", wrong=True)
    if (operation, level, dtype) not in checked.right:
        return Verdict(operation, dtype, level, "no case of this dtype was verified")
    least = math.inf
    for (case, direction), m in measured.items():
        if m is None or m.status != "measured":
            reason = "not measured" if m is None else f"{m.status}: {m.reason}"
        elif "native" not in m.comparisons:
            reason = "native could not be timed beside it"
        elif not (gain := m.comparisons["native"].speedup).low > 1.0:
            reason = f"{gain.low:.2f} to {gain.high:.2f} times as fast as native"
        else:
            least = min(least, gain.low)
            continue
        return Verdict(operation, dtype, level, f"{direction}, {case}: {reason}")
    return Verdict(operation, dtype, level, speedup=least)


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


def merged(
    before: Iterable[Any], new: Iterable[Any], technique: str, device: str, functions: Collection[str]
) -> list[Any]:
    """Replace the rows of these functions on this device by new ones."""
    kept = [r for r in before if not (r.package == technique and r.device == device and r.function in functions)]
    return [*kept, *new]


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
