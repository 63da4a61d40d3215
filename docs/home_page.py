"""The part of the home page that was measured: training of whole models on a GPU, as a table and as bars."""

from __future__ import annotations

from html import escape

from kernel_pytorch.harness.models.page import EVERY, headline
from kernel_pytorch.harness.models.record import Record, run_name
from kernel_pytorch.harness.models.works import WORKS

SHOWN = {"compiled": "torch.compile", "ours-compiled": "ours, torch.compile"}


def measured(records: list[Record]) -> str:
    """Bars and table of the first record, or that there is none."""
    if not records:
        return "Not measured yet: `nox -s models` does it."
    return f"{bars(records[0])}\n\n{headline(records[0])}"


def bars(record: Record) -> str:
    """How many times as fast as stock models train, one group of bars a model; the line is stock."""
    groups = {}
    for model in EVERY:
        run = record.runs.get(run_name(model.name, WORKS[0].name))
        rows = {} if run is None else {row.variant: row for row in run.rows}
        ratios = {name: rows[name].ratio.median for name in SHOWN if name in rows and rows[name].ratio is not None}
        if ratios:
            groups[model.title] = ratios
    if not groups:
        return ""
    longest = max(ratio for ratios in groups.values() for ratio in ratios.values())
    lines = [f'<figure class="bars" style="--stock: {1 / longest:.4f}">']
    for title, ratios in groups.items():
        lines.append(f'<div class="bars-title">{escape(title)}</div>')
        for name, ratio in ratios.items():
            width, label = ratio / longest, f"{escape(SHOWN[name])} {ratio:.2f}x"
            lines.append(
                f'<div class="bars-row"><div class="bar bar-{name}" style="width: {width:.1%}">{label}</div></div>'
            )
    caption = "Training steps, times as fast as stock eager PyTorch, which the vertical line stands for."
    return "\n".join([*lines, f"<figcaption>{caption}</figcaption>", "</figure>"])
