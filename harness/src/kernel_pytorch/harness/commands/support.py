"""`kernel-pytorch support`: what works with what?"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from kernel_pytorch.harness.availability import parse_device
from kernel_pytorch.harness.commands.common import (
    DeviceOption,
    JobsOption,
    Steps,
    TechniqueArgument,
    check_writable,
    output,
    select,
    tell,
    text_table,
)
from kernel_pytorch.harness.discovery import discover
from kernel_pytorch.harness.errors import UserError
from kernel_pytorch.harness.isolation import Workers
from kernel_pytorch.harness.support import Processes, SupportRecord, examine_technique, load, problems
from kernel_pytorch.harness.support.examination import without_a_device_each, without_compiler
from kernel_pytorch.harness.support.record import FOLDER, tabulate
from kernel_pytorch.harness.technique import Technique


def support_command(
    technique: TechniqueArgument = None,
    device: DeviceOption = None,
    json: Annotated[
        Path | None,
        typer.Option("--json", help="Also write what came out to DIR/support/<technique>.json.", metavar="DIR"),
    ] = None,
    changed: Annotated[
        bool, typer.Option("--changed", help="With --json: ask only about levels that changed since the record there.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Only say whether everything is recorded of the present code.")
    ] = False,
    results: Annotated[
        Path, typer.Option("--results", help="With --check: folder that holds one folder per device.")
    ] = Path("results"),
    timeout: Annotated[
        float, typer.Option("--timeout", min=1.0, help="Seconds after which a check counts as hanging.")
    ] = 300.0,
    jobs: JobsOption = 1,
) -> None:
    """Test which PyTorch features each level supports: fullgraph, export, checkpointing, sharding, determinism.

    A level may say no where it declares so; undeclared failures and stale declarations both fail. The site merges the
    records of all devices, results/<device>/support/<technique>.json, into one table.

    Exit code: 0 if everything is as declared (with --check: recorded); 1 if anything is not; 2 for what does not exist.
    """
    if check:
        found = [line for t in discover().select(technique) for line in problems(t.name, results)]
        tell(*(found or ["everything is recorded of the present code"]))
        raise typer.Exit(1 if found else 0)
    where = parse_device(device)
    reason = without_compiler(where)
    if reason is not None:
        raise UserError(f"the support table {reason}")
    techniques, broken = select(technique, "ask")
    check_writable(json)
    if changed and json is None:
        raise typer.BadParameter("needs --json DIR, whose record says what was asked before", param_hint="--changed")
    known = {file.stem: load(file) for file in json.glob(f"{FOLDER}/*.json")} if changed and json is not None else {}
    with ExitStack() as stack:
        steps = stack.enter_context(Steps("support"))
        workers = stack.enter_context(Workers(jobs, timeout))
        processes = None
        if without_a_device_each(where) is None:
            processes = stack.enter_context(Processes(timeout=timeout, device_type=where.type))
        examine = partial(examine_technique, workers=workers, processes=processes, on_question=steps)
        records = [examine(t, where, known=known.get(t.name)) for t in techniques]
    for selected, record in zip(techniques, records, strict=True):
        _show(selected, record)
        if json is not None:
            tell(f"written: {record.save_in(json)}")
    if any(record.wrong() for record in records) or broken:
        raise typer.Exit(1)


def _show(technique: Technique, record: SupportRecord) -> None:
    """Print the tables of a technique, and what is wrong."""
    for operation in technique.operations:
        header, rows, reasons, absent = tabulate(operation, [record])
        colored = ((f"[red]{text}[/red]" if text.startswith("wrong") else text for text in row) for row in rows)
        output.print(text_table(operation.name, header, colored))
        tell(*(f"({number}) {reason}" for number, reason in enumerate(reasons, 1)), *absent)
    tell(*record.wrong(), mark="wrong")
