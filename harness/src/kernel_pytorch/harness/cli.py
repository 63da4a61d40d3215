"""`kernel-pytorch`: the harness from the command line.

Other packages add commands through the entry-point group `kernel_pytorch.commands`: a name and a function that typer
can turn into a command.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import importlib.util
import inspect
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points, version
from typing import Annotated, Any, NoReturn

import typer
from rich.markup import escape
from typer.core import TyperGroup

from kernel_pytorch.harness.commands.common import PLAIN, messages, output
from kernel_pytorch.harness.errors import UserError
from kernel_pytorch.harness.interpreter import interpret_without_gpu
from kernel_pytorch.harness.scratch import command_scratch

COMMAND_GROUP = "kernel_pytorch.commands"
RENAMED = {"machine": "calibrate", "--whole-cost": "--overheads", "--processes": "--jobs"}  # until the next release


def reflowed(text: str) -> str:
    """A docstring with each paragraph in one line: typer keeps the line breaks of all but the first in its help."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in inspect.cleandoc(text).split("\n\n"))


class Commands(TyperGroup):
    """The commands; an error that the user can mend ends each with one line and exit code 2."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take old names for new ones, and print a line about each."""
        for place, argument in enumerate(args):
            name, equals, value = argument.partition("=")
            if name in RENAMED and (name.startswith("-") or place == 0):
                args[place] = RENAMED[name] + equals + value
                messages.print(f"[yellow]{name} is now called {RENAMED[name]}[/yellow]", highlight=False)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except UserError as error:
            messages.print(f"kernel-pytorch: {escape(str(error))}", **PLAIN)
            raise typer.Exit(2) from None


app = typer.Typer(
    cls=Commands,
    name="kernel-pytorch",
    help="Verify, time and explain the techniques that are installed here.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
# In the order of the help; `name_command` in the module `commands.name` is what each does.
COMMANDS = ["list", "verify", "bench", "adopt", "compare", "report", "profile"]
COMMANDS += ["calibrate", "static", "support", "models", "new", "learn"]
for name in COMMANDS:
    command = getattr(importlib.import_module(f"kernel_pytorch.harness.commands.{name}"), f"{name}_command")
    app.command(name, help=reflowed(command.__doc__ or ""))(command)


def add_foreign_commands() -> None:
    """Add the commands of other packages; one that cannot be loaded is named and left out."""
    for entry_point in sorted(entry_points(group=COMMAND_GROUP), key=lambda e: e.name):
        try:
            function = entry_point.load()
            _check_command(function)
            app.command(entry_point.name)(function)
        except Exception as error:  # whatever a package does wrong is its own affair
            reason = escape(f"{type(error).__name__}: {error}")
            messages.print(f"[yellow]command {entry_point.name} is broken and left out:[/yellow] {reason}", **PLAIN)


def _check_command(function: Callable[..., object]) -> None:
    """Raise what typer would raise later, when one bad command would take all others with it."""
    alone = typer.Typer()
    alone.command()(function)
    typer.main.get_command(alone)


def _print_version(asked: bool) -> None:
    if asked:
        names = ("kernel-pytorch-harness", "torch", "triton")
        found = {name: version(name) for name in names if importlib.util.find_spec(name) or name == names[0]}
        output.print(", ".join(f"{name} {number}" for name, number in found.items()), **PLAIN)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print versions and exit.")
    ] = False,
) -> None:
    """Verify, time and explain the techniques that are installed here."""


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Make SIGTERM end the command as an error does: child processes are ended and temporary files removed."""

    def stop(signum: int, frame: object) -> NoReturn:
        sys.exit(128 + signum)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main() -> None:
    """Run the command line; a full disk ends with one line and exit code 2."""
    interpret_without_gpu()
    add_foreign_commands()
    try:
        with _ended_by_sigterm(), command_scratch():
            app()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = "" if error.filename is None else f"{error.filename}: "
        messages.print(f"kernel-pytorch: {escape(f'{where}{error.strerror}')}", **PLAIN)
        sys.exit(2)
