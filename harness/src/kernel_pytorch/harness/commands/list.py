"""`kernel-pytorch list`: what is installed, and what each level can do here."""

from __future__ import annotations

import torch
from rich.markup import escape
from rich.table import Column

from kernel_pytorch.harness.availability import (
    DTYPES,
    default_for,
    description,
    parse_device,
    why_not_timed,
    why_unavailable,
)
from kernel_pytorch.harness.commands.adopt import show_adopted
from kernel_pytorch.harness.commands.common import PLAIN, DeviceOption, TechniqueArgument, output, tell, text_table
from kernel_pytorch.harness.discovery import discover
from kernel_pytorch.harness.interpreter import is_interpreting
from kernel_pytorch.harness.technique import Implementation, Level, Technique


def list_command(technique: TechniqueArgument = None, device: DeviceOption = None) -> None:
    """Print every installed technique, its operations, the state of each level on this machine, and what is adopted."""
    where = parse_device(device)
    discovery = discover()
    techniques = discovery.select(technique)
    for found in techniques:
        columns = [Column(name, overflow="fold") for name in ("operation", "level", f"on {where}", "default")]
        table = text_table(escape(f"{found.name}: {found.title}"), columns)
        for operation in found.operations:
            for implementation in operation.implementations:
                default = default_for(found, operation, implementation, where)
                row = (operation.name, implementation.name, state(found, implementation, where), default)
                table.add_row(*row, end_section=implementation is operation.implementations[-1])
        output.print(table)
    show_adopted(techniques, where, technique)
    if technique is None:
        for name, reason in discovery.broken.items():
            output.print(f"[red]{name}: broken.[/red] {escape(reason)}", **PLAIN)
        if not techniques and not discovery.broken:
            tell("No technique is installed. In a checkout of kernel-pytorch: pip install ./packages/<technique>")


def state(technique: Technique, implementation: Implementation, device: torch.device) -> str:
    """Whether a level runs there, in which dtypes it does not, and why."""
    reasons = {dtype: why_unavailable(technique, implementation, device, dtype) for dtype in DTYPES}
    if all(reasons.values()):
        return f"[yellow]cannot run:[/yellow] {escape(str(reasons[torch.float32]))}"
    if implementation.level is Level.TRITON and device.type == "cpu" and is_interpreting():
        return "checked by Triton's interpreter, never timed (float32, float16); no GPU"
    not_timed = why_not_timed(technique, implementation, device, torch.float32)
    about = f" ({escape(text)})" if (text := description(technique, implementation, device)) else ""
    return f"runs{about}" if not_timed is None else f"runs, not timed: {escape(not_timed)}"
