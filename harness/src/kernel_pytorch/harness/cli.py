"""`kernel-pytorch`: the harness from the command line.

Other packages add commands through the entry-point group `kernel_pytorch.commands`: a name and a function that typer
can turn into a command.
"""

from __future__ import annotations

import sys
from importlib.metadata import entry_points

import typer

from .commands.bench import bench_command
from .commands.common import messages
from .commands.list import list_command
from .commands.machine import machine_command
from .commands.verify import verify_command
from .discovery import UnknownNameError
from .interpreter import interpret_without_gpu

COMMAND_GROUP = "kernel_pytorch.commands"

app = typer.Typer(
    name="kernel-pytorch",
    help="Verify, time and explain the techniques that are installed here.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("list")(list_command)
app.command("verify")(verify_command)
app.command("bench")(bench_command)
app.command("machine")(machine_command)


def add_foreign_commands() -> None:
    """Add the commands of other packages; one that cannot be loaded is named and left out."""
    for entry_point in sorted(entry_points(group=COMMAND_GROUP), key=lambda e: e.name):
        try:
            app.command(entry_point.name)(entry_point.load())
        except Exception as error:  # whatever a package does wrong is its own affair
            messages.print(f"[yellow]command {entry_point.name} is broken and left out:[/yellow] {error}")


def main() -> None:
    """Run the command line; a name that does not exist ends with one line and exit code 2."""
    interpret_without_gpu()
    add_foreign_commands()
    try:
        app()
    except UnknownNameError as error:
        messages.print(f"kernel-pytorch: {error}", highlight=False, soft_wrap=True)
        sys.exit(2)
