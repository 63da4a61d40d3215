"""`kernel-pytorch models`: whole models, stock, compiled and with the techniques that are installed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from kernel_pytorch.harness.availability import parse_device
from kernel_pytorch.harness.commands.common import (
    DeviceOption,
    Steps,
    check_writable,
    messages,
    output,
    tell,
    warn_broken,
    warn_if_busy,
)
from kernel_pytorch.harness.discovery import discover
from kernel_pytorch.harness.errors import UserError, named
from kernel_pytorch.harness.models.host import host_table
from kernel_pytorch.harness.models.losses import STEPS, compare_losses
from kernel_pytorch.harness.models.page import headline, tables
from kernel_pytorch.harness.models.record import FILE, LossRun, Record, Run, load, run_name
from kernel_pytorch.harness.models.run import failures, measure, origin
from kernel_pytorch.harness.models.variants import LIGER, STOCK, VARIANTS, Variant
from kernel_pytorch.harness.models.works import WORKS, Work, find_work
from kernel_pytorch.harness.models.zoo import MODELS, SMALL, SUFFIX, Model, find_model, import_transformers
from kernel_pytorch.harness.readme import write_block
from kernel_pytorch.harness.technique import Technique

BLOCK = "models"
KNOWN = {each.name: each for each in (*VARIANTS, LIGER)}
WITH = {
    "--readme": ("--json",),
    "--losses": ("MODEL", "--only", "--small", "--resume", "--json", "--tiny"),
    "--host": ("--only",),
}
"""Options that each special run takes."""
EVERYWHERE = ("--device", "--rounds")


def models_command(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            help=f"One of {', '.join(m.name for m in MODELS)}, or with {SUFFIX} behind it; all of a size if omitted."
        ),
    ] = None,
    work: Annotated[
        list[str] | None,
        typer.Option(
            help=f"This one: {', '.join(w.name for w in WORKS)}. May be repeated; {WORKS[0].name} if omitted."
        ),
    ] = None,
    variant: Annotated[
        list[str] | None, typer.Option(help=f"Only this one beside stock: {', '.join(KNOWN)}. May be repeated.")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="Patch in this technique alone. May be repeated.")] = None,
    device: DeviceOption = None,
    tiny: Annotated[
        bool | None,
        typer.Option("--tiny/--real", help="Models for tests; the default on a CPU, where real ones take hours."),
    ] = None,
    small: Annotated[
        bool, typer.Option("--small", help=f"Models whose times on a CPU mean something: those with {SUFFIX}.")
    ] = False,
    rounds: Annotated[int, typer.Option(min=8, help="Samples of each variant.")] = 15,
    resume: Annotated[
        bool, typer.Option("--resume", help="Leave out what --json holds of the present code and this device.")
    ] = False,
    losses: Annotated[
        bool,
        typer.Option("--losses", help=f"Time nothing; compare the losses of {STEPS} training steps, stock and ours."),
    ] = False,
    host: Annotated[
        bool, typer.Option("--host", help="Time no model; print what calls of functions cost the host.")
    ] = False,
    readme: Annotated[
        Path | None, typer.Option(help="Measure nothing; write the headline table of --json into this README.")
    ] = None,
    json: Annotated[
        Path | None,
        typer.Option(help=f"Keep what was measured in this file, such as {FILE}, in the place of that of the work."),
    ] = None,
) -> None:
    """Time whole models at whole works: training, prefill, decoding; all variants of a model in turns.

    Stock models of Hugging Face's transformers at published widths with few layers and random weights are timed beside
    torch.compile, Liger-Kernel where it is installed, and the techniques that are installed, patched in. Ratios are of
    the same process and the same rounds. Each work of a model is kept when it is done.

    --losses, a separate run, trains each model for some steps, stock and ours from the same weights: in float32 the
    losses are the same to 1e-4, in 16 bits those of ours may be no farther from stock in float32 than stock's are,
    apart from chance.

    --host prints microseconds of single calls, beside PyTorch's own, of the functions of which a kernel is the default.

    Exit code: 0; 1 if a variant of ours did not run or gives another result; 2 for a name that does not exist.
    """
    _check_options(context)
    if readme is not None:
        return _write_readme(readme, json)
    where = parse_device(device)
    techniques = _techniques(only)
    if host:
        output.print(host_table(techniques, where))
        return None
    chosen = _models(model, small, tiny, where)
    works = [find_work(name) for name in work or [WORKS[0].name]]
    asked = [*KNOWN.values()] if variant is None else [STOCK, *(named("variant", name, KNOWN) for name in variant)]
    variants = [each for each in KNOWN.values() if each in asked]
    check_writable(json)
    warn_if_busy()
    import_transformers()
    done = set()
    if resume:
        done = _loaded(json).done(origin(techniques, where, tiny=chosen[0].is_tiny), [v.name for v in variants])
    if losses:
        failed = [_compare_losses(m, techniques, where, json) for m in chosen if m.name not in done]
    else:
        pending = [(m, w) for m in chosen for w in works if w.applies(m) and run_name(m.name, w.name) not in done]
        failed = [_measure(m, w, variants, techniques, where, json, rounds) for m, w in pending]
    raise typer.Exit(int(any(failed)))


def _write_readme(readme: Path, json: Path | None) -> None:
    if json is None:
        raise UserError("--readme: give --json FILE too, whose table is written")
    write_block(readme, BLOCK, headline(load(json)))


def _models(name: str | None, small: bool, tiny: bool | None, device: torch.device) -> tuple[Model, ...]:
    """The models that were asked for, in their sizes."""
    chosen: tuple[Model, ...] = SMALL if small else MODELS
    if name is not None:
        chosen = (find_model(f"{name.removesuffix(SUFFIX)}{SUFFIX}" if small else name),)
    if tiny is None:
        tiny = device.type == "cpu" and not (small or chosen[0] in SMALL)
    return tuple(each.as_tiny() for each in chosen) if tiny else chosen


def _check_options(context: typer.Context) -> None:
    """End where options were given that the run would not obey."""
    given = [
        each.opts[0] if each.param_type_name == "option" else each.opts[0].upper()
        for each in context.command.params
        if getattr(context.get_parameter_source(each.name or ""), "name", "") == "COMMANDLINE"
    ]
    asked = [name for name in WITH if name in given]
    if len(asked) > 1:
        raise UserError(f"{' and '.join(asked)}: each is a run of its own; give one of them")
    for name in asked:
        if others := [each for each in given if each not in (name, *WITH[name], *EVERYWHERE)]:
            raise UserError(f"{name}: it does not take {' and '.join(others)}; allowed are {', '.join(WITH[name])}")
    if {"--small", "--tiny"} <= set(given):
        raise UserError("--small: given --tiny too; they are two sizes of the same models")


def _techniques(only: list[str] | None) -> list[Technique]:
    """The installed techniques that replace something in models, or those of them that are named."""
    discovery = discover()
    warn_broken(discovery)
    able = {t.name: t for t in discovery.techniques.values() if t.replacements}
    if only is not None:
        chosen = [named("--only", name, able) for name in only]
        return [technique for technique in able.values() if technique in chosen]
    if discovery.broken:  # what is measured without one of them is not ours
        raise UserError("mend or uninstall what is broken, or name what is measured with --only")
    return list(able.values())


def _measure(
    spec: Model, work: Work, variants: list[Variant], techniques: list[Technique], device: torch.device,
    json: Path | None, rounds: int,
) -> bool:  # fmt: skip
    """Measure, print and keep a work of a model; whether stock or a variant of ours failed."""
    with Steps(spec.name) as steps:
        if json is not None:
            steps("the present kernels, which the record names; the first time on a machine takes minutes")
            measured_from = origin(techniques, device, tiny=spec.is_tiny)
        rows = measure(spec, work, variants, techniques, device, rounds=rounds, on_step=steps)
    for table in tables(rows, spec.is_tiny):
        output.print(table)
    ours = [STOCK.name, *(each.name for each in VARIANTS if each.ours or each.decoder)]
    wrong = failures([row for row in rows if row.variant in ours])
    tell(*wrong, to=messages)
    if json is not None:
        run = Run(**dict(measured_from), rows=rows)
        _keep(json, Record(runs={run_name(spec.name, work.name): run}))
    return bool(wrong)


def _compare_losses(spec: Model, techniques: list[Technique], device: torch.device, json: Path | None) -> bool:
    """Train a model a little, and keep its losses; whether they are not the same."""
    with Steps(spec.name) as steps:
        curves = compare_losses(spec, techniques, device, on_step=steps)
    found = LossRun(**dict(origin(techniques, device, tiny=spec.is_tiny)), **dict(curves))
    same, (ours, theirs) = found.held <= found.allowed, found.errors or (0.0, 0.0)
    exact = f", and {ours:.1e} from float32, where stock's are {theirs:.1e} away" if found.errors else ""
    tell(
        f"{spec.title}{', tiny' if spec.is_tiny else ''}, {found.dtype}: losses of {STEPS} steps"
        f" {'are the same' if same else 'DIFFER'}, at most {found.difference:.1e} of the loss away from"
        f" stock's{exact}; allowed is {found.allowed:.1e}"
    )
    if json is not None:
        _keep(json, Record(runs={}, losses={spec.name: found}))
    return not same


def _keep(file: Path, new: Record) -> None:
    """Put new runs or losses into a file beside what it holds."""
    before = _loaded(file)
    Record(runs=before.runs | new.runs, losses=before.losses | new.losses).save(file)
    tell(f"written: {file}")


def _loaded(file: Path | None) -> Record:
    """The record in the file; an empty one if there is none."""
    return load(file) if file is not None and file.is_file() else Record(runs={})
