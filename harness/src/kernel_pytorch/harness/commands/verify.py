"""`kernel-pytorch verify`: is every level right?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.table import Column
from rich.text import Text

from kernel_pytorch.harness.api import level_names, verify
from kernel_pytorch.harness.availability import parse_device
from kernel_pytorch.harness.commands import common
from kernel_pytorch.harness.isolation import Workers
from kernel_pytorch.harness.peers import PEER_PREFIX
from kernel_pytorch.harness.results import VERIFICATION_SUFFIX, VerificationReport
from kernel_pytorch.harness.verification import Verification, tasks

CASE_TIMEOUT = 300.0
WORST = "worst error, of its budget"
REASONS_SHOWN = 3
"""Per operation and level: a kernel that refuses shapes gives a reason for each."""


def verify_command(
    technique: common.TechniqueArgument = None,
    level: common.LevelOption = None,
    device: common.DeviceOption = None,
    exhaustive: Annotated[
        bool, typer.Option("--exhaustive", help="Run torch.compile on every case too, not on the core cases alone.")
    ] = False,
    peers: common.PeersOption = None,
    json: Annotated[
        Path | None, typer.Option("--json", help="Also write what was found to this file (one technique) or folder.")
    ] = None,
    timeout: common.TimeoutOption = CASE_TIMEOUT,
    jobs: common.JobsOption = 1,
) -> None:
    """Check every level against the reference in float64, forward and gradients, on awkward and adversarial inputs.

    A level may err twice as far as the reference itself does in that dtype, plus one unit in the last place; a miss
    counts if inputs of another seed miss too. A case that crashes or hangs counts as wrong, and the others continue.

    Exit code: 0 if every level that can run here is right, 1 if any of ours is wrong, 2 for a name that does not exist.
    """
    where = parse_device(device)
    prepare = common.load_peers(peers)
    techniques, broken = common.select(technique, "verify")
    levels = common.check_names("level", level, level_names(o for t in techniques for o in t.operations))
    common.check_writable(json)
    every = [task for t in techniques for task in tasks(t, where, levels=levels, exhaustive=exhaustive)]
    total = sum(len(task.implementations) for task in every)
    with Workers(jobs, timeout, prepare) as workers, common.Steps("verify", total) as done:
        wrong = 0

        def on_trial(verification: Verification) -> None:
            nonlocal wrong
            wrong += not verification.passed
            done(f"{verification.operation} {verification.implementation}" + f", {wrong} wrong" * bool(wrong))

        options = {"device": where, "exhaustive": exhaustive, "workers": workers, "on_trial": on_trial}
        reports = [
            verify(t.name, levels=common.of_these(level_names(t.operations), levels), **options) for t in techniques
        ]
    common.output.print(table(reports))
    common.tell(*(f"not asked: {line}" for r in reports for line in r.spared))
    wrong_levels = [each for r in reports for each in r.levels if each.failures]
    common.tell(*(line for each in wrong_levels for line in each.failures), mark="wrong")
    failures = [e for e in wrong_levels if not e.implementation.startswith(PEER_PREFIX)]  # what others do is only told
    if broken:
        common.tell(", ".join(broken), mark="broken packages")
    if json is not None:
        for r in reports:
            one_file = len(reports) == 1 and json.suffix == ".json"
            r.save(json if one_file else json / f"{r.technique}{VERIFICATION_SUFFIX}")
    if failures or broken:
        raise typer.Exit(1)


def table(reports: list[VerificationReport]) -> Group:
    """One row per operation and level, and below them what could not run, so that 80 columns hold the names."""
    columns = [Column(name, overflow="fold") for name in ("operation", "level", "cases right", WORST)]
    found = common.text_table("checked against the reference in float64", columns)
    missing: list[RenderableType] = []
    for r in reports:
        if len(reports) > 1:
            found.add_section()
            found.add_row(Text(r.technique, style="bold"))
        for row in r.levels:
            style, worst = "green" if row.right == row.ran else "red", "" if row.worst is None else f"{row.worst:.0%}"
            right = f"[{style}]{row.right} of {row.ran}[/{style}]" if row.ran else "[yellow]none ran[/yellow]"
            found.add_row(row.operation, row.implementation, right, worst)
            if row.not_run:
                more = len(row.unavailable) - REASONS_SHOWN
                left_out = [f"{more} more reasons, see --json"] if more > 0 else []
                why = "; ".join([*row.unavailable[:REASONS_SHOWN], *left_out])
                missing.append(Text(f"{row.operation} {row.implementation}, {row.not_run} could not run: {why}"))
    return Group(found, *missing)
