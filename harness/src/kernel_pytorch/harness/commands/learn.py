"""`kernel-pytorch learn`: small tasks with a gap, and the check of each."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import shutil
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from torch import Tensor

from kernel_pytorch.harness.commands.common import PLAIN, output
from kernel_pytorch.harness.commands.learning.checks import TASKS
from kernel_pytorch.harness.errors import UserError, said

RELATIVE, ABSOLUTE = 1e-4, 1e-6
"""Tolerances for a tensor: results are of float32, and what a task can get wrong is far larger."""


def learn_command(
    name: Annotated[str | None, typer.Argument(help="Name of a task; without one they are listed.")] = None,
    check: Annotated[Path | None, typer.Option("--check", help="The file of a task, to be checked.")] = None,
) -> None:
    """Copy a task into the current folder, or check it: the first wrong case, expected, got, and the page about it.

    A task is a Python file with a gap. The check compares and counts, and never times. Exit code: 0; 1 for a file that
    is wrong; 2 for a name or a file that does not exist, and where a file would be written over.
    """
    if check is not None:
        _check(check)
    elif name is None:
        for task, (path, minutes, *_) in TASKS.items():
            output.print(f"{task:16} {path:13} {minutes:3} min  {title(task)}", **PLAIN)
        output.print("kernel-pytorch learn NAME copies a task; kernel-pytorch learn --check FILE checks it.", **PLAIN)
    elif name not in TASKS:
        raise UserError(f"there is no task {name!r}; there are: {', '.join(TASKS)}")
    elif Path(file_of(name).name).exists():
        raise UserError(f"{file_of(name).name} is there already; move it first")
    else:
        file = Path(shutil.copyfile(file_of(name), file_of(name).name))
        output.print(f"{file}: {title(name)}. Then kernel-pytorch learn --check {file}", **PLAIN)


def file_of(name: str) -> Path:
    """The file that a task starts with."""
    return Path(__file__).parent / "learning" / "tasks" / f"{name.replace('-', '_')}.py"


def title(name: str) -> str:
    """What a task is about: the first line of its file, without its name."""
    docstring = ast.get_docstring(ast.parse(file_of(name).read_text("utf-8"))) or ""
    return docstring.partition("\n")[0].partition(": ")[2].rstrip(".")


def load(file: Path) -> ModuleType:
    """The module in a file; what it raises while it is imported goes on."""
    name = f"kernel_pytorch_task_{file.stem}_{abs(hash(file))}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Triton and Dynamo look there for the source of a function
    spec.loader.exec_module(module)
    return module


def first_problem(name: str, file: Path) -> tuple[str, str, str] | int:
    """(case, expected, got) of the first case in which a file is wrong; the number of cases, where it is right."""
    case, count = "import", 0
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # what the reader's code prints
            start = load(file_of(name))  # first: an operator that both register shall be the reader's
            for case, expected, got in TASKS[name].check(load(file), start):
                if differs(expected, got):
                    return case, *shown(expected, got)
                count += 1
    except Exception as error:  # whatever the reader's code raises
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == file]
        where = f" (line {lines[-1]})" if lines else ""
        message = said(error) + where
        return f"after {case!r}" if count else case, "no error", message
    return count


def differs(expected: Any, got: Any) -> bool:
    """Whether two values are not the same; tensors may differ by rounding, and NaN is never right."""
    if not isinstance(expected, Tensor):
        return bool(expected != got)
    if not isinstance(got, Tensor) or got.shape != expected.shape:
        return True
    return not got.detach().double().allclose(expected.detach().double(), RELATIVE, ABSOLUTE)


def shown(expected: Any, got: Any) -> tuple[str, str]:
    """Both in a line: of two tensors of one shape the elements that differ most, else their shapes."""
    if isinstance(expected, Tensor) and isinstance(got, Tensor) and got.shape == expected.shape:
        off = (expected.detach().double() - got.detach().double()).abs().nan_to_num(float("inf"))
        place = tuple(int(i) for i in torch.unravel_index(off.argmax(), off.shape))
        return f"{float(expected[place]):.6g} at {list(place)}", f"{float(got[place]):.6g}"
    text = [f"shape {list(value.shape)}" if isinstance(value, Tensor) else str(value) for value in (expected, got)]
    return text[0], text[1]


def _check(file: Path) -> None:
    name = file.stem.replace("_", "-")
    if name not in TASKS:
        raise UserError(f"{file.name} is no task's file; those are {', '.join(file_of(each).name for each in TASKS)}")
    if not file.is_file():
        raise UserError(f"there is no file {file}")
    found = first_problem(name, file.resolve())
    if isinstance(found, int):
        output.print(f"{file.name}: right in {found} cases", **PLAIN)
        return
    lines = [f"{file.name} is wrong", *(f"  {k}: {v}" for k, v in zip(("case", "expected", "got"), found, strict=True))]
    output.print(escape("\n".join([*lines, f"  read: docs/guide/{TASKS[name].page}.md"])), **PLAIN)
    raise typer.Exit(1)
