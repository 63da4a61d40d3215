"""Tables of models: for the site, shorter for the README, and for a terminal of 80 columns."""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Iterable, Sequence

from kernel_pytorch.harness.models.record import Origin, Record, Row, run_name
from kernel_pytorch.harness.models.variants import LIGER, STOCK, VARIANTS
from kernel_pytorch.harness.models.works import WORKS, Work, find_work
from kernel_pytorch.harness.models.zoo import MODELS, SMALL, Model, find_model
from kernel_pytorch.harness.report import markdown_table
from kernel_pytorch.harness.tables import PrintableTable, table

HEADLINE = ("compiled", "best", "liger", "ours", "ours-gpu-bound", "ours-compiled", "ours-best")
DECODING = ("graphs", "autotune", "plain", "liger", "ours", "decoder")
EVERY = (*MODELS, *SMALL)
TITLES = {variant.name: variant.title for variant in (*VARIANTS, LIGER)}
NOTHING = "-"
KERNELS = 8
_table = functools.partial(markdown_table, rule="---")


def headline(record: Record) -> str:
    """Tables of training steps, a row a model, and of decoding, a row a work of a model."""
    legend = "The median time of stock, and how many times as fast the others were in the same rounds."
    decoding = [work for work in WORKS if work.cached or work.new]
    lines: list[str] = []
    for title, works, variants in (("training step", WORKS[:1], HEADLINE), ("decoding", decoding, DECODING)):
        names = {work.name for work in works}
        runs = [run for name, run in record.runs.items() if name.partition("/")[2] in names]
        found = {
            model.title if len(works) == 1 else f"{model.title}: {work.title}": rows
            for model in EVERY for work in works if (rows := _rows(record, model, work))
        }  # fmt: skip
        shown = [name for name in variants if any(_ratio(rows.get(name)) != NOTHING for rows in found.values())]
        if not shown and lines:
            continue
        lines += [*([""] if lines else []), f"{_provenance(runs)} {legend}", ""]
        heads = [title, "stock, ms", *(TITLES[name] for name in shown)]
        cells = [
            [name, _milliseconds(rows.get(STOCK.name)), *(_ratio(rows.get(variant)) for variant in shown)]
            for name, rows in found.items()
        ]
        if variants is DECODING:
            heads.append("its share of the limit")
            cells = [[*row, _share(rows.get("decoder"))] for row, rows in zip(cells, found.values(), strict=True)]
        lines += _table(heads, cells)
    return "\n".join(lines) + "\n"


def markdown(record: Record) -> str:
    """All tables: for each work one of times and one of what they cost, and where the device's time goes."""
    legend = "Median times, and in brackets how many times as fast as stock in the same rounds of the same process."
    lines = [f"{_provenance(record.runs.values())} {legend}", ""]
    variants = (*VARIANTS, LIGER)
    for work in WORKS:
        found = {m.title: rows for m in EVERY if (rows := _rows(record, m, work))}
        shown = [
            each for each in variants if any(each.name in rows and rows[each.name].cost for rows in found.values())
        ]
        if not found:
            continue
        cells = [
            [title, *(_cell(rows.get(each.name), stock=each is STOCK) for each in shown)]
            for title, rows in found.items()
        ]
        lines += [f"**{work.title.capitalize()}**", "", *_table(["model", *(each.title for each in shown)], cells), ""]
        costs = [[title, each.title, *_costs(rows[each.name])] for title, rows in found.items() for each in shown
                 if each.name in rows and rows[each.name].cost]  # fmt: skip
        heads = ["model", "variant", "host, ms", "device, ms", "launches", "peak, GiB", "first call, s", "difference",
                 "of the limit"]  # fmt: skip
        lines += [f'??? info "{work.title.capitalize()}: what it costs"', "", *_indented(_table(heads, costs)), ""]
    if kernels := _kernels(record):
        lines += ['??? info "Where the device\'s time goes"', "", *_indented(kernels), ""]
    return "\n".join(lines)


def tables(rows: Sequence[Row]) -> Iterable[PrintableTable]:
    """A table for each model and work, in the order of the rows; the caption says why a variant did not run."""
    for model, work in dict.fromkeys((row.model, row.work) for row in rows):
        found = [row for row in rows if (row.model, row.work) == (model, work)]
        reasons = dict.fromkeys(f"{TITLES[row.variant]}: {row.reason}" for row in found if row.reason)
        cells = []
        for row in found:
            if row.cost is not None and row.ratio is not None:
                times = f"{row.ratio.median:.2f} ({row.ratio.low:.2f}-{row.ratio.high:.2f})"
                host, _, launches, memory, *_ = ("" if text == NOTHING else text for text in _costs(row))
                cells.append((TITLES[row.variant], _milliseconds(row), times, host, launches, memory))
        title = f"{find_model(model).title}: {find_work(work).title}"
        yield table(
            title, ("variant", "ms", "x of stock", "host ms", "kernels", "GiB"), cells, *reasons, text=1, width=80
        )


def losses(record: Record) -> str:
    """How far the losses of ours are from those of stock, a row a model."""
    if not record.losses:
        return ""
    rows = [
        [
            m.title,
            run.dtype,
            f"{run.stock[0]:.4f} to {run.stock[-1]:.4f}",
            f"{run.difference:.1e}",
            "" if run.errors is None else " / ".join(f"{error:.1e}" for error in run.errors),
            f"{run.held:.1e} of {run.allowed:.1e}",
        ]
        for m in EVERY
        if (run := record.losses.get(m.name)) is not None
    ]
    heads = [
        "model", "weights", "loss of stock", "difference of ours, of the loss",
        "distance from float32, ours / stock", "reached of what is allowed",
    ]  # fmt: skip
    return "\n".join([_provenance(record.losses.values()), "", *_table(heads, rows)]) + "\n"


def _provenance(runs: Iterable[Origin]) -> str:
    """Where they were measured, and on which days."""
    days: dict[str, list[str]] = {}
    for run in runs:
        where = f"{run.environment.device_name}, torch {run.environment.torch}, transformers {run.transformers}"
        days.setdefault(f"{where}{', small models' if run.tiny else ''}", []).append(run.date)
    parts = [f"{where}, {' and '.join(sorted(set(dates)))}" for where, dates in days.items()]
    return f"{'; '.join(parts)}."


def _rows(record: Record, model: Model, work: Work) -> dict[str, Row]:
    run = record.runs.get(run_name(model.name, work.name))
    return {} if run is None else {row.variant: row for row in run.rows}


def _milliseconds(row: Row | None) -> str:
    return NOTHING if row is None or row.cost is None else f"{row.cost.wall * 1e3:.3g}"


def _ratio(row: Row | None) -> str:
    return NOTHING if row is None or row.ratio is None else f"{row.ratio.median:.2f}x"


def _share(row: Row | None) -> str:
    """Return the part of a step's time that reading at the measured rate takes."""
    cost = None if row is None else row.cost
    return NOTHING if cost is None or cost.limit is None else f"{cost.limit / cost.wall:.2f}"


def _cell(row: Row | None, *, stock: bool) -> str:
    if row is None or row.cost is None or row.ratio is None:
        return NOTHING
    ratio = "" if stock else f" ({row.ratio.median:.2f}x, {row.ratio.low:.2f} to {row.ratio.high:.2f})"
    return f"{_milliseconds(row)} ms{ratio}"


def _costs(row: Row) -> list[str]:
    cost = row.cost
    assert cost is not None
    return [
        f"{cost.host * 1e3:.3g}",
        NOTHING if cost.device is None else f"{cost.device * 1e3:.3g}",
        str(cost.launches or NOTHING),
        NOTHING if cost.peak_bytes is None else f"{cost.peak_bytes / 2**30:.1f}",
        f"{cost.first_call:.1f}",
        f"{cost.difference:.1e}",
        _share(row),
    ]


def _kernels(record: Record) -> list[str]:
    """The kernels that take longest in a training step of ours in eager."""
    lines = []
    for model in EVERY:
        row = _rows(record, model, WORKS[0]).get("ours")
        if row is None or row.cost is None or not row.cost.kernels:
            continue
        cells = [[f"`{k.name[:60]}`", str(k.count), f"{k.seconds * 1e3:.2f}"] for k in row.cost.kernels[:KERNELS]]
        lines += [f"**{model.title}, ours**", "", *_table(["kernel", "launches", "ms"], cells), ""]
    return lines


def _indented(lines: Iterable[str]) -> list[str]:
    return textwrap.indent("\n".join(lines), "    ").split("\n")
