"""A profile as one HTML page: opened from disk, without a script and without a network."""

from __future__ import annotations

import base64
from collections.abc import Callable
from html import escape
from pathlib import Path

from kernel_pytorch.harness.profiling import plots
from kernel_pytorch.harness.profiling.records import OperatorUse, Profile
from kernel_pytorch.harness.profiling.tables import COLUMNS, LEGEND, RIGHT, cells, direction, remarks, summary
from kernel_pytorch.harness.report import seconds
from kernel_pytorch.harness.results import write_atomically

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 80em; padding: 0 1em; color: #222; background: #fff }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin-top: 2em }
img { max-width: 100%; display: block }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums }
th, td { text-align: left; vertical-align: top; padding: .25em .7em; border-bottom: 1px solid #ddd }
td.right, th.right { text-align: right; white-space: nowrap }
td.bar { background: linear-gradient(to right, #fde0cc var(--share), transparent var(--share)) }
td.name { overflow-wrap: anywhere; min-width: 16em }
tr.kernel td { color: #666; border-bottom: none; padding-top: 0 }
tr.kernel td.name { max-width: 16em; white-space: nowrap; overflow: hidden; text-overflow: ellipsis }
.inputs { color: #555; min-width: 16em }
"""  # noqa: E501
NO_PLOTS = "Not drawn: matplotlib is not installed (`pip install matplotlib`)."


def page(profile: Profile, top: int = 40) -> str:
    """The whole page. Whatever came from the profiled code is escaped."""
    title = f"{profile.module}, {direction(profile)}"
    environment = profile.machine.environment
    about = (
        f"{', '.join(profile.inputs) or 'no tensors'} on {environment.device_name}, torch {environment.torch}, "
        f"{profile.created[:10]}"
    )
    notes = remarks(profile, top)
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
        f"<style>{STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1><p>{escape(about)}</p>",
        _list(summary(profile)),
        "<h2>Against what this machine can do</h2>",
        _image(lambda: plots.roofline(profile, top), "operators against bandwidth and matmul rate"),
        "<p>The area of a dot is a row's share of the time; hollow is above the limit. Blue: bound by "
        "memory, orange: by arithmetic, grey: by the launch.</p>",
        "<h2>Where the time goes</h2>",
        _table(profile, top),
        f"<p>{escape(LEGEND[0].upper() + LEGEND[1:])}.</p>",
        _list(notes),
        "<h2>Memory over one step</h2>",
        _image(lambda: plots.memory(profile.memory), "allocated memory over one step"),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def write(profile: Profile, folder: Path, top: int = 40) -> list[Path]:
    """Write `profile.json`, `page.html` and, where matplotlib is installed, `memory.svg`; the paths come back."""
    contents = {"profile.json": profile.to_json() + "\n", "page.html": page(profile, top)}
    drawn = _drawn(lambda: plots.memory(profile.memory))
    if drawn is not None:
        contents["memory.svg"] = drawn
    for name, text in contents.items():
        write_atomically(folder / name, text)
    return [folder / name for name in contents]


def _table(profile: Profile, top: int) -> str:
    head = "".join(f"<th{_aligned(column)}>{escape(column)}</th>" for column in COLUMNS)
    rows = "\n".join(_rows(row, profile.steps) for row in profile.operators[:top])
    left = len(profile.operators) - top
    more = f"<p>{left} more rows are in profile.json.</p>" if left > 0 else ""
    return f'<div class="wide"><table><tr>{head}</tr>\n{rows}</table></div>{more}'


def _rows(row: OperatorUse, steps: int) -> str:
    found = []
    for column, text in zip(COLUMNS, cells(row, steps), strict=True):
        attributes = _aligned(column)
        if column == "operator":
            attributes = ' class="name"'
        elif column == "inputs":
            attributes = ' class="inputs"'
        elif column == "share":
            attributes = f' class="right bar" style="--share: {100 * row.share:.1f}%"'
        found.append(f"<td{attributes}>{escape(text)}</td>")
    lines = [f"<tr>{''.join(found)}</tr>"]
    for kernel in row.kernels if row.kind != "kernel" else ():
        per_call = seconds(kernel.seconds / kernel.calls)
        lines.append(
            f'<tr class="kernel"><td class="name" title="{escape(kernel.name)}">&#8627; {escape(kernel.name)}</td>'
            f'<td class="right">{kernel.calls / steps:.3g}</td><td class="right">{escape(per_call)}</td>'
            f'<td colspan="{len(COLUMNS) - 3}"></td></tr>'
        )
    return "\n".join(lines)


def _aligned(column: str) -> str:
    return ' class="right"' if column in RIGHT else ""


def _list(lines: list[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>" if lines else ""


def _image(draw: Callable[[], str], what: str) -> str:
    # As an image a drawing cannot run anything, and its names cannot clash with another's.
    drawn = _drawn(draw)
    if drawn is None:
        return f"<p>{escape(NO_PLOTS)}</p>"
    data = base64.b64encode(drawn.encode()).decode()
    return f'<img alt="{escape(what)}" src="data:image/svg+xml;base64,{data}">'


def _drawn(draw: Callable[[], str]) -> str | None:
    try:
        return draw()
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        return None
