"""`kernel-pytorch report`: tables and plots from results that were measured before, anywhere."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from kernel_pytorch.harness.commands.common import messages, output, tell
from kernel_pytorch.harness.defaults import defaults_table, groups
from kernel_pytorch.harness.discovery import discover
from kernel_pytorch.harness.environment import Environment
from kernel_pytorch.harness.errors import UserError
from kernel_pytorch.harness.models.record import FILE as MODELS_FILE
from kernel_pytorch.harness.models.record import Record as Models
from kernel_pytorch.harness.models.record import load as load_models
from kernel_pytorch.harness.page import headline
from kernel_pytorch.harness.plots import plot
from kernel_pytorch.harness.provenance import identify
from kernel_pytorch.harness.readme import write_block
from kernel_pytorch.harness.records import Identity
from kernel_pytorch.harness.report import cost_table, notes, terminal_tables
from kernel_pytorch.harness.results import VERIFICATION_SUFFIX, Results, load
from kernel_pytorch.harness.staleness import listing, remedies, stale, stale_models
from kernel_pytorch.harness.static.record import SUFFIX as KERNELS_SUFFIX
from kernel_pytorch.harness.support.record import FOLDER as SUPPORT_FOLDER
from kernel_pytorch.harness.technique import Technique

OTHER_FILES = ("pytest-benchmark.json", MODELS_FILE, ".partial.json", VERIFICATION_SUFFIX, KERNELS_SUFFIX)
OTHER_FOLDERS = (SUPPORT_FOLDER, "examples")
BLOCK = "results"


def report_command(
    path: Annotated[Path, typer.Argument(help="A results file, or a folder that holds some.")] = Path("results"),
    check_stale: Annotated[
        bool,
        typer.Option(
            "--check-stale",
            help="Only name results whose code has changed since, and what to do; exit 1 if a default rests on code"
            " that was not measured.",
        ),
    ] = False,
    check_defaults: Annotated[
        bool,
        typer.Option(
            "--check-defaults",
            help="Only compare default levels with the others that were measured; exit 1 if a default is slower than"
            " it may be.",
        ),
    ] = False,
    carried: Annotated[bool, typer.Option("--carry", hidden=True)] = False,
    readme: Annotated[
        Path | None,
        typer.Option("--readme", help="Only write the headline table into a package's README, or all in a folder."),
    ] = None,
) -> None:
    """Print the tables of results and draw their plots beside them (PNG and SVG).

    Exit code: 0; 1 with --check-stale if the code of a default is not what was measured, and with --check-defaults if a
    default is slower than another level; 2 for what cannot be read.
    """
    if carried:
        raise UserError("report --carry does nothing any more: --check-stale compares what code compiles to")
    if not path.exists():
        wanted = "give a results file or a folder that holds some; `kernel-pytorch bench --json FILE` makes one"
        raise UserError(f"{path}: no such file or folder; {wanted}")
    of_models = sorted(path.rglob(MODELS_FILE)) if path.is_dir() else [path] if path.name == MODELS_FILE else []
    files = results_files(path)
    if not (files or (of_models and check_stale)):
        raise UserError(f"no results in {path}; `kernel-pytorch bench` makes them")
    found = {file: load(file) for file in files}
    if check_stale:
        raise typer.Exit(_name_stale(found, {file: load_models(file) for file in of_models}))
    if check_defaults:
        raise typer.Exit(_name_slow_defaults(found))
    if readme is not None:
        write_readmes(readme, found.values())
        return
    for file, results in found.items():
        show(results, heading=True)
        show_rest(results)
        draw(results, file)


def results_files(path: Path) -> list[Path]:
    """A file itself; the results files in a folder and those below it, without the records of other commands."""
    files = sorted(path.rglob("*.json")) if path.is_dir() else [path]
    return [file for file in files if not file.name.endswith(OTHER_FILES) and file.parent.name not in OTHER_FOLDERS]


def _name_stale(found: dict[Path, Results], models: dict[Path, Models]) -> bool:
    """Print what is not known to be of the present code, and what to do; whether a default rests on it."""
    identities: dict[tuple[str, str, str | None], dict[str, Identity]] = {}

    def once(technique: Technique, environment: Environment) -> dict[str, Identity]:
        key = technique.name, environment.device_type, environment.compute_capability
        if key not in identities:
            identities[key] = identify(technique, environment)
        return identities[key]

    every = {file: stale(results, technique, file, once) for file, results, technique in _installed(found)}
    every |= {file: stale_models(record, discover().techniques.values(), once) for file, record in models.items()}
    to_do = remedies(every)
    current = [f"{len(every)} results file{'s' * (len(every) != 1)}, all of the present code"]
    tell(*([*listing(every), *to_do] or current))
    return bool(to_do)


def _name_slow_defaults(found: dict[Path, Results]) -> bool:
    """Print what every default costs beside the other levels; whether one is slower than it may be."""
    slow = []
    for file, results, technique in _installed(found):
        of_levels = groups(results, technique) if hasattr(technique.ladder(), "default_of") else []
        if of_levels:
            title = f"{technique.name} on {results.machine.environment.device_name}"
            output.print(defaults_table(of_levels, title))
        slow += [f"{file}: {miss}" for group in of_levels for miss in group.misses(technique.slow_defaults)]
    tell(*(slow or ["every default is the fastest level, as far as was measured"]))
    return bool(slow)


def _installed(found: dict[Path, Results]) -> list[tuple[Path, Results, Technique]]:
    """The results whose techniques are installed, with these; the others are named."""
    here = discover().techniques
    missing = dict.fromkeys(results.technique for results in found.values() if results.technique not in here)
    tell(*(f"not checked: technique {name} is not installed here" for name in missing), to=messages)
    return [(file, r, here[r.technique]) for file, r in found.items() if r.technique in here]


def write_readmes(place: Path, found: Iterable[Results]) -> None:
    """Write the headline table into a README, or into that of every package of a folder that has results."""
    devices: dict[str, list[Results]] = {}
    for results in found:
        devices.setdefault(results.technique, []).append(results)
    for readme in [place / name / "README.md" for name in devices] if place.is_dir() else [place]:
        name = readme.resolve().parent.name
        if name not in devices:
            raise UserError(f"{readme} was not written: no results of {name}")
        write_block(readme, BLOCK, headline(devices[name]))


def show(results: Results, *, heading: bool) -> None:
    """Print the times, after what was measured, where and when."""
    e = results.machine.environment
    if heading:
        output.rule(f"{results.technique} on {e.device_name}, torch {e.torch}, {results.created[:10]}")
    output.print(*terminal_tables(results), sep="\n")


def show_rest(results: Results) -> None:
    """Print what follows the tables of times: costs and why figures are missing."""
    if results.costs:
        output.print(cost_table(results))
    tell(*notes(results))


def draw(results: Results, file: Path) -> list[Path]:
    """Draw the plots beside the file of the results, or say what is missing."""
    try:
        return plot(results, file)
    except ModuleNotFoundError as error:
        tell(f"no plot: {error} (pip install matplotlib)")
        return []
