"""How cost grows with size: times at several sizes, their slope in the logarithms, and the law that they follow."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from kernel_pytorch.harness.clock import median_interval
from kernel_pytorch.harness.environment import describe_environment
from kernel_pytorch.harness.profiling.tables import PrintableTable
from kernel_pytorch.harness.quick.inputs import Arguments
from kernel_pytorch.harness.quick.records import Shown, printable
from kernel_pytorch.harness.quick.timed import time_together
from kernel_pytorch.harness.report import seconds
from kernel_pytorch.harness.results import IntervalRecord
from kernel_pytorch.harness.timing import ROUNDS

Model = Literal["O(1)", "O(n)", "O(n log n)", "O(n^2)", "O(n^3)"]

MODELS: dict[Model, Callable[[np.ndarray], np.ndarray]] = {
    "O(1)": np.ones_like,
    "O(n)": lambda n: n,
    "O(n log n)": lambda n: n * np.log2(np.maximum(n, 2.0)),
    "O(n^2)": lambda n: n**2,
    "O(n^3)": lambda n: n**3,
}

FEWEST_SIZES = 5
"""With fewer, a criterion that pays for its parameters has nothing left to judge by."""

CLEAR = 8.0
"""By how much a law's criterion must be better than another's: the other is then fifty times less likely. Tried with
planted laws and noise of 5 to 20 %: about one claim in a hundred is wrong."""

SMALLEST_SPAN = 8
"""Largest size over smallest. Over less, an overhead makes every law look like every other."""

SMALLEST_ERROR = 0.01
"""Relative. Agreement closer than this is luck, and no evidence for a law."""

VISIBLE = 0.1
"""By which share a law must grow over all sizes to count as one that grows."""

POOR = 0.25
"""Relative error, in the mean, from which on a law does not describe the times."""


class Fit(Shown):
    """One law fitted to the times: seconds = overhead + factor * law(n), with neither below 0.

    Attributes:
        model: the law.
        overhead: seconds that do not depend on the size.
        factor: seconds per unit of the law.
        error: typical relative error: exp of the root mean square of log(time / fitted time), less 1.
        criterion: Akaike's, corrected for few points; smaller is better, differences count.
    """

    model: Model
    overhead: float
    factor: float
    error: float
    criterion: float


class Growth(Shown):
    """What times at several sizes say.

    Attributes:
        slope: of log(time) over log(size), by least squares, with its 99% interval. Overhead at the small end and
            caches at the large one bend the line: the laws below allow for an overhead, the slope does not.
        fits: the best one first; last those that do not grow within these sizes, which O(1) stands for.
        span: the largest size over the smallest.
        told_apart: whether the best law is clearly better than every other, and the sizes lie far enough apart.
        candidates: the laws that the data allow.
    """

    slope: IntervalRecord
    fits: tuple[Fit, ...]
    span: float
    told_apart: bool
    candidates: tuple[Model, ...]

    @property
    def model(self) -> Model:
        """The best law."""
        return self.fits[0].model

    @property
    def verdict(self) -> str:
        """What may be said, in one sentence."""
        best = self.fits[0]
        if best.error > POOR:
            return f"no law describes these times: {best.model} comes nearest, off by {best.error:.0%} on average"
        if self.span < SMALLEST_SPAN:
            return (
                f"sizes that span a factor of {self.span:.3g} tell no laws apart; take the largest {SMALLEST_SPAN} "
                "times the smallest or more"
            )
        if not self.told_apart:
            return f"the times do not tell {' from '.join(self.candidates)}; measure more sizes, farther apart"
        return f"{best.model}, off by {best.error:.1%} on average"


class Point(Shown):
    """The time of one size."""

    size: int
    seconds: IntervalRecord
    method: str


class Scaling(Shown):
    """Times at several sizes and the law that they follow.

    Attributes:
        name: of the function.
        device: what it ran on, in words.
        points: by size, the smallest first.
        growth: what they say.
    """

    name: str
    device: str
    points: tuple[Point, ...]
    growth: Growth

    def table(self) -> PrintableTable:
        """One row per size; both `print` and rich show it."""
        slope = self.growth.slope
        found = printable(
            f"{self.name} on {self.device}",
            f"slope {slope.median:.2f} (99% interval {slope.low:.2f} to {slope.high:.2f}); {self.growth.verdict}",
        )
        for column in ("size", "median", "99% interval", f"fitted {self.growth.model}"):
            found.add_column(column, justify="right")
        for point, fitted in zip(self.points, curve(self.growth.fits[0], [p.size for p in self.points]), strict=True):
            s = point.seconds
            found.add_row(
                f"{point.size:,}", seconds(s.median), f"{seconds(s.low)} to {seconds(s.high)}", seconds(fitted)
            )
        return found

    def plot(self, path: Path | str) -> Path:
        """Draw times and laws, PNG or SVG by the name of the file. ModuleNotFoundError: no matplotlib."""
        from kernel_pytorch.harness.quick.plots import scaling_plot

        return scaling_plot(self, Path(path))


def scaling(make: Callable[[int], Any], sizes: Iterable[int], *, rounds: int = ROUNDS) -> Scaling:
    """Time a function at several sizes and say how its cost grows.

    Args:
        make: called with a size, outside of the timing, to prepare it. It returns what is timed: a function without
            arguments, or a tuple of a function and its arguments, whose tensors are then rotated through copies that
            are not in the cache. The sizes are timed one after the other, the smallest first.
        sizes: whole numbers above 0, at least five different ones; two decades tell more than one.
        rounds: samples per size.

    Raises:
        ValueError: too few sizes, or one below 1; `rounds` below what an interval needs.
        TypeError: `make` returned neither, or `sizes` is no list.
    """
    if not isinstance(sizes, Iterable) or isinstance(sizes, str):
        raise TypeError(f"sizes: given {sizes!r}; allowed is a list of whole numbers, such as [1, 8, 64]")
    ordered = sorted(set(sizes))
    _check_sizes(ordered)
    points, devices = [], []
    for size in ordered:
        function, arguments = _prepared(make, size)
        name = str(size)
        timings, _, _ = time_together({name: function}, arguments, rounds=rounds)
        timing = timings[name]
        devices.append(arguments.device)
        points.append(
            Point(size=size, seconds=IntervalRecord.of(median_interval(timing.samples)), method=timing.method)
        )
    return Scaling(
        name=getattr(make, "__name__", type(make).__name__),
        device=describe_environment(devices[-1]).device_name,
        points=tuple(points),
        growth=fit_growth(ordered, [p.seconds.median for p in points]),
    )


def fit_growth(sizes: Sequence[int], times: Sequence[float]) -> Growth:
    """Fit every law to times, and choose by Akaike's criterion.

    Errors are those of logarithms: a size that takes a thousand times longer does not count a thousand times more.

    Args:
        sizes: different whole numbers above 0, at least `FEWEST_SIZES`.
        times: seconds, one per size, above 0.
    """
    _check_sizes(sizes)
    if len(times) != len(sizes) or not all(math.isfinite(t) and t > 0.0 for t in times):
        raise ValueError(f"times are {list(times)}; there must be one above 0 for each of {len(sizes)} sizes")
    n, t = np.array(sizes, dtype=np.float64), np.array(times, dtype=np.float64)
    found = sorted((_fit(model, n, t) for model in MODELS), key=lambda fit: fit.criterion)
    # A law that is all overhead says O(1) in other words.
    fits = [fit for fit in found if _grows(fit, sizes)] + [fit for fit in found if not _grows(fit, sizes)]
    near = tuple(fit.model for fit in fits if _grows(fit, sizes) and fit.criterion - fits[0].criterion < CLEAR)
    span = max(sizes) / min(sizes)
    told_apart = len(near) == 1 and span >= SMALLEST_SPAN
    return Growth(slope=_slope(n, t), fits=tuple(fits), span=span, told_apart=told_apart, candidates=near)


def curve(fit: Fit, sizes: Sequence[float]) -> list[float]:
    """Seconds that a fit predicts."""
    return [fit.overhead + fit.factor * float(MODELS[fit.model](np.array([float(n)]))[0]) for n in sizes]


def _fit(model: Model, n: np.ndarray, t: np.ndarray) -> Fit:
    """Least squares of the logarithms, without an overhead or, where that pays for itself, with one."""
    law = MODELS[model](n)
    searched = [np.array([0.0])]
    if model != "O(1)":
        searched.append(np.geomspace(law.min() * 1e-3, law.max() * 1e3, 4000))
    fits = []
    for parameters, ratios in enumerate(searched, start=2):
        # For each ratio of overhead to factor, the best factor is the geometric mean of what the sizes ask for.
        logs = np.log(t) - np.log(law + ratios[:, None])
        errors = np.sqrt(logs.var(axis=1))
        best = int(errors.argmin())
        factor, error = math.exp(logs[best].mean()), float(errors[best])
        overhead, factor = (factor, 0.0) if model == "O(1)" else (factor * float(ratios[best]), factor)
        criterion = _criterion(error, len(t), parameters)
        fits.append(Fit(model=model, overhead=overhead, factor=factor, error=math.expm1(error), criterion=criterion))
    return min(fits, key=lambda fit: fit.criterion)


def _grows(fit: Fit, sizes: Sequence[int]) -> bool:
    """Whether a law adds something visible to its overhead within these sizes; O(1) does not have to."""
    smallest, largest = curve(fit, [min(sizes), max(sizes)])
    return fit.model == "O(1)" or largest > (1.0 + VISIBLE) * smallest


def _criterion(error: float, points: int, parameters: int) -> float:
    """Akaike's information criterion with the correction for few points; the variance is a parameter too."""
    correction = 2.0 * parameters * (parameters + 1) / (points - parameters - 1)
    return points * math.log(max(error, SMALLEST_ERROR) ** 2) + 2.0 * parameters + correction


def _slope(n: np.ndarray, t: np.ndarray) -> IntervalRecord:
    x, y = np.log(n), np.log(t)
    x_centred = x - x.mean()
    slope = float((x_centred * y).sum() / (x_centred**2).sum())
    residuals = y - y.mean() - slope * x_centred
    deviation = math.sqrt(float((residuals**2).sum()) / (len(n) - 2) / float((x_centred**2).sum()))
    reach = student_quantile(0.995, len(n) - 2) * deviation
    return IntervalRecord(median=slope, low=slope - reach, high=slope + reach)


def student_quantile(probability: float, freedom: int) -> float:
    """The quantile of Student's t for whole degrees of freedom, by bisection of its distribution function."""
    low, high = 0.0, 1e4
    for _ in range(200):
        middle = (low + high) / 2.0
        if _student_cumulative(middle, freedom) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2.0


def _student_cumulative(t: float, freedom: int) -> float:
    """P(T <= t) for t >= 0: the finite sums of Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    if freedom % 2:
        term, total = cosine, cosine if freedom > 1 else 0.0
        for k in range(3, freedom - 1, 2):
            term *= cosine**2 * (k - 1) / k
            total += term
        between = 2.0 / math.pi * (angle + sine * total)
    else:
        term = total = 1.0
        for k in range(2, freedom - 1, 2):
            term *= cosine**2 * (k - 1) / k
            total += term
        between = sine * total
    return 0.5 + between / 2.0


def _check_sizes(sizes: Sequence[int]) -> None:
    wrong = [size for size in sizes if not isinstance(size, int) or isinstance(size, bool) or size < 1]
    if wrong:
        raise ValueError(f"sizes hold {wrong[0]!r}; allowed are whole numbers from 1 on")
    if len(set(sizes)) < FEWEST_SIZES:
        raise ValueError(
            f"sizes are {len(set(sizes))} different ones; allowed are {FEWEST_SIZES} or more, since fewer "
            "cannot tell a curve from a line"
        )


def _prepared(make: Callable[[int], Any], size: int) -> tuple[Callable[..., Any], Arguments]:
    made = make(size)
    function, *positional = made if isinstance(made, tuple) and made else (made,)
    if not callable(function) or isinstance(function, torch.Tensor):
        raise TypeError(
            f"the function returned {type(made).__name__} for size {size}; it must return what is timed: a function "
            "without arguments, or a tuple of a function and its arguments"
        )
    return function, Arguments.of(positional)
