"""Plots of results: one picture for each operation, of how near every level comes to what the machine can do."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from kernel_pytorch.harness.report import groups
from kernel_pytorch.harness.results import Measurement, Results

SUFFIXES = (".png", ".svg")
LIMITS = {
    "share_of_copy": (
        "share of the copy bandwidth measured on this machine",
        "speed over that of a copy of the same size",
    ),
    "share_of_matmul": (
        "share of the fastest matrix product measured on this machine",
        "speed over that of the same matrix products by PyTorch",
    ),
}
"""What bars show: of files that are older than `Measurement.same_size`, and of others."""
LABEL = 44
"""Characters of a case's sizes in a line, so that they leave room for the bars."""
BAR = 0.13
"""Inches of a bar, the space between the bars of two cases included."""
SHORT = 0.01
"""A bar of a smaller share is hardly seen: one token is far from what a machine copies at most. Its figure is drawn."""

Cases = dict[str, list[Measurement]]


def plot(results: Results, file: Path) -> list[Path]:
    """Draw each operation beside the results' file, as `<its name>-<operation>.png` and `.svg`, where any was measured.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    levels = dict.fromkeys(m.implementation for m in results.measurements if m.status == "measured")
    colors = {level: f"C{position}" for position, level in enumerate(levels)}  # the same in all plots
    operations: dict[str, dict[str, Cases]] = {}
    for (operation, direction, _), group in groups(results).items():
        if any(m.status == "measured" for m in group):
            case = group[0].case
            label = f"{case.name}\n{textwrap.fill(case.label.removeprefix(case.name).strip(), LABEL)}"
            operations.setdefault(operation, {}).setdefault(direction, {})[label] = group
    found = []
    with matplotlib.rc_context({"svg.hashsalt": "kernel-pytorch", "font.size": 8}):
        for operation, directions in operations.items():
            title = f"{operation} on {results.machine.environment.device_name}"
            found += _draw(directions, colors, title, file.with_name(f"{file.stem}-{operation}"))
    return found


def limit(found: list[Measurement]) -> str:
    """The limit that a case is held against: of bandwidth or of arithmetic, whichever its kernels come nearer.

    It belongs to the case, not to the operation: attention of one token moves bytes, that of a prompt multiplies, and
    as a share of the products the bars of one token would be too short to be seen.
    """
    return max(LIMITS, key=lambda name: max((getattr(m, name) or 0.0 for m in found), default=0.0))


def _measured(directions: dict[str, Cases], label: str | None = None) -> list[Measurement]:
    """What was measured of an operation, or of one of its cases."""
    every = [each for cases in directions.values() for each in cases.items()]
    return [m for name, group in every for m in group if label in (None, name) and m.status == "measured"]


def _draw(directions: dict[str, Cases], colors: dict[str, str], title: str, target: Path) -> list[Path]:
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    labels = list(dict.fromkeys(label for cases in directions.values() for label in cases))
    limits = {label: limit(_measured(directions, label)) for label in labels}
    usual = limit(_measured(directions))
    names = {label: label if limits[label] == usual else label.replace("\n", " *\n", 1) for label in labels}
    present = {m.implementation for m in _measured(directions)}
    colors = {level: color for level, color in colors.items() if level in present}
    height = len(labels) * (len(colors) + 1) * BAR
    figure, axes = pyplot.subplots(
        1, len(directions), figsize=(2.5 + 4 * len(directions), height + 1.4), squeeze=False, sharex=True,
        layout="constrained",
    )  # fmt: skip
    for axis, (direction, cases) in zip(axes[0], directions.items(), strict=True):
        # A case that was not measured leaves its place empty.
        every = {names[label]: cases.get(label, []) for label in labels}
        _panel(axis, every, colors, list(limits.values()), labelled=axis is axes[0][0])
        axis.set_title(direction, loc="left")
    handles = [Patch(color=color, label=level) for level, color in colors.items()]
    columns = min(len(colors), 3 * len(directions))  # more would reach into the title
    figure.legend(handles=handles, loc="outside upper right", ncols=columns, frameon=False)
    same_size = any(m.same_size for m in _measured(directions))
    others = [f"\n* {LIMITS[other][same_size]}" for other in LIMITS if other != usual and other in limits.values()]
    figure.supxlabel(f"{LIMITS[usual][same_size]}, with 99% interval{''.join(others)}")
    figure.suptitle(title, x=0.01, horizontalalignment="left")
    paths = [target.with_name(target.name + suffix) for suffix in SUFFIXES]
    for path in paths:
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
    return paths


def _panel(axis: Any, cases: Cases, colors: dict[str, str], limits: list[str], *, labelled: bool) -> None:
    """Bars of one direction, each case by its limit; the axis carries the names of the cases where it is the first."""
    ticks, levels = [], list(colors)
    for row, (group, limited_by) in enumerate(zip(cases.values(), limits, strict=True)):
        base = row * (len(levels) + 1)
        ticks.append(base + (len(levels) - 1) / 2)
        for m in group:
            share = getattr(m, limited_by)
            if m.time is None or share is None:
                continue
            y, color = base + levels.index(m.implementation), colors[m.implementation]
            # Share and time are inversely proportional, so the ends of the interval change places.
            errors = [[100 * abs(share * (1 - m.time.median / end))] for end in (m.time.high, m.time.low)]
            axis.barh(y, 100 * share, xerr=errors, color=color, height=0.9, error_kw={"elinewidth": 1})
            if share < SHORT:
                axis.text(1, y, f"{share:.2%}", fontsize=6, verticalalignment="center")
    axis.set_yticks(ticks, list(cases) if labelled else [""] * len(ticks))
    axis.set_ylim(len(cases) * (len(levels) + 1) - 1, -1)
    axis.axvline(100, color="black", linewidth=0.8)
    axis.xaxis.set_major_formatter("{x:.0f}%")
    axis.spines[["top", "right"]].set_visible(False)
