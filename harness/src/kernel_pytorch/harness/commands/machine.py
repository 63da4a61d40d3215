"""`kernel-pytorch machine`: what this machine is and can do, and whether the clock can be trusted on it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.table import Table

from kernel_pytorch.harness.availability import parse_device
from kernel_pytorch.harness.clock import self_test
from kernel_pytorch.harness.commands.common import DeviceOption, messages, output, warn_if_busy
from kernel_pytorch.harness.environment import describe_environment
from kernel_pytorch.harness.machine import Machine, measure_machine


def machine_command(
    device: DeviceOption = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and rounds.")] = False,
    test_clock: Annotated[
        bool, typer.Option("--self-test", help="Time two identical functions and a 10% slower one; print the verdicts.")
    ] = False,
    slug: Annotated[bool, typer.Option("--slug", help="Print only the folder name of this device's results.")] = False,
    json: Annotated[Path | None, typer.Option("--json", help="Also write the record to this file.")] = None,
) -> None:
    """Measure copy bandwidth, matrix rate and launch overhead, and print them with the environment.

    Exit code: 0; with --self-test 1 if the clock could not tell the same from the slower.
    """
    where = parse_device(device)
    if slug:
        output.print(describe_environment(where).slug, highlight=False)
        return
    if test_clock:
        run_self_test(where)
        return
    warn_if_busy()
    with messages.status("measuring") as status:
        machine = measure_machine(where, quick=quick, on_step=lambda step: status.update(f"measuring: {step}"))
    for table in tables(machine):
        output.print(table)
    if json is not None:
        machine.save(json)


def run_self_test(device: torch.device) -> None:
    """Time functions whose difference is known, and exit 1 if the clock did not see it."""
    with messages.status("timing two identical functions and a 10% slower one"):
        results = self_test(device)
    table = Table("pair", "expected", "came out", "speedup", "99% interval", title="the clock's self-test")
    for r in results:
        speedup = r.comparison.speedup
        style = "green" if r.passed else "red"
        verdict = f"[{style}]{r.comparison.verdict.name}[/{style}]"
        interval = f"{speedup.low:.4f} to {speedup.high:.4f}"
        table.add_row(r.name, r.expected.name, verdict, f"{speedup.median:.4f}", interval)
    output.print(table)
    if not all(r.passed for r in results):
        output.print("The clock cannot tell 10% on this machine now: stop what else runs here, and try again.")
        raise typer.Exit(1)


def tables(machine: Machine) -> list[Table]:
    """The environment, the streams, and the rest."""
    environment = Table("what", "value", title="environment", title_justify="left")
    for name, value in machine.environment.model_dump().items():
        environment.add_row(name.replace("_", " "), "not known" if value is None else str(value))
    streams = Table("working set", "memory", "copy", "fastest stream", title="bandwidth", title_justify="left")
    for p in machine.ceilings.bandwidth:
        figures = (f"{rate / 1e9:,.1f} GB/s" for rate in (p.bytes_per_second, p.peak_bytes_per_second))
        streams.add_row(f"{p.bytes / 2**20:,.2f} MiB", p.memory, *figures)
    rates = Table("what", "measured", title="arithmetic and launches", title_justify="left")
    for dtype, rate in machine.ceilings.matmul_flops_per_second.items():
        rates.add_row(f"matrix product, {dtype}", f"{rate / 1e12:,.3f} TFLOP/s")
    rates.add_row("launch of the smallest operation", f"{machine.ceilings.launch_overhead_seconds * 1e6:.2f} µs")
    return [environment, streams, rates]
