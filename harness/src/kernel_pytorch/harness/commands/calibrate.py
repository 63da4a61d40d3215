"""`kernel-pytorch calibrate`: the environment and the measured limits of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kernel_pytorch.harness.availability import parse_device
from kernel_pytorch.harness.commands.common import DeviceOption, messages, output, warn_if_busy
from kernel_pytorch.harness.environment import describe_environment
from kernel_pytorch.harness.errors import UserError
from kernel_pytorch.harness.machine import Machine, measure_machine
from kernel_pytorch.harness.tables import PrintableTable, table

NO_SELF_TEST = "--self-test was removed; `kernel_pytorch.harness.compare_implementations` takes one function twice"


def calibrate_command(
    device: DeviceOption = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer sizes and rounds.")] = False,
    self_test: Annotated[bool, typer.Option("--self-test", hidden=True)] = False,
    slug: Annotated[bool, typer.Option("--slug", help="Print only the folder name of this device's results.")] = False,
    json: Annotated[Path | None, typer.Option("--json", help="Also write the record to this file.")] = None,
) -> None:
    """Measure copy bandwidth, matrix rate and launch overhead, and print them with the environment.

    Exit code: 0; 2 for --self-test, which was removed.
    """
    where = parse_device(device)
    if slug:
        output.print(describe_environment(where).slug, highlight=False)
        return
    if self_test:
        raise UserError(NO_SELF_TEST)
    warn_if_busy()
    with messages.status("measuring") as status:
        machine = measure_machine(where, quick=quick, on_step=lambda step: status.update(f"measuring: {step}"))
    output.print(*tables(machine), sep="\n")
    if json is not None:
        machine.save(json)


def tables(machine: Machine) -> list[PrintableTable]:
    """The environment, the streams, and the rest."""
    about = machine.environment.model_dump().items()
    environment = [(name.replace("_", " "), "not known" if value is None else str(value)) for name, value in about]
    streams = []
    for p in machine.ceilings.bandwidth:
        figures = (f"{rate / 1e9:,.1f} GB/s" for rate in (p.bytes_per_second, p.peak_bytes_per_second))
        streams.append((f"{p.bytes / 2**20:,.2f} MiB", p.memory, *figures))
    products = machine.ceilings.matmul_flops_per_second.items()
    rates = [(f"matrix product, {dtype}", f"{rate / 1e12:,.3f} TFLOP/s") for dtype, rate in products]
    rates.append(("launch of the smallest operation", f"{machine.ceilings.launch_overhead_seconds * 1e6:.2f} µs"))
    return [
        table("environment", ("what", "value"), environment, text=2),
        table("bandwidth", ("working set", "memory", "copy", "fastest stream"), streams, text=4),
        table("arithmetic and launches", ("what", "measured"), rates, text=2),
    ]
