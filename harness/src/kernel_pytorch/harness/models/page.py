"""Tables of models: for the site, shorter for the README, and for a terminal of 80 columns."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Iterable, Sequence

from kernel_pytorch.harness.models.record import Cost, Origin, Record, Row, run_name
from kernel_pytorch.harness.models.variants import LIGER, STOCK, VARIANTS
from kernel_pytorch.harness.models.works import WORKS, Work, find_work
from kernel_pytorch.harness.models.zoo import MODELS, SMALL, find_model
from kernel_pytorch.harness.report import markdown_table
from kernel_pytorch.harness.tables import PrintableTable, table

HEADLINE = ("compiled", "best", "liger", "ours", "ours-gpu-bound", "ours-compiled", "ours-best")
DECODING = ("graphs", "autotune", "plain", "liger", "ours", "decoder")
EVERY = (*MODELS, *SMALL)
TITLES = {variant.name: variant.title for variant in (*VARIANTS, LIGER)}
NOTHING = "-"
TINY = "tiny models for tests, with short prompts and few new tokens: their times say nothing of real ones"
KERNELS = 8
COSTS = ("host, ms", "device, ms", "launches", "peak, GiB", "first call, s", "difference", "of the limit")
_table = functools.partial(markdown_table, rule="---")


def headline(record: Record) -> str:
    """Tables of training steps, a row a model, and of decoding, a row a work of a model."""
    legend = "The median time of stock, and how many times as fast the others were in the same rounds."
    decoding = [work for work in WORKS if work.cached or work.new]
    tables: list[str] = []
    for title, works, variants in (("training step", WORKS[:1], HEADLINE), ("decoding", decoding, DECODING)):
        each = {work: _found(record, work) for work in works}
        found = {
            name if works == WORKS[:1] else f"{name}: {work.title}": each[work][name]
            for name in (model.title for model in EVERY) for work in works if name in each[work]
        }  # fmt: skip
        shown = [name for name in variants if any(_ratio(rows.get(name)) != NOTHING for rows in found.values())]
        if tables and not shown:
            continue
        names = {work.name for work in works}
        runs = [run for name, run in record.runs.items() if name.partition("/")[2] in names]
        heads = [title, "stock, ms", *(TITLES[name] for name in shown)]
        cells = [
            [name, _wall(rows.get(STOCK.name)), *(_ratio(rows.get(variant)) for variant in shown)]
            for name, rows in found.items()
        ]
        if variants is DECODING:
            heads.append("its share of the limit")
            for row, rows in zip(cells, found.values(), strict=True):
                row.append(_share(rows["decoder"].cost) if "decoder" in rows else NOTHING)
        tables.append("\n".join([f"{_provenance(runs)} {legend}", "", *_table(heads, cells)]) + "\n")
    return "\n".join(tables)


def markdown(record: Record) -> str:
    """All tables: for each work one of times and one of what they cost, and where the device's time goes."""
    legend = "Median times, and in brackets how many times as fast as stock in the same rounds of the same process."
    lines = [f"{_provenance(record.runs.values())} {legend}", ""]
    for work in WORKS:
        found, title = _found(record, work), work.title.capitalize()
        shown = [name for name in TITLES if any(name in rows and rows[name].cost for rows in found.values())]
        if not found:
            continue
        cells = [[name, *(_cell(rows.get(each)) for each in shown)] for name, rows in found.items()]
        lines += [f"**{title}**", "", *_table(["model", *(TITLES[each] for each in shown)], cells), ""]
        costs = [
            [name, TITLES[each], *_costs(cost)] for name, rows in found.items() for each in shown
            if each in rows and (cost := rows[each].cost) is not None
        ]  # fmt: skip
        lines += _folded(f"{title}: what it costs", _table(["model", "variant", *COSTS], costs))
    kernels = []
    for name, rows in _found(record, WORKS[0]).items():  # the kernels that take longest in a step of ours in eager
        if "ours" in rows and rows["ours"].cost and (longest := rows["ours"].cost.kernels):
            cells = [[f"`{k.name[:60]}`", str(k.count), f"{k.seconds * 1e3:.2f}"] for k in longest[:KERNELS]]
            kernels += [f"**{name}, ours**", "", *_table(["kernel", "launches", "ms"], cells), ""]
    return "\n".join(lines + (_folded("Where the device's time goes", kernels) if kernels else []))


def tables(rows: Sequence[Row], tiny: bool = False) -> Iterable[PrintableTable]:
    """A table for each model and work, in the order of the rows; the caption says why a variant did not run."""
    for model, work in dict.fromkeys((row.model, row.work) for row in rows):
        found = [row for row in rows if (row.model, row.work) == (model, work)]
        reasons = dict.fromkeys([TINY] * tiny)
        reasons |= dict.fromkeys(f"{TITLES[row.variant]}: {row.reason}" for row in found if row.reason)
        cells = []
        for row in found:
            if row.cost is not None and row.ratio is not None:
                times = f"{row.ratio.median:.2f} ({row.ratio.low:.2f}-{row.ratio.high:.2f})"
                host, _, launches, memory, *_ = ("" if text == NOTHING else text for text in _costs(row.cost))
                cells.append((TITLES[row.variant], _wall(row), times, host, launches, memory))
        title = f"{find_model(model).title}: {find_work(work).title}"
        heads = ("variant", "ms", "x of stock", "host ms", "kernels", "GiB")
        yield table(title, heads, cells, *reasons, text=1, width=80)


def losses(record: Record) -> str:
    """How far the losses of ours are from those of stock, a row a model."""
    if not record.losses:
        return ""
    rows = [
        [
            model.title, run.dtype, f"{run.stock[0]:.4f} to {run.stock[-1]:.4f}", f"{run.difference:.1e}",
            " / ".join(f"{error:.1e}" for error in run.errors or ()), f"{run.held:.1e} of {run.allowed:.1e}",
        ]
        for model in EVERY if (run := record.losses.get(model.name)) is not None
    ]  # fmt: skip
    heads = [
        "model", "weights", "loss of stock", "difference of ours, of the loss",
        "distance from float32, ours / stock", "reached of what is allowed",
    ]  # fmt: skip
    return "\n".join([_provenance(record.losses.values()), "", *_table(heads, rows)]) + "\n"


def _provenance(runs: Iterable[Origin]) -> str:
    """Where they were measured, and on which days."""
    days: dict[str, set[str]] = {}
    for run in runs:
        where = f"{run.environment.device_name}, torch {run.environment.torch}, transformers {run.transformers}"
        days.setdefault(f"{where}{', small models' if run.tiny else ''}", set()).add(run.date)
    return f"{'; '.join(f'{where}, ' + ' and '.join(sorted(dates)) for where, dates in days.items())}."


def _found(record: Record, work: Work) -> dict[str, dict[str, Row]]:
    """The rows of a work, by title of the model and name of the variant."""
    runs = {model.title: record.runs.get(run_name(model.name, work.name)) for model in EVERY}
    return {title: {row.variant: row for row in run.rows} for title, run in runs.items() if run and run.rows}


def _wall(row: Row | None) -> str:
    return NOTHING if row is None or row.cost is None else _milliseconds(row.cost.wall)


def _milliseconds(seconds: float | None) -> str:
    return NOTHING if seconds is None else f"{seconds * 1e3:{',.0f' if seconds >= 1.0 else '.3g'}}"


def _ratio(row: Row | None) -> str:
    return NOTHING if row is None or row.ratio is None else f"{row.ratio.median:.2f}x"


def _share(cost: Cost | None) -> str:
    """The part of a step's time that reading at the measured rate takes."""
    return NOTHING if cost is None or cost.limit is None else f"{cost.limit / cost.wall:.2f}"


def _cell(row: Row | None) -> str:
    if row is None or row.ratio is None:
        return NOTHING
    interval = f" ({row.ratio.median:.2f}x, {row.ratio.low:.2f} to {row.ratio.high:.2f})"
    return f"{_wall(row)} ms{interval if row.variant != STOCK.name else ''}"


def _costs(cost: Cost) -> list[str]:
    """The cells of `COSTS`."""
    return [
        _milliseconds(cost.host),
        _milliseconds(cost.device),
        str(cost.launches or NOTHING),
        NOTHING if cost.peak_bytes is None else f"{cost.peak_bytes / 2**30:.1f}",
        f"{cost.first_call:.1f}",
        f"{cost.difference:.1e}",
        _share(cost),
    ]


def _folded(title: str, lines: Iterable[str]) -> list[str]:
    """Lines of a page that open at a click."""
    return [f'??? info "{title}"', "", *textwrap.indent("\n".join(lines), "    ").split("\n"), ""]
