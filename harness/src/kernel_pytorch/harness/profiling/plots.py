"""The pictures of a profile. matplotlib is optional: whoever calls these handles ModuleNotFoundError."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from kernel_pytorch.harness.profiling.records import MemoryTimeline, OperatorUse, Profile
from kernel_pytorch.harness.roofline import ceiling_for

COLOURS = {"memory": "C0", "compute": "C1", "overhead": "0.6", None: "0.6"}
LABELLED = 5
STYLE = {"svg.hashsalt": "kernel-pytorch", "font.size": 9}


def roofline(profile: Profile, top: int) -> str:
    """SVG: the rows against the measured bandwidth, by the bytes they move, and against the matmul rate.

    The area of a dot is the row's share of the time. A row whose rate is above the limit is drawn hollow.
    """
    import matplotlib
    from matplotlib.figure import Figure

    rows = [row for row in profile.operators[:top] if row.attained.bytes_per_second]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 4.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        _bandwidth(left, profile, rows)
        _arithmetic(right, profile, [row for row in rows if row.flops])
        return _svg(figure)


def memory(timeline: MemoryTimeline) -> str:
    """SVG: allocated bytes over one step, stacked by category."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 3.4), layout="constrained")
        axis = figure.subplots()
        moments = np.array(timeline.seconds) * 1e3
        series = {name: np.array(values) / 2**20 for name, values in timeline.bytes.items() if any(values)}
        if series:
            axis.stackplot(moments, *series.values(), labels=list(series), step="post")
            # Outside: inside it would hide what it explains.
            axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, reverse=True)
        axis.axhline(timeline.peak / 2**20, color="black", linewidth=0.8, linestyle="--")
        axis.annotate(
            f"peak {timeline.peak / 2**20:,.4g} MiB", (0.005, timeline.peak / 2**20),
            xycoords=("axes fraction", "data"), xytext=(0, 2), textcoords="offset points", va="bottom",
        )  # fmt: skip
        axis.set(xlabel="ms since the step began, under the profiler", ylabel="MiB", ylim=(0, None))
        axis.margins(x=0, y=0.12)
        axis.spines[["top", "right"]].set_visible(False)
        return _svg(figure)


def _bandwidth(axis: Any, profile: Profile, rows: list[OperatorUse]) -> None:
    ceilings = profile.machine.ceilings
    sizes = [point.bytes for point in ceilings.bandwidth] + [row.bytes or 1 for row in rows]
    line = np.geomspace(min(sizes) / 2, max(sizes) * 2, 200)
    rates = [ceiling_for(ceilings, int(moved)).bytes_per_second / 1e9 for moved in line]
    axis.plot(line / 2**20, rates, color="black", linewidth=1)
    # What a launch costs is a limit too: so many bytes in at least so much time.
    axis.plot(line / 2**20, line / ceilings.launch_overhead_seconds / 1e9, color="0.6", linewidth=1, linestyle=":")
    points = [((row.bytes or 0) / 2**20, (row.attained.bytes_per_second or 0.0) / 1e9) for row in rows]
    _dots(axis, rows, points)
    low = min([y for _, y in points] + rates) / 3
    axis.set(xscale="log", yscale="log", xlabel="MiB that a call must move", ylabel="GB/s", ylim=(low, max(rates) * 4))
    axis.set_title("against the copy rate (line) and one launch (dotted)", loc="left")


def _arithmetic(axis: Any, profile: Profile, rows: list[OperatorUse]) -> None:
    ceilings = profile.machine.ceilings
    slowest = min(point.bytes_per_second for point in ceilings.bandwidth)
    intensities = [(row.flops or 0) / max(row.bytes or 1, 1) for row in rows]
    line = np.geomspace(min([0.1, *intensities]) / 2, max([1e3, *intensities]) * 2, 200)
    used = {label.split()[0] for row in rows for label in row.inputs}
    rates = ceilings.matmul_flops_per_second
    for name in [name for name in rates if name in used] or rates:
        axis.plot(line, np.minimum(line * slowest, rates[name]) / 1e12, color="black", linewidth=1)
        axis.annotate(
            name, (1.01, rates[name] / 1e12), xycoords=("axes fraction", "data"), va="center", fontsize=8,
        )  # fmt: skip
    points = [(x, (row.attained.flops_per_second or 0.0) / 1e12) for x, row in zip(intensities, rows, strict=True)]
    _dots(axis, rows, points)
    axis.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="TFLOP/s")
    axis.set_title(
        "against the matmul rate and main memory" if rows else "no operator here has a FLOP count", loc="left"
    )
    axis.margins(y=0.15)


def _dots(axis: Any, rows: list[OperatorUse], points: list[tuple[float, float]]) -> None:
    labelled: set[str] = set()
    for row, (x, y) in zip(rows, points, strict=True):
        colour = COLOURS[row.attained.bound]
        axis.scatter(
            x, y, s=15 + 400 * row.share, alpha=0.7, edgecolors=colour, linewidths=1,
            facecolors="none" if row.attained.problem else colour, zorder=3,
        )  # fmt: skip
        name = row.name.removeprefix("aten::")[:30]
        if name not in labelled and len(labelled) < LABELLED:
            labelled.add(name)
            # A dollar sign in a name is no formula.
            axis.annotate(name, (x, y), xytext=(6, 4), textcoords="offset points", fontsize=8, parse_math=False)
    axis.spines[["top", "right"]].set_visible(False)


def _svg(figure: Any) -> str:
    written = io.StringIO()
    figure.savefig(written, format="svg", metadata={"Date": None})
    return written.getvalue()
