"""`kernel-pytorch support`: what works with what?"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.markup import escape
from rich.status import Status

from kernel_pytorch.harness.availability import parse_device
from kernel_pytorch.harness.commands.common import (
    PLAIN,
    DeviceOption,
    ProcessesOption,
    TechniqueArgument,
    check_writable,
    messages,
    output,
    warn_broken,
)
from kernel_pytorch.harness.discovery import UnknownNameError, discover
from kernel_pytorch.harness.isolation import Workers
from kernel_pytorch.harness.readme import ReadmeError, read_block, write_block
from kernel_pytorch.harness.results import ResultsError
from kernel_pytorch.harness.support import Processes, SupportRecord, examine_technique, load_all, markdown, up_to_date
from kernel_pytorch.harness.support.capabilities import without_a_device_each, without_compiler
from kernel_pytorch.harness.support.table import terminal_table
from kernel_pytorch.harness.technique import Technique

BLOCK = "support"
TIMEOUT = 300.0


def support_command(
    technique: TechniqueArgument = None,
    device: DeviceOption = None,
    json: Annotated[
        Path | None,
        typer.Option("--json", help="Also write what came out to DIR/support/<technique>.json.", metavar="DIR"),
    ] = None,
    readme: Annotated[
        Path | None,
        typer.Option("--readme", help="Only write the recorded tables of one package into its README."),
    ] = None,
    check: Annotated[
        bool,
        typer.Option("--check", help="With --readme: only say whether it holds what is recorded of these sources."),
    ] = False,
    results: Annotated[
        Path, typer.Option("--results", help="With --readme: folder that holds one folder per device.")
    ] = Path("results"),
    timeout: Annotated[
        float, typer.Option("--timeout", min=1.0, help="Seconds after which a check counts as hanging.")
    ] = TIMEOUT,
    processes: ProcessesOption = 1,
) -> None:
    """Ask every level about every row of the support table: fullgraph, export, checkpointing, sharding, determinism.

    A level may say no where it declares so; a declared no that works is as wrong as an undeclared one. The README's
    table is merged from all devices: results/<device>/support/<technique>.json. Exit code: 0 if everything is as
    declared (with --check: if the README is as recorded); 1 if anything is not; 2 for what does not exist.
    """
    if readme is not None:
        folder = readme.resolve().parent.name
        if technique not in (None, folder):
            messages.print(f"kernel-pytorch: {readme} lies in {folder}/, and is no README of {technique}", **PLAIN)
            raise typer.Exit(2)
        raise typer.Exit(_readme(readme, results, check=check))
    if check:
        messages.print("kernel-pytorch: --check compares a README with what is recorded: give --readme too", **PLAIN)
        raise typer.Exit(2)
    where = parse_device(device)
    reason = without_compiler(where)
    if reason is not None:
        messages.print(f"kernel-pytorch: the support table {reason}", **PLAIN)
        raise typer.Exit(2)
    discovery = discover()
    techniques = discovery.select(technique)
    warn_broken(discovery)
    if not techniques:
        messages.print("No technique is installed, so there is nothing to ask.")
        raise typer.Exit(1)
    check_writable(json)
    records = _examine(techniques, where, timeout, processes)
    for selected, record in zip(techniques, records, strict=True):
        _show(selected, record)
        if json is not None:
            output.print(f"written: {escape(str(record.save(json)))}", **PLAIN)
    if any(record.wrong() for record in records) or (technique is None and discovery.broken):
        raise typer.Exit(1)


def _examine(techniques: list[Technique], device: torch.device, timeout: float, count: int) -> list[SupportRecord]:
    with ExitStack() as stack:
        on_question = _telling(stack.enter_context(messages.status("asking")))
        workers = stack.enter_context(Workers(count, timeout))
        processes = None
        if without_a_device_each(device) is None:
            processes = stack.enter_context(Processes(timeout=timeout, device_type=device.type))
        return [
            examine_technique(t, device, workers=workers, processes=processes, on_question=on_question)
            for t in techniques
        ]


def _telling(status: Status) -> Callable[[str], None]:
    """What tells of a question: the line of the terminal; where there is none, one line a level of an operation."""
    if messages.is_terminal:
        return status.update
    told: dict[str, str] = {}

    def tell(label: str) -> None:
        level = label.partition(":")[0]
        if told.setdefault(level, label) is label:  # of several threads one is the first
            messages.print(f"asking {escape(level)}", **PLAIN)

    return tell


def _show(technique: Technique, record: SupportRecord) -> None:
    """Print the tables of a technique, and what is wrong."""
    for operation in technique.operations:
        table, notes = terminal_table(operation, record)
        output.print(table)
        for note in notes:
            output.print(escape(note), **PLAIN)
    for line in record.wrong():
        output.print(f"[red]wrong:[/red] {escape(line)}", **PLAIN)


def _readme(readme: Path, results: Path, *, check: bool) -> int:
    """Write or check the block of a README; the exit code."""
    name = readme.resolve().parent.name
    try:
        if not check:
            write_block(readme, BLOCK, recorded(name, results))
            return 0
        found = problems(readme, results)
    except (ReadmeError, ResultsError, UnknownNameError) as error:
        messages.print(f"kernel-pytorch: {escape(str(error))}", **PLAIN)
        return 2
    for line in found or [f"{readme} holds what is recorded of the present sources"]:
        output.print(escape(line), **PLAIN)
    return 1 if found else 0


def recorded(technique: str, results: Path) -> str:
    """The tables that the records of a technique give, without what is out of date.

    Raises:
        ResultsError: there is no record, or one cannot be read, or one holds what is wrong.
        UnknownNameError: the technique is not installed.
    """
    declared = discover().get(technique)
    records = [up_to_date(record, declared)[0] for record in load_all(results, technique).values()]
    if not records:
        raise ResultsError(f"no record in {results}/*/support/{technique}.json; `kernel-pytorch support` makes one")
    wrong = [line for record in records for line in record.wrong()]
    if wrong:
        raise ResultsError(f"what is wrong belongs into no table: {'; '.join(wrong)}")
    return markdown(declared, [record for record in records if record.outcomes])


def problems(readme: Path, results: Path) -> list[str]:
    """Why a README does not hold what is recorded of the present sources; empty if it does.

    A record that is out of date does not count, and is no problem as long as another one speaks of those sources.

    Raises:
        ReadmeError: it has no place for the table.
        ResultsError: as `recorded`.
        UnknownNameError: as `recorded`.
    """
    name = readme.resolve().parent.name
    declared = discover().get(name)
    found = []
    known: set[str] = set()
    changed: dict[str, str] = {}
    for path, record in load_all(results, name).items():
        kept, out_of_date = up_to_date(record, declared)
        known |= {f"{o.operation}/{o.implementation}" for o in kept.outcomes}
        known |= {f"{a.operation}/{a.implementation}" for a in kept.absent}
        changed |= {what: str(path) for what in out_of_date}
    for operation in declared.operations:
        for implementation in operation.implementations:
            what = f"{operation.name}/{implementation.name}"
            if what not in known:
                reason = f"{changed[what]}: {what} has changed since" if what in changed else f"{what} is not recorded"
                found.append(f"{reason}; `kernel-pytorch support {name} --json results/<device>` asks again")
    if read_block(readme, BLOCK) != recorded(name, results):
        found.append(f"{readme} does not hold what is recorded; `kernel-pytorch support --readme {readme}` writes it")
    return found
