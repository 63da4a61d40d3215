"""The pictures of the quick functions. matplotlib is optional: ModuleNotFoundError passes through."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from kernel_pytorch.harness.quick.growth import Scaling, curve
from kernel_pytorch.harness.quick.records import Comparison
from kernel_pytorch.harness.report import seconds

STYLE = {"svg.hashsalt": "kernel-pytorch", "font.size": 9}
SUFFIXES = (".png", ".svg")
MOST_LAWS = 3


def bars(comparison: Comparison, path: Path) -> Path:
    """One bar per implementation that was timed, with its 99% interval; those that turned out wrong are hatched."""
    check_suffix(path)
    import matplotlib
    from matplotlib.figure import Figure

    timed = [c for c in comparison.contenders if c.seconds is not None]
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7, 1.1 + 0.4 * len(comparison.contenders)), layout="constrained")
        axis = figure.subplots()
        unit, factor = _unit(max((c.seconds.median for c in timed if c.seconds), default=1.0))
        for row, c in enumerate(comparison.contenders):
            if c.seconds is None:
                axis.annotate(
                    f"{c.status}: not timed", (0, row), xytext=(4, 0), textcoords="offset points", va="center"
                )
                continue
            median, low, high = (value * factor for value in (c.seconds.median, c.seconds.low, c.seconds.high))
            wrong = c.status == "wrong"
            axis.barh(
                row, median, xerr=[[median - low], [high - median]], height=0.7, error_kw={"elinewidth": 1},
                color="none" if wrong else "C1" if c.name == comparison.reference else "C0",
                edgecolor="0.6" if wrong else "none", hatch="///" if wrong else None,
            )  # fmt: skip
            label = "wrong" if wrong else seconds(c.seconds.median)
            axis.annotate(label, (high, row), xytext=(4, 0), textcoords="offset points", va="center")
        names = [
            _plain(c.name) + (" (reference)" if c.name == comparison.reference else "") for c in comparison.contenders
        ]
        axis.set_yticks(range(len(comparison.contenders)), names)
        axis.invert_yaxis()
        axis.margins(x=0.18)
        axis.set_xlim(left=0)
        axis.set_xlabel(f"{unit} per call, median and 99% interval, on {_plain(comparison.device)}")
        axis.spines[["top", "right"]].set_visible(False)
        figure.suptitle(_plain(comparison.title), x=0.01, horizontalalignment="left")
        return _save(figure, path)


def scaling_plot(scaling: Scaling, path: Path) -> Path:
    """Times over sizes, both logarithmic, with the laws that come nearest."""
    check_suffix(path)
    import matplotlib
    from matplotlib.figure import Figure

    sizes = [point.size for point in scaling.points]
    line = np.geomspace(sizes[0], sizes[-1], 200)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6, 4), layout="constrained")
        axis = figure.subplots()
        medians = np.array([point.seconds.median for point in scaling.points])
        ends = np.array([[point.seconds.low, point.seconds.high] for point in scaling.points]).T
        axis.errorbar(sizes, medians * 1e3, np.abs(ends - medians) * 1e3, fmt="o", color="black", capsize=2, zorder=3)
        for position, fit in enumerate(scaling.growth.fits[:MOST_LAWS]):
            style = {"linestyle": "-" if fit.model in scaling.growth.candidates else ":", "color": f"C{position}"}
            label = f"{fit.model}, off by {fit.error:.1%}"
            axis.plot(line, np.array(curve(fit, list(line))) * 1e3, label=label, **style)
        axis.set(xscale="log", yscale="log", xlabel="size", ylabel="ms per call")
        axis.legend(frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
        slope = scaling.growth.slope
        axis.set_title(
            f"{_plain(scaling.name)}: slope {slope.median:.2f} ({slope.low:.2f} to {slope.high:.2f})", loc="left"
        )
        return _save(figure, path)


def check_suffix(path: Path) -> None:
    """Raise ValueError unless the file's name says PNG or SVG."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"given {str(path)!r}; allowed are names that end in {' or '.join(SUFFIXES)}")


def _unit(largest: float) -> tuple[str, float]:
    return ("s", 1.0) if largest >= 1.0 else ("ms", 1e3) if largest >= 1e-3 else ("µs", 1e6)


def _plain(text: str) -> str:
    """A dollar sign in a name is no formula."""
    return text.replace("$", r"\$")


def _save(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    return path
