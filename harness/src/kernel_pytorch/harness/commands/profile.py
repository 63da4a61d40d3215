"""`kernel-pytorch profile`: time and memory of any module, by operator."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kernel_pytorch.harness.availability import parse_device
from kernel_pytorch.harness.commands.common import DeviceOption, check_writable, messages, output, tell, warn_if_busy
from kernel_pytorch.harness.errors import UserError
from kernel_pytorch.harness.profiling import profile_module
from kernel_pytorch.harness.profiling.factory import make, moved, place_of
from kernel_pytorch.harness.profiling.profile import STEPS
from kernel_pytorch.harness.profiling.records import remarks, summary


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
        typer.Option(
            "--out", help="Write profile.json, trace.json (Perfetto) and, on a GPU, memory.pickle (memory_viz) there."
        ),
    ] = None,
) -> None:
    """Profile a module: top operators and kernels against the machine's limits, peak memory, a trace, a snapshot.

    Exit code: 0; 2 for what cannot be imported, made, run or written.
    """
    where = parse_device(device)
    trace = None if out is None else out / "trace.json"
    snapshot = None if out is None or where.type != "cuda" else out / "memory.pickle"
    check_writable(trace)
    made = make(factory)
    warn_if_busy()
    try:
        with messages.status("profiling") as status:
            made = moved(made, where)
            profile = profile_module(
                made.module,
                *made.inputs,
                kwargs=made.kwargs,
                backward=backward,
                steps=steps,
                compile=compile,
                trace=trace,
                snapshot=snapshot,
                on_stage=status.update,
            )
    except Exception as error:  # most of what runs here is the module's own code
        raise UserError(f"{factory} could not be profiled: {type(error).__name__}: {error}{place_of(error)}") from error
    output.print(profile.table(top))
    tell(*summary(profile), *remarks(profile, top))
    if out is not None:
        tell(f"Written: {', '.join(str(file) for file in (*profile.write(out), trace, snapshot) if file is not None)}")
        viewers = "trace.json opens at https://ui.perfetto.dev, memory.pickle at https://docs.pytorch.org/memory_viz"
        tell(f"{viewers}; neither leaves your machine.", to=messages)
