"""`kernel-pytorch adopt`: make the levels that win on this machine its defaults."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape

from kernel_pytorch.harness import adoption
from kernel_pytorch.harness.adoption import Verdict, Wanted
from kernel_pytorch.harness.availability import parse_device
from kernel_pytorch.harness.benchmark import bench
from kernel_pytorch.harness.commands import common
from kernel_pytorch.harness.discovery import discover
from kernel_pytorch.harness.errors import UserError
from kernel_pytorch.harness.isolation import Worker, Workers
from kernel_pytorch.harness.machine import Machine, measure_machine
from kernel_pytorch.harness.tables import table
from kernel_pytorch.harness.technique import Technique
from kernel_pytorch.harness.verification import verify

CASE_TIMEOUT = 600.0
COLUMNS = ("function", "dtype", "level", "verdict")


def adopt_command(
    technique: common.TechniqueArgument = None,
    operation: common.OperationOption = None,
    device: common.DeviceOption = None,
    reset: Annotated[
        bool, typer.Option("--reset", help="Measure nothing; remove what was adopted, of this technique or all.")
    ] = False,
    timeout: common.TimeoutOption = CASE_TIMEOUT,
    jobs: common.JobsOption = 1,
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
    operations = common.check_names("operation", operation, common.operation_names(techniques))
    common.warn_broken(discovery)
    known, file = _user_file(techniques, technique)
    before = _read(file, known) if not reset or os.path.lexists(file) else []
    if reset:
        if operation:
            raise UserError("--reset removes all rows of a technique: leave --operation out")
        kept = [row for row in before if technique not in (None, row.package)]
        if os.path.lexists(file) and (technique is None or len(kept) < len(before)):
            adoption.save(file, kept, known.SCHEMA_VERSION)
            common.tell(f"{'written' if kept else 'removed'}: {file}")
        else:
            common.tell(f"nothing of {technique} is adopted" if before else f"nothing is adopted: there is no {file}")
        return
    common.check_writable(file.parent)
    common.warn_if_busy()
    wanted = {t.name: adoption.candidates(t, where, operations) for t in techniques}
    if not any(wanted.values()):
        common.tell(
            f"Nothing to adopt on {where}: no function has a kernel that can be timed there and whose place the"
            " package's own table leaves open; `kernel-pytorch list` prints both."
        )
        return
    with common.Steps("measuring the machine") as step:
        machine = measure_machine(where, quick=True, on_step=step)
    wrong = False
    for each in (t for t in techniques if wanted[t.name]):
        verdicts = _measured(each, where, wanted[each.name], machine, timeout, jobs)
        cells = []
        for v in verdicts:
            good = f"[green]adopted[/green]: at least {v.speedup:.2f} times as fast as native"
            cells.append((v.operation, str(v.dtype).removeprefix("torch."), v.level, escape(v.reason) or good))
        common.output.print(table(f"{each.name}: {each.title}", COLUMNS, cells, text=4))
        new, here = adoption.rows(each, verdicts, machine.environment, where), known.device_name(where)
        # Another run may have written meanwhile. What was adopted here of these functions is replaced.
        before = [
            row for row in _read(file, known)
            if not (row.package == each.name and row.device == here and row.function in wanted[each.name])
        ] + new  # fmt: skip
        adoption.save(file, before, known.SCHEMA_VERSION)
        wrong |= any(v.reason.startswith("wrong: ") for v in verdicts)
    common.tell(f"written: {file}" if before else "nothing is adopted")
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
    """Check the candidates on all cases, in all dtypes, adversarial inputs among them, and time those of the plan."""
    part = dataclasses.replace(technique, operations=[o for o in technique.operations if o.name in wanted])
    plan, verified = adoption.plan_for(wanted), []
    with Workers(jobs, timeout) as workers, common.Steps(f"verify {technique.name}") as done:
        for each in verify(part, device, levels=list(plan.levels or ()), workers=workers):
            done(f"{each.operation} {each.implementation}")
            verified.append(each)
    with Worker(timeout) as worker, common.Steps(technique.name, len(plan.jobs(technique, device))) as step:
        results = bench(technique, plan, device=device, machine=machine, worker=worker, on_job=step)
    if not results.complete:
        common.tell(f"interrupted: nothing of {technique.name} is changed", to=common.messages)
        raise typer.Exit(130)
    return adoption.judged(technique, device, wanted, verified, results)


def show_adopted(techniques: list[Technique], device: torch.device, name: str | None = None) -> None:
    """Print the adopted levels of one technique or all, and whether they are used on a device."""
    known = adoption.user_file(techniques)
    if known is None:
        return
    file = known.place()
    if file is None:
        common.tell(f"{known.VARIABLE} is {known.OFF}: what was adopted is not used")
        return
    try:
        found = [row for row in known.read(file) if name in (None, row.package)]
    except ValueError as error:
        common.tell(f"{file} is ignored: {error}")
        return
    cells = []
    for row in found:
        about = f"{row.date}, torch {row.torch}, at least {row.speedup:.2f} times as fast as native"
        used = adoption.state(row, techniques, device)
        cells.append(map(escape, (row.package, row.function, row.dtype, row.level, row.device, about, used)))
    columns = ("technique", "function", "dtype", "level", "device", "measured", f"on {device}")
    if cells:
        common.output.print(table(f"adopted: {file}", columns, cells, text=len(columns)))


def _read(file: Path, known: Any) -> list[Any]:
    try:
        return list(known.read(file))
    except ValueError as error:
        raise UserError(f"{file} cannot be used: {error}; mend or remove it") from error
