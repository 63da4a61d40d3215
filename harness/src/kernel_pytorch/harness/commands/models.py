"""`kernel-pytorch models`: whole models, stock, compiled and with the techniques that are installed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.markup import escape

from kernel_pytorch.harness.availability import parse_device
from kernel_pytorch.harness.commands.common import (
    PLAIN,
    DeviceOption,
    Steps,
    check_writable,
    messages,
    output,
    warn_broken,
    warn_if_busy,
)
from kernel_pytorch.harness.discovery import discover
from kernel_pytorch.harness.errors import UserError, named
from kernel_pytorch.harness.models.losses import STEPS, compare_losses
from kernel_pytorch.harness.models.page import headline, tables
from kernel_pytorch.harness.models.record import FILE, LossRun, Record, Run, load, run_name
from kernel_pytorch.harness.models.run import failures, host_costs, host_table, measure, origin
from kernel_pytorch.harness.models.variants import LIGER, STOCK, VARIANTS, Variant
from kernel_pytorch.harness.models.works import WORKS, Work, find_work
from kernel_pytorch.harness.models.zoo import (
    MODELS,
    SMALL,
    SUFFIX,
    Model,
    find_model,
    import_transformers,
)
from kernel_pytorch.harness.readme import write_block
from kernel_pytorch.harness.technique import Technique

ROUNDS = 15
BLOCK = "models"

ModelArgument = Annotated[
    str | None,
    typer.Argument(
        help=f"One of {', '.join(m.name for m in MODELS)}, or with {SUFFIX} behind it; all of a size if omitted."
    ),
]
WorkOption = Annotated[
    list[str] | None,
    typer.Option(
        "--work",
        help=f"This one: {', '.join(w.name for w in WORKS)}. May be given several times; {WORKS[0].name} if omitted.",
    ),
]
VariantOption = Annotated[
    list[str] | None,
    typer.Option(
        "--variant",
        help=f"Only this one beside stock: {', '.join(v.name for v in (*VARIANTS[1:], LIGER))}. May be repeated.",
    ),
]
OnlyOption = Annotated[
    list[str] | None, typer.Option("--only", help="Patch in this technique alone. May be given several times.")
]
TinyOption = Annotated[
    bool | None,
    typer.Option("--tiny/--real", help="Models for tests; the default on a CPU, where real ones take hours."),
]
SmallOption = Annotated[
    bool, typer.Option("--small", help=f"Models whose times on a CPU mean something: those with {SUFFIX}.")
]
RoundsOption = Annotated[int, typer.Option("--rounds", min=8, help="Samples of each variant.")]
ResumeOption = Annotated[
    bool, typer.Option("--resume", help="Leave out what --json holds of the present code and this device.")
]
LossesOption = Annotated[
    bool,
    typer.Option("--losses", help=f"Time nothing; compare the losses of {STEPS} steps of training, stock and ours."),
]
HostOption = Annotated[bool, typer.Option("--host", help="Time no model; print what calls of functions cost the host.")]
ReadmeOption = Annotated[
    Path | None,
    typer.Option("--readme", help="Measure nothing; write the headline table of --json into this README."),
]
JsonOption = Annotated[
    Path | None,
    typer.Option(
        "--json",
        help=f"Keep what was measured in this file, such as {FILE}, in the place of what it holds of that work.",
    ),
]


def models_command(
    model: ModelArgument = None,
    work: WorkOption = None,
    variant: VariantOption = None,
    only: OnlyOption = None,
    device: DeviceOption = None,
    tiny: TinyOption = None,
    small: SmallOption = False,
    rounds: RoundsOption = ROUNDS,
    resume: ResumeOption = False,
    losses: LossesOption = False,
    host: HostOption = False,
    readme: ReadmeOption = None,
    json: JsonOption = None,
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
    _check_options(
        {"--readme": readme is not None, "--losses": losses, "--host": host},
        {"MODEL": model, "--work": work, "--variant": variant, "--only": only, "--small": small, "--resume": resume,
         "--json": json, "--tiny or --real": tiny},
    )  # fmt: skip
    if readme is not None:
        if json is None:
            raise UserError("--readme: give --json FILE too, whose table is written")
        write_block(readme, BLOCK, headline(load(json)))
        return
    where = parse_device(device)
    techniques = _techniques(only)
    if host:
        output.print(host_table(host_costs(techniques, where), where))
        return
    chosen: tuple[Model, ...] = SMALL if small else MODELS
    if model is not None:
        chosen = (find_model(f"{model.removesuffix(SUFFIX)}{SUFFIX}" if small else model),)
    works = WORKS[:1] if work is None else tuple(find_work(name) for name in work)
    variants = _variants(variant)
    check_writable(json)
    warn_if_busy()
    if tiny is None:
        tiny = where.type == "cpu" and not (small or chosen[0] in SMALL)
    if tiny:
        chosen = tuple(each.as_tiny() for each in chosen)
    if losses:
        if _compare_losses(chosen, techniques, where, json, resume=resume):
            raise typer.Exit(1)
        return
    names = [each.name for each in variants]
    done = _loaded(json).done(origin(techniques, where, tiny=chosen[0].is_tiny), names) if resume else set()
    pending = [(m, w) for m in chosen for w in works if w.applies(m) and run_name(m.name, w.name) not in done]
    if _measure_all(pending, variants, techniques, where, json, rounds=rounds):
        raise typer.Exit(1)


WITH = {
    "--readme": ("--json",),
    "--losses": ("MODEL", "--only", "--small", "--resume", "--json", "--tiny or --real"),
    "--host": ("--only",),
}
"""Options that each special run takes."""


def _check_options(runs: dict[str, bool], options: dict[str, object]) -> None:
    """End where options were given that the run would not obey."""
    asked = [name for name, given in runs.items() if given]
    given = [name for name, value in options.items() if value not in (None, False)]
    if len(asked) > 1:
        raise UserError(f"{' and '.join(asked)}: each is a run of its own; give one of them")
    if asked and (others := [name for name in given if name not in WITH[asked[0]]]):
        raise UserError(f"{asked[0]}: it does not take {' and '.join(others)}; allowed are {', '.join(WITH[asked[0]])}")
    if options["--small"] and options["--tiny or --real"]:
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


def _compare_losses(
    chosen: tuple[Model, ...], techniques: list[Technique], device: torch.device, json: Path | None, *,
    resume: bool,
) -> bool:  # fmt: skip
    """Train each model a little, and keep its losses; whether those of any are not the same."""
    import_transformers()
    now, failed = origin(techniques, device, tiny=chosen[0].is_tiny), False
    known = _loaded(json).losses if resume else {}
    for spec in chosen:
        if spec.name in known and known[spec.name].matches(now):
            continue
        with Steps(spec.name) as steps:
            curves = compare_losses(spec, techniques, device, on_step=steps)
        found = LossRun(**dict(now), **dict(curves))
        same, (ours, theirs) = found.held <= found.allowed, found.errors or (0.0, 0.0)
        exact = f", and {ours:.1e} from float32, where stock's are {theirs:.1e} away" if found.errors else ""
        failed |= not same
        output.print(
            f"{spec.title}{', tiny' if spec.is_tiny else ''}, {found.dtype}: losses of {STEPS} steps"
            f" {'are the same' if same else 'DIFFER'}, at most {found.difference:.1e} of the loss away from"
            f" stock's{exact}; allowed is {found.allowed:.1e}", **PLAIN,
        )  # fmt: skip
        if json is not None:
            _keep(json, losses={spec.name: found})
    return failed


def _variants(names: list[str] | None) -> tuple[Variant, ...]:
    known = {each.name: each for each in (*VARIANTS, LIGER)}
    chosen = [*known.values()] if names is None else [named("variant", name, known) for name in names]
    return (STOCK, *(each for each in known.values() if each in chosen and each is not STOCK))


def _measure_all(
    pending: list[tuple[Model, Work]], variants: tuple[Variant, ...], techniques: list[Technique],
    device: torch.device, json: Path | None, *, rounds: int,
) -> bool:  # fmt: skip
    """Measure, print and keep each work of a model; whether stock or a variant of ours failed."""
    failed, mine = False, [STOCK, *(each for each in VARIANTS if each.ours or each.decoder)]
    for spec, work in pending:
        with Steps(spec.name) as steps:
            rows = measure(spec, work, variants, techniques, device, rounds=rounds, on_step=steps)
        for table in tables(rows):
            output.print(table)
        for line in (lines := failures(rows, mine)):
            messages.print(escape(line), **PLAIN)
        failed |= bool(lines)
        if json is not None:
            run = Run(**dict(origin(techniques, device, tiny=spec.is_tiny)), rows=rows)
            _keep(json, runs={run_name(spec.name, work.name): run})
    return failed


def _keep(file: Path, **new: dict[str, Run] | dict[str, LossRun]) -> None:
    """Put new runs or losses into a file beside what it holds."""
    before = _loaded(file)
    kept = {field: getattr(before, field) | new.get(field, {}) for field in ("runs", "losses")}
    Record(**kept).save(file)
    output.print(escape(f"written: {file}"), **PLAIN)


def _loaded(file: Path | None) -> Record:
    """The record in the file; an empty one if there is none."""
    return load(file) if file is not None and file.is_file() else Record(runs={})
