"""Times of a function at several sizes, and the exponent with which they grow."""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from kernel_pytorch.harness.clock import Interval, median_interval
from kernel_pytorch.harness.environment import describe_environment
from kernel_pytorch.harness.quick.comparison import name_of, time_together
from kernel_pytorch.harness.quick.inputs import Arguments
from kernel_pytorch.harness.quick.records import TIMES, times
from kernel_pytorch.harness.records import Part
from kernel_pytorch.harness.report import seconds
from kernel_pytorch.harness.tables import PrintableTable, table
from kernel_pytorch.harness.timing import ROUNDS

FEWEST_SIZES = 5
"""A line through fewer points says little about them."""


REMOVED = ("candidates", "fits", "model", "slope", "span", "told_apart")


class Growth(Part):
    """A power of the size, fitted to times: seconds = factor * size ** exponent.

    Attributes:
        exponent: the slope of log(time) over log(size), by least squares. Overhead lowers it at small sizes, and
            caches that are too small raise it at large ones.
        factor: seconds at size 1.
        r_squared: the part of the variance of log(time) that the fit explains, between 0 and 1; near 0 for times that
            do not depend on the size.
    """

    exponent: float
    factor: float
    r_squared: float

    @property
    def verdict(self) -> str:
        """The fit in one sentence."""
        return f"time grows as size^{self.exponent:.2f} (R² {self.r_squared:.3f})"

    def at(self, size: int) -> float:
        """The fitted seconds of a size."""
        return self.factor * size**self.exponent

    def __getattr__(self, name: str) -> Any:
        """Name the replacement of what was removed."""
        if name in REMOVED:
            raise AttributeError(f"Growth.{name} was removed with the fitted laws; use exponent and r_squared")
        return super().__getattr__(name)  # type: ignore[misc]


class Point(Part):
    """The time of one size."""

    size: int
    seconds: Interval
    method: str


class Scaling(Part):
    """Times at several sizes and their growth.

    Attributes:
        name: of the function.
        device: in words.
        points: by size, the smallest first.
        growth: fitted to the medians.
    """

    name: str
    device: str
    points: tuple[Point, ...]
    growth: Growth

    def table(self) -> PrintableTable:
        """One row per size; both `print` and rich show it."""
        rows = [[f"{p.size:,}", *times(p.seconds), seconds(self.growth.at(p.size))] for p in self.points]
        return table(f"{self.name} on {self.device}", ("size", *TIMES, "fitted"), rows, self.growth.verdict)

    def plot(self, path: Path | str) -> Path:
        """Draw nothing, with a DeprecationWarning: the picture was cut."""
        warnings.warn("scaling(...).plot() draws nothing any more; plot its points", DeprecationWarning, stacklevel=2)
        return Path(path)


def scaling(make: Callable[[int], Any], sizes: Iterable[int], *, rounds: int = ROUNDS) -> Scaling:
    """Time a function at several sizes and fit how its time grows.

    Args:
        make: called with a size, outside of the timing. It returns what is timed: a function without arguments, or a
            tuple of a function and its arguments, whose tensors are then rotated through copies that are not in the
            cache. The sizes are timed one after the other, the smallest first.
        sizes: whole numbers above 0, at least five different ones; over two decades an overhead matters less.
        rounds: samples per size.

    Raises:
        ValueError: too few sizes, or one below 1; `rounds` below what an interval needs.
        TypeError: `make` returned neither, or `sizes` is no list.
    """
    ordered, points = sorted(set(sizes)), []
    _check_sizes(ordered)
    for size in ordered:
        made = make(size)
        function, *positional = made if isinstance(made, tuple) else (made,)
        if not callable(function):
            raise TypeError(f"the function returned {made!r} for size {size}; it must return what is timed")
        arguments = Arguments(positional, {})
        timing = time_together({"": function}, arguments, rounds)[0][""]
        points.append(Point(size=size, seconds=median_interval(timing.samples), method=timing.method))
    return Scaling(
        name=name_of(make),
        device=describe_environment(arguments.device).device_name,
        points=tuple(points),
        growth=fit_growth(ordered, [p.seconds.median for p in points]),
    )


def fit_growth(sizes: Sequence[int], times: Sequence[float]) -> Growth:
    """Fit a power of the size to times, by least squares of the logarithms.

    Args:
        sizes: different whole numbers above 0, at least `FEWEST_SIZES`.
        times: seconds, one per size, above 0.

    Raises:
        ValueError: sizes or times are others.
    """
    _check_sizes(sizes)
    x, y = [math.log(size) for size in sizes], [math.log(time) for time in times]
    exponent, constant = statistics.linear_regression(x, y)
    varies = statistics.pvariance(y) > 1e-20
    r_squared = statistics.correlation(x, y) ** 2 if varies else 0.0
    return Growth(exponent=exponent, factor=math.exp(constant), r_squared=r_squared)


def _check_sizes(sizes: Sequence[int]) -> None:
    wrong = [size for size in sizes if not isinstance(size, int) or size < 1]
    if wrong:
        raise ValueError(f"sizes hold {wrong[0]!r}; allowed are whole numbers from 1 on")
    if len(set(sizes)) < FEWEST_SIZES:
        raise ValueError(f"sizes are {len(set(sizes))} different ones; allowed are {FEWEST_SIZES} or more")
