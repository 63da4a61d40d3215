"""Which levels a machine should have as defaults: those that are right, and faster than native in every case.

What is found is written into a file of the user, which the packages read themselves: `core/adoption.py` says where it
is and what it holds. A row names a device, a function and a dtype, and never a shape: levels round differently, and the
bits of a result must not depend on how many rows there are.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
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
from kernel_pytorch.harness.results import CaseRecord, Measurement, Results
from kernel_pytorch.harness.sources import package_digest
from kernel_pytorch.harness.technique import Operation, Technique
from kernel_pytorch.harness.verification import Verification, verify

Key = tuple[str, str]
"""Names of an operation and of a level."""


@dataclass
class Verified:
    """What a verification says of levels.

    Attributes:
        wrong: by operation and level, the first thing that was wrong.
        right: operation, level and dtype of each case that was right.
    """

    wrong: dict[Key, str] = field(default_factory=dict)
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


def candidates(
    technique: Technique, device: torch.device, operations: Collection[str] | None = None
) -> dict[str, dict[torch.dtype, tuple[str, ...]]]:
    """The levels that could become defaults there, by function and dtype; what the package's own table decides is not.

    Args:
        technique: whose.
        device: where.
        operations: names of functions, or None for all.
    """
    found: dict[str, dict[torch.dtype, tuple[str, ...]]] = {}
    for operation in technique.operations if hasattr(technique.ladder(), "user_file") else ():
        if operations is not None and operation.name not in operations:
            continue
        for dtype in dict.fromkeys(case.dtype for case in operation.bench_grid.cases(device.type)):
            if own_default(technique, operation, device, dtype) is None:
                levels = tuple(
                    i.name
                    for i in operation.implementations
                    if isinstance(i, PublicLevel) and i.name in OUR_KERNELS
                    and why_not_timed(technique, i, device, dtype) is None
                )  # fmt: skip
                if levels:
                    found.setdefault(operation.name, {})[dtype] = levels
    return found


def own_default(technique: Technique, operation: Operation, device: torch.device, dtype: torch.dtype) -> str | None:
    """The level that the package's own table names there; None where it has no row of a level that can run."""
    ladder = technique.ladder()
    return next(
        (
            row.level
            for row in ladder.defaults
            if row.covers(operation.name, device, dtype) and row.level in ladder.levels(operation.name)
            and ladder.unavailable(row.level, device, dtype) is None
        ),
        None,
    )  # fmt: skip


def verified(
    technique: Technique,
    device: torch.device,
    wanted: dict[str, dict[torch.dtype, tuple[str, ...]]],
    workers: Workers | None = None,
    on_trial: Callable[[Verification], None] = lambda verification: None,
) -> Verified:
    """Check the candidates on all cases, in all dtypes, adversarial inputs among them."""
    part = dataclasses.replace(technique, operations=[o for o in technique.operations if o.name in wanted])
    found = Verified()
    for each in verify(part, device, levels=levels_of(wanted), workers=workers):
        on_trial(each)
        key = each.operation, each.implementation
        if not each.passed:
            found.wrong.setdefault(key, each.failures()[0])
        elif each.unavailable is None:
            found.right.add((*key, each.trial.case.dtype))
    return found


def levels_of(wanted: dict[str, dict[torch.dtype, tuple[str, ...]]]) -> list[str]:
    """The levels of all candidates, each once."""
    return sorted({level for dtypes in wanted.values() for levels in dtypes.values() for level in levels})


def plan_for(wanted: dict[str, dict[torch.dtype, tuple[str, ...]]]) -> Plan:
    """Every case of the candidates, in the rounds of a short run: what is not clear then is not adopted."""
    return Plan(tuple(levels_of(wanted)), quick=True, operations=tuple(wanted), cases=sys.maxsize)


def judged(
    technique: Technique,
    device: torch.device,
    wanted: dict[str, dict[torch.dtype, tuple[str, ...]]],
    checked: Verified,
    results: Results,
) -> list[Verdict]:
    """A verdict on each candidate; of a function and dtype at most one level is adopted, the fastest of the mean."""
    jobs = plan_for(wanted).jobs(technique, device)
    by_case: dict[tuple[str, ...], Measurement] = {
        (m.operation, m.case.label, m.direction, m.implementation): m for m in results.measurements
    }
    found = []
    for operation, dtypes in wanted.items():
        for dtype, levels in dtypes.items():
            of_dtype = [job for job in jobs if job.operation.name == operation and job.case.dtype == dtype]
            cases = {
                level: [
                    (CaseRecord.of(job.case).label, job.direction.value)
                    for job in of_dtype
                    if job.operation.why_lacking(level, job.case) is None
                ]
                for level in levels
            }
            measured = {level: [by_case.get((operation, *case, level)) for case in cases[level]] for level in levels}
            verdicts = [_verdict(operation, dtype, level, measured[level], cases[level], checked) for level in levels]
            good = [v.level for v in verdicts if not v.reason]
            best = max(good, key=lambda level: _mean_gain(measured[level]), default=None)
            found += [
                v if v.reason or v.level == best else dataclasses.replace(v, reason=f"{best!r} is faster still")
                for v in verdicts
            ]
    return found


def _verdict(
    operation: str,
    dtype: torch.dtype,
    level: str,
    measured: list[Measurement | None],
    cases: list[tuple[str, str]],
    checked: Verified,
) -> Verdict:
    """What speaks against a level, or how much it gains at least."""
    if (wrong := checked.wrong.get((operation, level))) is not None:
        return Verdict(operation, dtype, level, f"wrong: {wrong}", wrong=True)
    if (operation, level, dtype) not in checked.right:
        return Verdict(operation, dtype, level, "no case of this dtype was verified")
    least = math.inf
    for m, (case, direction) in zip(measured, cases, strict=True):
        where = f"{direction}, {case}"
        if m is None or m.status != "measured":
            why = "not measured" if m is None else f"{m.status}: {m.reason}"
            return Verdict(operation, dtype, level, f"{where}: {why}")
        if "native" not in m.comparisons:
            return Verdict(operation, dtype, level, f"{where}: native could not be timed beside it")
        gain = m.comparisons["native"].speedup
        if not gain.low > 1.0:
            reason = f"{where}: {gain.low:.2f} to {gain.high:.2f} times as fast as native"
            return Verdict(operation, dtype, level, reason)
        least = min(least, gain.low)
    return Verdict(operation, dtype, level, speedup=least)


def _mean_gain(measured: list[Measurement | None]) -> float:
    """Mean of the logarithms of the speedups over native."""
    logs = [math.log(m.comparisons["native"].speedup.median) for m in measured if m is not None]
    return sum(logs) / len(logs)


def rows(
    technique: Technique, verdicts: Iterable[Verdict], environment: Environment, device: torch.device
) -> list[Any]:
    """The rows of what is adopted."""
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
    """New rows in the place of those that a file holds of the same functions on the same device."""
    kept = [r for r in before if not (r.package == technique and r.device == device and r.function in functions)]
    return [*kept, *new]


def save(file: Path, found: Iterable[Any], schema_version: int) -> None:
    """Write the file in one step, that which a link leads to; without rows it is removed."""
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
