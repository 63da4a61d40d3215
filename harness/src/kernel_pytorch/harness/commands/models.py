"""`kernel-pytorch models`: whole models, stock, compiled and with the techniques that are installed."""

from __future__ import annotations

import datetime
import importlib
import importlib.metadata
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, NoReturn

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
from kernel_pytorch.harness.environment import describe_environment
from kernel_pytorch.harness.models.host import host_costs, host_table
from kernel_pytorch.harness.models.losses import STEPS, compare_losses
from kernel_pytorch.harness.models.page import headline
from kernel_pytorch.harness.models.record import FILE, LossRun, Origin, Record, Row, Run, load, run_name
from kernel_pytorch.harness.models.run import measure
from kernel_pytorch.harness.models.tables import tables
from kernel_pytorch.harness.models.variants import LIGER, STOCK, VARIANTS, Variant
from kernel_pytorch.harness.models.works import WORKS, Work, find_work
from kernel_pytorch.harness.models.zoo import (
    MODELS,
    SMALL,
    SUFFIX,
    Model,
    TransformersMissingError,
    find_model,
    import_transformers,
)
from kernel_pytorch.harness.provenance import fingerprint, identify
from kernel_pytorch.harness.readme import ReadmeError, write_block
from kernel_pytorch.harness.records import RecordError
from kernel_pytorch.harness.technique import Technique

ROUNDS = 15
BLOCK = "models"
TOLERANCE = 0.05
"""Of the first loss or of logits in 16 bits, after all layers."""
OF_GRADIENTS = 0.1
"""Of the norms of gradients: with dropout, which draws other elements, they move by a few percent; a missing piece of
a layer moves them by far more."""


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

    Stock models of Hugging Face's transformers at published widths with few layers and random weights stand beside
    torch.compile, Liger-Kernel where it is installed, and the techniques that are installed, patched in. Ratios are of
    the same process and the same rounds. Each work of a model is kept when it is done.

    --losses, a run of its own, trains each model for some steps, stock and ours from the same weights: in float32 the
    losses are the same to 1e-4, in 16 bits they may differ as far as other rounding errors move those of stock.
    The distances of both from stock in float32 are printed too; they decide nothing.

    --host prints microseconds of single calls, beside PyTorch's own, of the functions of which a kernel is the default.

    Exit code: 0; 1 if a variant of ours did not run or gives another result; 2 for a name that does not exist.
    """
    _check_options(
        {"--readme": readme is not None, "--losses": losses, "--host": host},
        {"MODEL": model, "--work": work, "--variant": variant, "--only": only, "--small": small, "--resume": resume,
         "--json": json, "--tiny or --real": tiny},
    )  # fmt: skip
    if readme is not None:
        _write_readme(readme, json)
        return
    where = parse_device(device)
    techniques = _techniques(only)
    if host:
        output.print(host_table(host_costs(techniques, where), where))
        return
    try:
        chosen = _models(model, small=small)
        works = WORKS[:1] if work is None else tuple(find_work(name) for name in work)
        variants = _variants(variant)
    except KeyError as error:
        _stop(str(error.args[0]))
    check_writable(json)
    warn_if_busy()
    if tiny is None:
        tiny = where.type == "cpu" and not (small or chosen[0] in SMALL)
    if losses:
        if _compare_losses(chosen, techniques, where, json, tiny=tiny, resume=resume):
            raise typer.Exit(1)
        return
    done = _done(json, variants, techniques, where, tiny=tiny) if resume else set()
    pending = [(m, w) for m in chosen for w in works if w.applies(m) and run_name(m.name, w.name) not in done]
    if _measure_all(pending, variants, techniques, where, json, tiny=tiny, rounds=rounds):
        raise typer.Exit(1)


WITH = {
    "--readme": ("--json",),
    "--losses": ("MODEL", "--only", "--small", "--resume", "--json", "--tiny or --real"),
    "--host": ("--only",),
}
"""What goes with each run that is not the usual one."""


def _check_options(runs: dict[str, bool], options: dict[str, object]) -> None:
    """End where options were given that the run would not obey."""
    asked = [name for name, given in runs.items() if given]
    given = [name for name, value in options.items() if value not in (None, False)]
    if len(asked) > 1:
        _stop(f"{' and '.join(asked)}: each is a run of its own; give one of them")
    if asked and (others := [name for name in given if name not in WITH[asked[0]]]):
        _stop(f"{asked[0]}: it does not take {' and '.join(others)}; allowed are {', '.join(WITH[asked[0]])}")
    if options["--small"] and options["--tiny or --real"]:
        _stop("--small: given --tiny too; they are two sizes of the same models")


def _techniques(only: list[str] | None) -> list[Technique]:
    """The installed techniques that replace something in models, or those of them that are named."""
    discovery = discover()
    warn_broken(discovery)
    able = {t.name: t for t in discovery.techniques.values() if t.replacements}
    if unknown := [name for name in only or () if name not in able]:
        _stop(f"--only: given {unknown[0]!r}; allowed are {', '.join(able)}")
    if discovery.broken and only is None:  # what is measured without one of them is not ours
        _stop("mend or uninstall what is broken, or name what is measured with --only")
    return [t for name, t in able.items() if only is None or name in only]


def _models(name: str | None, *, small: bool) -> tuple[Model, ...]:
    """All models of a size, or the one of that name. Raises KeyError if there is none."""
    if name is None:
        return SMALL if small else MODELS
    return (find_model(f"{name.removesuffix(SUFFIX)}{SUFFIX}" if small else name),)


def _compare_losses(
    chosen: tuple[Model, ...], techniques: list[Technique], device: torch.device, json: Path | None, *,
    tiny: bool, resume: bool,
) -> bool:  # fmt: skip
    """Train each model a little, and keep its losses; whether those of any are not the same."""
    try:
        import_transformers()
    except TransformersMissingError as error:
        _stop(str(error))
    now, failed = _origin(techniques, device, tiny=tiny), False
    known = _loaded(json).losses if resume and json is not None and json.is_file() else {}
    for spec in chosen:
        if spec.name in known and _same_code(known[spec.name], now):
            continue
        with Steps(spec.name) as steps:
            curves = compare_losses(spec, techniques, device, tiny=tiny, on_step=steps)
        kept = [name for name in LossRun.model_fields if name not in Origin.model_fields]
        found = LossRun(**dict(now), **{name: getattr(curves, name) for name in kept})
        same = found.difference <= found.allowed
        failed |= not same
        output.print(
            f"{spec.title}{', tiny' if tiny else ''}, {found.dtype}: losses of {STEPS} steps"
            f" {'are the same' if same else 'DIFFER'}, at most {found.difference:.1e} of the loss away from"
            f" stock's; allowed is {found.allowed:.1e}{_errors(found)}", **PLAIN,
        )  # fmt: skip
        if json is not None:
            _keep(json, losses={spec.name: found})
    return failed


def _errors(found: LossRun) -> str:
    if found.errors is None:
        return ""
    ours, stock = found.errors
    return f"; the distance from float32 is {ours:.1e} for ours and {stock:.1e} for stock"


def _write_readme(readme: Path, json: Path | None) -> None:
    if json is None:
        _stop("--readme: give --json FILE too, whose table is written")
    try:
        write_block(readme, BLOCK, headline(load(json)))
    except (RecordError, ReadmeError) as error:
        _stop(str(error))


def _variants(names: list[str] | None) -> tuple[Variant, ...]:
    if names is None:
        return (*VARIANTS, LIGER)
    known = {each.name: each for each in (*VARIANTS, LIGER)}
    for name in names:
        if name not in known:
            raise KeyError(f"variant: given {name!r}; allowed are {', '.join(known)}")
    return (STOCK, *(each for name, each in known.items() if name in names and each is not STOCK))


def _measure_all(
    pending: list[tuple[Model, Work]], variants: tuple[Variant, ...], techniques: list[Technique],
    device: torch.device, json: Path | None, *, tiny: bool, rounds: int,
) -> bool:  # fmt: skip
    """Measure, print and keep each work of a model; whether a variant of ours failed."""
    failed = False
    for spec, work in pending:
        try:
            rows = _measure(spec, work, variants, techniques, device, tiny=tiny, rounds=rounds)
        except TransformersMissingError as error:
            _stop(str(error))
        for table in tables(rows):
            output.print(table)
        failed |= _report_failures(rows)
        if json is not None:
            run = Run(**dict(_origin(techniques, device, tiny=tiny)), rows=tuple(rows))
            _keep(json, runs={run_name(spec.name, work.name): run})
    return failed


def _measure(
    spec: Model, work: Work, variants: tuple[Variant, ...], techniques: list[Technique], device: torch.device, *,
    tiny: bool, rounds: int,
) -> list[Row]:  # fmt: skip
    here = tuple(each for each in variants if each is not LIGER)
    with Steps(spec.name) as steps:
        found = list(measure(spec, work, here, techniques, device, tiny=tiny, rounds=rounds, on_step=steps))
        if LIGER in variants:
            found.append(_liger(spec, work, device, tiny=tiny, rounds=rounds, steps=steps))
    return found


def _liger(spec: Model, work: Work, device: torch.device, *, tiny: bool, rounds: int, steps: Steps) -> Row:
    """Liger-Kernel beside stock in a process of its own."""
    reason = LIGER.why_not(spec, work, device)
    if reason is not None:
        return Row(model=spec.name, work=work.name, variant=LIGER.name, reason=reason)
    steps(f"{spec.name}, {work.name}: {LIGER.name}")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        task = pool.submit(measure, spec, work, (STOCK, LIGER), (), device, tiny=tiny, rounds=rounds)
        return next(row for row in task.result() if row.variant == LIGER.name)


def _report_failures(rows: list[Row]) -> bool:
    """Name what of ours did not run although it should have, or is wrong; whether there was any."""
    mine = {STOCK.name, *(each.name for each in VARIANTS if each.ours)}
    failures = []
    for row in rows:
        name = f"{row.model}, {row.work}, {row.variant}"
        if row.variant in mine and row.failed:
            failures.append(f"{name}: {row.reason}")
        elif row.variant in mine and row.cost is not None:
            for what, found, allowed in (
                ("result is", row.cost.difference, TOLERANCE),
                ("gradients are", row.cost.gradients or 0.0, OF_GRADIENTS),
            ):
                if not found <= allowed:
                    failures.append(f"{name}: its {what} {found:.1%} from stock's; allowed is {allowed:.0%}")
    for failure in failures:
        messages.print(escape(failure), **PLAIN)
    return bool(failures)


def _origin(techniques: list[Technique], device: torch.device, *, tiny: bool) -> Origin:
    environment = describe_environment(device)
    return Origin(
        date=datetime.date.today().isoformat(),
        environment=environment,
        tiny=tiny,
        transformers=importlib.metadata.version("transformers"),
        identities={technique.name: fingerprint(identify(technique, environment)) for technique in techniques},
    )


def _done(
    file: Path | None, variants: tuple[Variant, ...], techniques: list[Technique], device: torch.device, *, tiny: bool
) -> set[str]:
    """What a file holds of the present code, of this device and of all these variants, none of which failed."""
    if file is None or not file.is_file():
        return set()
    now = _origin(techniques, device, tiny=tiny)
    return {
        name
        for name, run in _loaded(file).runs.items()
        if _same_code(run, now)
        and {each.name for each in variants} <= {row.variant for row in run.rows if not row.failed}
    }


def _same_code(before: Origin, now: Origin) -> bool:
    """Whether a run was of the present code, of this device and this size of models."""
    return (before.identities, before.tiny, before.environment.slug) == (now.identities, now.tiny, now.environment.slug)


def _keep(file: Path, runs: dict[str, Run] | None = None, losses: dict[str, LossRun] | None = None) -> None:
    """Put what is new into a file beside what it holds."""
    before = _loaded(file) if file.is_file() else Record(runs={})
    Record(runs=before.runs | (runs or {}), losses=before.losses | (losses or {})).save(file)
    output.print(escape(f"written: {file}"), **PLAIN)


def _loaded(file: Path) -> Record:
    try:
        return load(file)
    except RecordError as error:
        _stop(str(error))


def _stop(message: str) -> NoReturn:
    messages.print(f"kernel-pytorch: {escape(message)}", **PLAIN)
    raise typer.Exit(2) from None
