"""What the subcommands share: consoles, options and the errors of a mistyped name."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table

from kernel_pytorch.harness.discovery import Discovery, discover
from kernel_pytorch.harness.errors import UserError
from kernel_pytorch.harness.noise import CpuReader
from kernel_pytorch.harness.peers import add_peers
from kernel_pytorch.harness.technique import Technique

# Tables are wide, and a pipe or a file has no width.
output = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160)
messages = Console(stderr=True)
# How sentences are printed: one line each, whatever the width, so that they can be searched for.
PLAIN: dict[str, Any] = {"highlight": False, "soft_wrap": True}

LINE_EVERY = 5.0
"""Seconds between two lines about progress where there is no terminal."""

BUSY = 0.7
"""Processes that want a core, per core, from which on a warning is due."""

TechniqueArgument = Annotated[
    str | None,
    typer.Argument(help="Name of one technique, as `kernel-pytorch list` prints it; all of them if omitted."),
]
LevelOption = Annotated[
    list[str] | None,
    typer.Option("--level", help="Only this level (reference, native, ...). May be given several times."),
]
OperationOption = Annotated[
    list[str] | None,
    typer.Option("--operation", help="Only this operation (rms_norm, swiglu, ...). May be given several times."),
]
DeviceOption = Annotated[
    str | None,
    typer.Option("--device", help="cpu, cuda or cuda:1. The first GPU where there is one, else the CPU, if omitted."),
]
PeersOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--peers",
        help="A package's benchmarks/peers.py: other libraries' implementations take part. May be given several times.",
    ),
]

TimeoutOption = Annotated[
    float, typer.Option("--timeout", min=1.0, help="Seconds after which a case counts as hanging.")
]
JobsOption = Annotated[
    int, typer.Option("--jobs", min=1, help="How many to run beside each other; most of their time is compilation.")
]


def tell(*lines: object, mark: str = "", color: str = "red", to: Console = output) -> None:
    """Print each line as it is, without markup, after a colored mark if there is one."""
    for line in lines:
        to.print((f"[{color}]{mark}:[/{color}] " if mark else "") + escape(str(line)), **PLAIN)


def text_table(title: str, columns: Iterable[str | Column], rows: Iterable[Iterable[str]] = ()) -> Table:
    """Make a table for the terminal, titled at the left."""
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    return table


def select(technique: str | None, purpose: str = "") -> tuple[list[Technique], dict[str, str]]:
    """Find the technique of that name, or all of them, and name broken packages; exit if there is none for a purpose.

    Returns:
        The techniques, and the broken packages where all techniques were asked for.
    """
    discovery = discover()
    techniques = discovery.select(technique)
    warn_broken(discovery)
    if purpose and not techniques:
        messages.print(f"No technique is installed, so there is nothing to {purpose}.")
        raise typer.Exit(1)
    return techniques, discovery.broken if technique is None else {}


def load_peers(files: list[Path] | None) -> Callable[[], object] | None:
    """Add the peers in this process, and return what adds them in another; None where there are none."""
    if files:
        add_peers(files)
    return partial(add_peers, files) if files else None


def check_names(what: str, given: list[str] | None, known: Iterable[str]) -> list[str] | None:
    """The names, or None if there are none. Raises UserError for one that is not known, listing those that are."""
    allowed = list(dict.fromkeys(known))
    for name in given or []:
        if name not in allowed:
            raise UserError(f"no {what} {name!r}; there are: {', '.join(allowed)}")
    return given or None


def of_these(known: Iterable[str], wanted: list[str] | None) -> tuple[str, ...] | None:
    """The known names that are wanted; None if all are."""
    return None if wanted is None else tuple(name for name in known if name in wanted)


def operation_names(techniques: Iterable[Technique]) -> list[str]:
    """Names of all operations of these techniques."""
    return [o.name for t in techniques for o in t.operations]


class Steps:
    """Progress on standard error: a bar in a terminal; elsewhere a line, at most one every few seconds.

    A context manager. It is called with the name of each step, before that begins.
    """

    def __init__(self, name: str, total: int | None = None) -> None:
        """How many steps there are may be unknown."""
        self._name, self._total, self._count = name, total, itertools.count()
        self._begin = self._last = time.monotonic()
        of_all = () if total is None else (BarColumn(10), MofNCompleteColumn())
        step = TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1))
        columns = (TextColumn(name, table_column=Column(no_wrap=True)), *of_all, TimeElapsedColumn(), step)
        self._bar = Progress(*columns, console=messages, transient=True, expand=True)
        self._task = self._bar.add_task("", total=total)

    def __call__(self, step: str) -> None:
        """Show this step."""
        done, now = next(self._count), time.monotonic()
        if messages.is_terminal:
            self._bar.update(self._task, description=escape(step), completed=done)
        elif done == 0 or now - self._last >= LINE_EVERY:
            self._last = now
            of_all = "" if self._total is None else f" {done + 1} of {self._total},"
            messages.print(escape(f"{self._name}:{of_all} {now - self._begin:.0f} s: {step}"), **PLAIN)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Take the bar away while something else is printed."""
        self.__exit__()
        yield
        self.__enter__()

    def __enter__(self) -> Steps:
        if messages.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if messages.is_terminal:
            self._bar.stop()


def warn_broken(discovery: Discovery) -> None:
    """Say which packages could not be loaded, and go on."""
    for name, reason in discovery.broken.items():
        tell(reason, mark=f"technique {name} is broken and left out", color="yellow", to=messages)


def warn_if_busy() -> None:
    """Say so if other work wants the processor: it disturbs figures, and ceilings that are too low flatter them."""
    load = CpuReader().read().load
    if load is not None and load > BUSY:
        messages.print(f"[yellow]this machine is busy ({load:.1f} processes per core): figures will be unsure[/yellow]")


def check_writable(target: Path | None) -> None:
    """Raise UserError, before anything is measured, if results could not be written there."""
    if target is None:
        return
    folder = target.parent if target.suffix == ".json" else target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        reason = None if os.access(folder, os.W_OK) else "permission denied"
    except OSError as error:
        reason = error.strerror or str(error)
    if reason is not None:
        raise UserError(f"cannot write {target}: {reason}")
