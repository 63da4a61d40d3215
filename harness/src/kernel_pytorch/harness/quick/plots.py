"""Pictures of the quick functions. matplotlib is optional: ModuleNotFoundError passes through."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_pytorch.harness.plots import SUFFIXES
from kernel_pytorch.harness.report import seconds

if TYPE_CHECKING:
    from kernel_pytorch.harness.quick.growth import Scaling
    from kernel_pytorch.harness.quick.records import Comparison


def bars(comparison: Comparison, path: Path) -> Path:
    """One bar per implementation that was timed, with its 99% interval; those that turned out wrong are hatched."""
    with _axis(path, (7, 1.1 + 0.4 * len(comparison.contenders))) as axis:
        for row, c in enumerate(comparison.contenders):
            label, end = f"{c.status}: not timed", 0.0
            if c.seconds is not None:
                low, median, end = (1e3 * value for value in (c.seconds.low, c.seconds.median, c.seconds.high))
                wrong = c.status == "wrong"
                label = "wrong" if wrong else seconds(c.seconds.median)
                fill = {"color": "none", "edgecolor": "0.6", "hatch": "///"} if wrong else {"color": "C0"}
                axis.barh(row, median, xerr=[[median - low], [end - median]], error_kw={"elinewidth": 1}, **fill)
            axis.annotate(label, (end, row), xytext=(4, 0), textcoords="offset points", va="center")
        names = [c.name + (" (reference)" if c.name == comparison.reference else "") for c in comparison.contenders]
        axis.set_yticks(range(len(names)), names, parse_math=False)
        axis.invert_yaxis()
        axis.margins(x=0.18)
        axis.set_xlim(left=0)
        axis.set_xlabel(f"ms per call, median and 99% interval, on {comparison.device}", parse_math=False)
        axis.set_title(comparison.title, loc="left", parse_math=False)
    return path


def scaling_plot(scaling: Scaling, path: Path) -> Path:
    """Times over sizes, both logarithmic, with the fitted power."""
    with _axis(path, (6, 4)) as axis:
        sizes = [point.size for point in scaling.points]
        times = [point.seconds for point in scaling.points]
        errors = [[1e3 * (t.median - t.low) for t in times], [1e3 * (t.high - t.median) for t in times]]
        axis.errorbar(sizes, [1e3 * t.median for t in times], errors, fmt="o", color="black", capsize=2)
        growth = scaling.growth
        axis.plot(sizes, [1e3 * growth.factor * size**growth.exponent for size in sizes])
        axis.set(xscale="log", yscale="log", xlabel="size", ylabel="ms per call")
        axis.set_title(f"{scaling.name}: {growth.verdict}", loc="left", parse_math=False)
    return path


@contextlib.contextmanager
def _axis(path: Path, size: tuple[float, float]) -> Iterator[Any]:
    """An axis that is written to a file at the end."""
    if path.suffix not in SUFFIXES:
        raise ValueError(f"given {str(path)!r}; allowed are names that end in {' or '.join(SUFFIXES)}")
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "kernel-pytorch", "font.size": 9}):
        figure = Figure(figsize=size, layout="constrained")
        axis = figure.subplots()
        axis.spines[["top", "right"]].set_visible(False)
        yield axis
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
