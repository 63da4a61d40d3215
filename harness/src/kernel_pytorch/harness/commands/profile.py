"""`kernel-pytorch profile`: where the time and the memory of any module go."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.markup import escape

from kernel_pytorch.harness.availability import parse_device
from kernel_pytorch.harness.commands.common import (
    PLAIN,
    DeviceOption,
    check_writable,
    messages,
    output,
    warn_if_busy,
)
from kernel_pytorch.harness.profiling import profile_module
from kernel_pytorch.harness.profiling.factory import FactoryError, Made, make, moved, place_of
from kernel_pytorch.harness.profiling.profile import STEPS
from kernel_pytorch.harness.profiling.records import Profile
from kernel_pytorch.harness.profiling.tables import remarks, summary


def profile_command(
    factory: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FACTORY",
            help="A function without arguments that returns (module, inputs) or (module, inputs, kwargs), as in "
            "models.small:make. The current folder is on the path.",
        ),
    ],
    device: DeviceOption = None,
    backward: Annotated[
        bool,
        typer.Option("--backward", help="Profile the backward too, with random gradients coming in at every output."),
    ] = False,
    compile: Annotated[bool, typer.Option("--compile", help="Profile torch.compile(module).")] = False,
    steps: Annotated[int, typer.Option("--steps", min=1, help="How many steps are profiled.")] = STEPS,
    top: Annotated[int, typer.Option("--top", min=1, help="How many rows are printed.")] = 20,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Write page.html, profile.json, memory.svg and trace.json (Perfetto) there."),
    ] = None,
) -> None:
    """Profile a module: top operators and kernels on the roofline, memory over time, a trace, a page.

    Exit code: 0; 2 for what cannot be imported, made, run or written.
    """
    where = parse_device(device)
    trace = None if out is None else out / "trace.json"
    check_writable(trace)
    try:
        made = make(factory)
    except FactoryError as error:
        _stop(str(error))
    warn_if_busy()
    try:
        with messages.status("profiling") as status:
            profile = _profile(moved(made, where), backward, compile, steps, trace, status.update)
    except Exception as error:  # most of what runs here is the module's own code
        _stop(f"{factory} could not be profiled: {type(error).__name__}: {error}{place_of(error)}")
    output.print(profile.table(top))
    for line in (*summary(profile), *remarks(profile, top)):
        output.print(escape(line), **PLAIN)
    if out is not None and trace is not None:
        output.print(f"Written: {escape(', '.join(map(str, [*profile.write(out), trace])))}", **PLAIN)
        output.print("trace.json opens at https://ui.perfetto.dev; it does not leave your machine.", **PLAIN)


def _profile(
    made: Made, backward: bool, compile: bool, steps: int, trace: Path | None, on_stage: Callable[[str], None]
) -> Profile:
    return profile_module(
        made.module,
        *made.inputs,
        kwargs=made.kwargs,
        backward=backward,
        compile=compile,
        steps=steps,
        trace=trace,
        on_stage=on_stage,
    )


def _stop(message: str) -> NoReturn:
    messages.print(f"kernel-pytorch: {escape(message)}", **PLAIN)
    raise typer.Exit(2) from None
