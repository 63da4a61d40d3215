"""`kernel-pytorch adopt`: make the levels that win on this machine its defaults."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape

from kernel_pytorch.harness import adoption
from kernel_pytorch.harness.adoption import Verdict, Wanted
from kernel_pytorch.harness.api import bench
from kernel_pytorch.harness.availability import parse_device
from kernel_pytorch.harness.commands.common import (
    PLAIN,
    DeviceOption,
    JobsOption,
    OperationOption,
    Steps,
    TechniqueArgument,
    check_names,
    check_writable,
    messages,
    operation_names,
    output,
    warn_broken,
    warn_if_busy,
)
from kernel_pytorch.harness.discovery import discover
from kernel_pytorch.harness.errors import UserError
from kernel_pytorch.harness.isolation import Worker, Workers
from kernel_pytorch.harness.machine import Machine, measure_machine
from kernel_pytorch.harness.tables import table
from kernel_pytorch.harness.technique import Technique
from kernel_pytorch.harness.verification import Verification

CASE_TIMEOUT = 600.0
COLUMNS = ("function", "dtype", "level", "verdict")


def adopt_command(
    technique: TechniqueArgument = None,
    operation: OperationOption = None,
    device: DeviceOption = None,
    reset: Annotated[
        bool, typer.Option("--reset", help="Measure nothing; remove what was adopted, of this technique or all.")
    ] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1.0, help="Seconds after which a case counts as hanging.")
    ] = CASE_TIMEOUT,
    jobs: JobsOption = 1,
) -> None:
    """Verify and time the kernels on this machine, and make those that win the defaults of this user on it.

    A package's own table names defaults for the devices that its authors measured; elsewhere `level=None` is PyTorch's
    own. A level is adopted for a function and a dtype if it is right in every case of every dtype, and in every case of
    that dtype faster than native with its whole interval. What is adopted is written into a file of the user, which
    `kernel-pytorch list` prints; KERNEL_PYTORCH_DEFAULTS names another file, or is "off".

    Exit code: 0; 1 if a level is wrong; 2 for a name that does not exist or a file that cannot be used; 130 after
    Ctrl-C, with what was adopted of earlier techniques kept.
    """
    where = parse_device(device)
    discovery = discover()
    techniques = discovery.select(technique)
    operations = check_names("operation", operation, operation_names(techniques))
    warn_broken(discovery)
    known, file = _user_file(techniques, technique)
    if reset:
        if operation:
            raise UserError("--reset removes all rows of a technique: leave --operation out")
        _reset(file, known, technique)
        return
    before = _read(file, known)
    check_writable(file.parent)
    warn_if_busy()
    wanted = {t.name: adoption.candidates(t, where, operations) for t in techniques}
    if not any(wanted.values()):
        output.print(
            f"Nothing to adopt on {where}: no function has a kernel that can be timed there and whose place the"
            " package's own table leaves open; `kernel-pytorch list` prints both.", **PLAIN,
        )  # fmt: skip
        return
    with Steps("measuring the machine") as step:
        machine = measure_machine(where, quick=True, on_step=step)
    wrong = False
    for each in (t for t in techniques if wanted[t.name]):
        verdicts = _measured(each, where, wanted[each.name], machine, timeout, jobs)
        rows = []
        for v in verdicts:
            good = f"[green]adopted[/green]: at least {v.speedup:.2f} times as fast as native"
            rows.append((v.operation, str(v.dtype).removeprefix("torch."), v.level, escape(v.reason) or good))
        output.print(table(f"{each.name}: {each.title}", COLUMNS, rows, text=4))
        found = adoption.rows(each, verdicts, machine.environment, where)
        # Another run may have written meanwhile.
        before = adoption.merged(_read(file, known), found, each.name, known.device_name(where), wanted[each.name])
        adoption.save(file, before, known.SCHEMA_VERSION)
        wrong |= any(v.wrong for v in verdicts)
    output.print(escape(f"written: {file}" if before else "nothing is adopted"), **PLAIN)
    if wrong:
        raise typer.Exit(1)


def _user_file(techniques: list[Technique], name: str | None) -> tuple[Any, Path]:
    """The module that knows the user's file, and that file; end with one line where there is none."""
    known = adoption.user_file(techniques)
    if known is None:
        raise UserError("no technique is installed whose defaults could be adopted" if name is None
              else f"{name} has no defaults of its own")  # fmt: skip
    file = known.place()
    if file is None:
        raise UserError(f"{known.VARIABLE} is {known.OFF}: nothing is adopted")
    return known, file


def _measured(
    technique: Technique, device: torch.device, wanted: Wanted, machine: Machine, timeout: float, jobs: int
) -> list[Verdict]:
    with Workers(jobs, timeout) as workers, Steps(f"verify {technique.name}") as done:

        def on_trial(verification: Verification) -> None:
            done(f"{verification.operation} {verification.implementation}")

        checked = adoption.verified(technique, device, wanted, workers, on_trial)
    plan = adoption.plan_for(wanted)
    with Worker(timeout) as worker, Steps(technique.name, len(plan.jobs(technique, device))) as step:
        results = bench(technique.name, plan, device=device, machine=machine, worker=worker, on_job=step)
    if not results.complete:
        messages.print(f"interrupted: nothing of {technique.name} is changed", **PLAIN)
        raise typer.Exit(130)
    return adoption.judged(technique, device, wanted, checked, results)


def show_adopted(techniques: list[Technique], device: torch.device, name: str | None = None) -> None:
    """Print the adopted levels of one technique or all, and whether they are used on a device."""
    known = adoption.user_file(techniques)
    if known is None:
        return
    file = known.place()
    if file is None:
        output.print(f"{known.VARIABLE} is {known.OFF}: what was adopted is not used", **PLAIN)
        return
    try:
        found = [row for row in known.read(file) if name in (None, row.package)]
    except ValueError as error:
        output.print(escape(f"{file} is ignored: {error}"), **PLAIN)
        return
    if not found:
        return
    rows = []
    for row in found:
        about = f"{row.date}, torch {row.torch}, at least {row.speedup:.2f} times as fast as native"
        used = adoption.state(row, techniques, device)
        rows.append(map(escape, (row.package, row.function, row.dtype, row.level, row.device, about, used)))
    columns = ("technique", "function", "dtype", "level", "device", "measured", f"on {device}")
    output.print(table(f"adopted: {file}", columns, rows, text=len(columns)))


def _reset(file: Path, known: Any, technique: str | None) -> None:
    """Remove the file, or the rows of one technique in it; nothing that is not such a file."""
    if not os.path.lexists(file):
        output.print(escape(f"nothing is adopted: there is no {file}"), **PLAIN)
        return
    before = _read(file, known)
    kept = [] if technique is None else [row for row in before if row.package != technique]
    if technique is not None and len(kept) == len(before):
        output.print(f"nothing of {technique} is adopted", **PLAIN)
        return
    adoption.save(file, kept, known.SCHEMA_VERSION)
    output.print(escape(f"{'written' if kept else 'removed'}: {file}"), **PLAIN)


def _read(file: Path, known: Any) -> list[Any]:
    try:
        return list(known.read(file))
    except ValueError as error:
        raise UserError(f"{file} cannot be used: {error}; mend or remove it") from error
