"""Records of the quick functions, with their tables."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from rich.markup import escape

from kernel_pytorch.harness import clock
from kernel_pytorch.harness.clock import Interval
from kernel_pytorch.harness.plots import SUFFIXES
from kernel_pytorch.harness.profiling.records import TOO_FAST, PeakMemory
from kernel_pytorch.harness.records import Part
from kernel_pytorch.harness.report import seconds, size, speedup
from kernel_pytorch.harness.tables import PrintableTable, table


class Benchmark(Part):
    """The time of one function.

    Attributes:
        name: of the function.
        device: in words.
        inputs: dtype and shape of each tensor argument.
        direction: always a call without gradients; a backward that is timed is written into the function.
        seconds: per call; device time on a GPU, wall time on a CPU.
        samples: seconds per call, one per round.
        calls_per_sample: how many calls each sample is the mean of.
        method: how it was timed.
        pool_bytes: bytes of all input sets together; decides which memory is the limit.
        bytes: of arguments, a module's own tensors and results, each once.
        bytes_per_second: `bytes` over the median.
        share_of_copy: of the copy rate measured for the memory that `pool_bytes` fit in; None if `problem`.
        problem: why the rate cannot be true, empty if it can.
        notes: restrictions of the measurement.
    """

    name: str
    device: str
    inputs: tuple[str, ...]
    direction: Literal["forward"] = "forward"
    seconds: Interval
    samples: tuple[float, ...]
    calls_per_sample: int
    method: str
    pool_bytes: int
    bytes: int
    bytes_per_second: float
    share_of_copy: float | None
    problem: str = ""
    notes: tuple[str, ...] = ()

    def table(self) -> PrintableTable:
        """One row; both `print` and rich show it."""
        columns = ("median", "99% interval", "bytes", "GB/s", "of copy")
        row = (*times(self.seconds), size(self.bytes), *_rates(self.bytes_per_second, self.share_of_copy))
        return table(title(self), columns, [row], *self.notes, self.problem)


class Contender(Part):
    """One implementation of a comparison.

    Attributes:
        name: as it was given.
        status: "measured"; "wrong" (differs from the reference, raises, or writes into its inputs); "unavailable"
            (cannot run or be timed here). All but the first carry a reason.
        reason: why its time says nothing.
        seconds: per call; also there for one that turned out wrong after it was timed, to be struck out.
        samples: seconds per call; samples of the same index belong to the same round.
        method: how it was timed.
        comparison: speedup over the reference, from the paired ratios; None for another method.
        relative_error: ||output - truth|| / ||truth||, worst output.
        error_over_budget: the worst element's error divided by what it is allowed.
        share_of_copy: of the copy rate of the memory that the inputs fit in; None if the rate cannot be true.
    """

    name: str
    status: Literal["measured", "wrong", "unavailable"]
    reason: str = ""
    seconds: Interval | None = None
    samples: tuple[float, ...] = ()
    method: str = ""
    comparison: clock.Comparison | None = None
    relative_error: float | None = None
    error_over_budget: float | None = None
    share_of_copy: float | None = None


class Comparison(Part):
    """Implementations of one function, checked against the reference and timed in turns.

    Attributes:
        title: of the table.
        device: in words.
        inputs: dtype and shape of each tensor argument.
        direction: always calls without gradients.
        reference: name of the implementation that the others are checked against.
        tolerance: how far they may be from it, in words.
        bytes: that each must move: arguments and results, or what the operation declares.
        pool_bytes: bytes of all input sets together.
        contenders: in the order that they were given in.
        notes: restrictions of the measurement.
    """

    title: str
    device: str
    inputs: tuple[str, ...]
    direction: Literal["forward"] = "forward"
    reference: str
    tolerance: str
    bytes: int
    pool_bytes: int
    contenders: tuple[Contender, ...]
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Contender:
        """The implementation of that name. Raises KeyError naming those that there are."""
        for contender in self.contenders:
            if contender.name == name:
                return contender
        raise KeyError(f"no implementation {name!r}; there are {', '.join(c.name for c in self.contenders)}")

    def table(self) -> PrintableTable:
        """One row per implementation; both `print` and rich show it. The time of a wrong one is struck out."""
        lines = [f"{c.name} {c.status}: {c.reason}" for c in self.contenders if c.reason]
        columns = (
            "implementation",
            "median",
            "99% interval",
            "GB/s",
            "of copy",
            f"vs {escape(self.reference)}",
            "error",
        )
        rows = [[escape(c.name), *self._figures(c)] for c in self.contenders]
        lines.append(f"Allowed: {self.tolerance}.")
        return table(title(self), ("implementation", *columns), rows, *lines, *self.notes, text=1)

    def plot(self, path: Path | str) -> Path:
        """Draw the times with their intervals, PNG or SVG by the name of the file; wrong ones are hatched.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
            ValueError: another suffix.
        """
        with axis_of(Path(path), (7, 1.1 + 0.4 * len(self.contenders))) as axis:
            for row, c in enumerate(self.contenders):
                label, end = f"{c.status}: not timed", 0.0
                if c.seconds is not None:
                    low, median, end = (1e3 * value for value in (c.seconds.low, c.seconds.median, c.seconds.high))
                    wrong = c.status == "wrong"
                    label = "wrong" if wrong else seconds(c.seconds.median)
                    fill = {"color": "none", "edgecolor": "0.6", "hatch": "///"} if wrong else {"color": "C0"}
                    axis.barh(row, median, xerr=[[median - low], [end - median]], error_kw={"elinewidth": 1}, **fill)
                axis.annotate(label, (end, row), xytext=(4, 0), textcoords="offset points", va="center")
            names = [c.name + (" (reference)" if c.name == self.reference else "") for c in self.contenders]
            axis.set_yticks(range(len(names)), names, parse_math=False)
            axis.invert_yaxis()
            axis.margins(x=0.18)
            axis.set_xlim(left=0)
            axis.set_xlabel(f"ms per call, median and 99% interval, on {self.device}", parse_math=False)
            axis.set_title(self.title, loc="left", parse_math=False)
        return Path(path)

    def _figures(self, c: Contender) -> list[str]:
        if c.seconds is None:
            return [f"[red]{c.status}[/red]" if c.status == "wrong" else c.status]
        median, interval = times(c.seconds)
        if c.status == "wrong":
            # Terminals and files differ in what they can strike out; a word is understood everywhere.
            return [f"[strike]{median}[/strike] [red]wrong[/red]", f"[strike]{interval}[/strike]"]
        ratio = "is it" if c.name == self.reference else speedup(c.comparison) or "timed differently"
        error = "" if c.relative_error is None else f"{c.relative_error:.1e}"
        return [median, interval, *_rates(self.bytes / c.seconds.median, c.share_of_copy), ratio, error]


class MemoryProfile(Part):
    """Memory that one call needs beside its arguments, in bytes.

    Attributes:
        name: of the function.
        device: in words.
        inputs: dtype and shape of each tensor argument.
        forward_peak: most that was allocated at any time in a forward without gradients, results included.
        training_peak: the same over a forward and its backward, gradients included; None where nothing is
            differentiable.
        saved_for_backward: kept by the graph between the two, without arguments and results.
        memory: the peak of the forward and its backward, or of the forward alone, arguments included.
    """

    name: str
    device: str
    inputs: tuple[str, ...]
    forward_peak: int
    training_peak: int | None
    saved_for_backward: int | None
    memory: PeakMemory

    def table(self) -> PrintableTable:
        """One row; both `print` and rich show it."""
        figures = (self.forward_peak, self.training_peak, self.saved_for_backward)
        row = ["nothing to train" if value is None else size(value) for value in figures]
        return table(title(self), ("peak, forward", "peak, training", "saved for backward"), [row])

    def plot(self, path: Path | str) -> Path:
        """Draw nothing: the timeline was cut. The path comes back, with a DeprecationWarning."""
        warnings.warn(
            "profile_memory(...).plot() draws no timeline any more: profile_module(..., trace=...) writes the "
            "allocations for https://ui.perfetto.dev, torch.cuda.memory._dump_snapshot for memory_viz",
            DeprecationWarning,
            stacklevel=2,
        )
        return Path(path)


def title(record: Benchmark | Comparison | MemoryProfile) -> str:
    """The title of a record's table."""
    name = record.title if isinstance(record, Comparison) else record.name
    return f"{name} on {record.device}, {', '.join(record.inputs)}"


def times(interval: Interval) -> tuple[str, str]:
    """The median and the interval, for tables."""
    return seconds(interval.median), f"{seconds(interval.low)} to {seconds(interval.high)}"


def _rates(bytes_per_second: float, share: float | None) -> tuple[str, str]:
    return f"{bytes_per_second / 1e9:,.1f}", TOO_FAST if share is None else f"{share:.0%}"


@contextlib.contextmanager
def axis_of(path: Path, size: tuple[float, float]) -> Iterator[Any]:
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
