"""`kernel-pytorch doctor`: what to change in a model."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from kernel_pytorch.compile_recipes.assistant import CompilerOptimizationAssistant
from kernel_pytorch.compile_recipes.guard import over_budget, read_budget
from kernel_pytorch.compile_recipes.records import Report
from kernel_pytorch.compile_recipes.report import details, summary
from kernel_pytorch.harness.availability import parse_device
from kernel_pytorch.harness.commands.common import PLAIN, DeviceOption, Steps, check_writable, messages
from kernel_pytorch.harness.errors import UserError
from kernel_pytorch.harness.profiling.factory import Made, make, moved


def doctor_command(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="module:factory or file.py:factory. The factory takes no arguments and returns (module, inputs) or "
            "(module, inputs, kwargs).",
        ),
    ],
    device: DeviceOption = None,
    gpu: Annotated[
        str | None, typer.Option("--gpu", help="h100, h200 or a100 for least times there; here to measure this one.")
    ] = None,
    train: Annotated[bool | None, typer.Option("--train/--eval", help="The mode; else that of the module.")] = None,
    launches: Annotated[bool, typer.Option("--launches", help="Compile with Inductor and count its launches.")] = False,
    short: Annotated[bool, typer.Option("--short", help="The first ten lines alone.")] = False,
    check: Annotated[
        Path | None, typer.Option("--check", help="A budget, a JSON file: more than that ends with exit code 1.")
    ] = None,
    out: Annotated[
        list[Path] | None, typer.Option("--out", help="Write the report as .json or .html. May be given several times.")
    ] = None,
) -> None:
    """Say what to change in a model: graph breaks, fusions, memory, kernels, each with the line of your code.

    The model is left as it is, nothing is downloaded, and no pickle is read. Exit code: 0; 1 where --check finds more
    than its budget allows; 2 for what cannot be imported, made, run or written.
    """
    where = parse_device(device)
    for file in out or []:
        if file.suffix not in (".json", ".html"):
            raise UserError(f"--out {file}: it must end in .json or .html")
        check_writable(file.parent if file.suffix == ".html" else file)
    try:
        budget = None if check is None else read_budget(check)
        with _silent():
            made = moved(made_of(target), where)
        if train is not None:
            made.module.train(train)
        with Steps("doctor") as steps, _silent():
            report = CompilerOptimizationAssistant().analyze_component(
                made.module, *made.inputs, kwargs=made.kwargs, gpu=gpu, count_launches=launches, on_stage=steps
            )
    except (ValueError, TypeError, RuntimeError) as error:  # as NotImplementedError, of `meta`
        raise UserError(str(error)) from error
    except KeyboardInterrupt:
        messages.print("stopped; the model is as it was", **PLAIN)
        raise typer.Exit(130) from None
    show(report, short)
    for file in out or []:
        report.save(file)
    if any(f.kind == "error" for f in report["compilation_readiness"]):
        raise typer.Exit(2)
    problems = [] if budget is None else over_budget(report, budget)
    if problems:
        messages.print("over budget:", *map(escape, problems), sep="\n  ", **PLAIN)
        raise typer.Exit(1)


def show(report: Report, short: bool) -> None:
    """Print it: plain lines, of at most 80 columns."""
    for line in summary(report) if short else [*summary(report), "", *details(report)]:
        sys.stdout.write(f"{line}\n")


def made_of(target: str) -> Made:
    """What a factory makes; the factory is named by a module or by a file.

    Raises:
        UserError: the file cannot be imported, or as `kernel_pytorch.harness.profiling.factory.make` says.
    """
    file, colon, attribute = target.rpartition(":")
    if not (colon and file.endswith(".py")):
        return make(target)
    path = Path(file).resolve()
    name = f"doctor_target_{path.stem}".replace("-", "_")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise UserError(f"there is no file {file}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever the file does when it is imported
        raise UserError(f"{file} cannot be imported: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(path.parent))
    try:
        return make(f"{name}:{attribute}")
    except UserError as error:
        raise UserError(str(error).replace(name, file)) from error


def _silent() -> contextlib.redirect_stdout[io.StringIO]:
    """What the model prints is no part of the report."""
    return contextlib.redirect_stdout(io.StringIO())
