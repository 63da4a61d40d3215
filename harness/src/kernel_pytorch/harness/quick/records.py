"""Records of the quick functions, with their tables and pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from rich.markup import escape

from kernel_pytorch.harness import clock
from kernel_pytorch.harness.clock import Interval
from kernel_pytorch.harness.plots import SUFFIXES
from kernel_pytorch.harness.profiling.records import TOO_FAST
from kernel_pytorch.harness.records import Part
from kernel_pytorch.harness.report import seconds, size, speedup
from kernel_pytorch.harness.tables import PrintableTable, table


class Measured(Part):
    """What all records of one measurement say.

    Attributes:
        device: in words.
        inputs: dtype and shape of each tensor argument.
        notes: restrictions of the measurement.
    """

    device: str
    inputs: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def heading(self, title: str) -> str:
        """The title of a table."""
        return f"{title} on {self.device}, {', '.join(self.inputs)}"


class Benchmark(Measured):
    """The time of one function, called without gradients; a backward that is timed is written into the function.

    Attributes:
        name: of the function.
        seconds: per call; device time on a GPU, wall time on a CPU.
        samples: seconds per call, one per round.
        calls_per_sample: how many calls each sample is the mean of.
        method: how it was timed.
        pool_bytes: bytes of all input sets together; decides which memory is the limit.
        bytes: of arguments, a module's own tensors and results, each once.
        bytes_per_second: `bytes` over the median.
        share_of_copy: of the copy rate measured for the memory that `pool_bytes` fit in; None if `problem`.
        problem: why the rate cannot be true, empty if it can.
    """

    name: str
    seconds: Interval
    samples: tuple[float, ...]
    calls_per_sample: int
    method: str
    pool_bytes: int
    bytes: int
    bytes_per_second: float
    share_of_copy: float | None
    problem: str = ""

    def table(self) -> PrintableTable:
        """One row; both `print` and rich show it."""
        row = (*times(self.seconds), size(self.bytes), *_rates(self.bytes_per_second, self.share_of_copy))
        return table(self.heading(self.name), (*TIMES, "bytes", *RATES), [row], *self.notes, self.problem)


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


class Comparison(Measured):
    """Implementations of one function, checked against the reference and timed in turns, without gradients.

    Attributes:
        title: of the table.
        reference: name of the implementation that the others are checked against.
        tolerance: how far they may be from it, in words.
        bytes: that each must move: arguments and results, or what the operation declares.
        pool_bytes: bytes of all input sets together.
        contenders: in the order that they were given in.
    """

    title: str
    reference: str
    tolerance: str
    bytes: int
    pool_bytes: int
    contenders: tuple[Contender, ...]

    def __getitem__(self, name: str) -> Contender:
        """The implementation of that name. Raises KeyError naming those that there are."""
        for contender in self.contenders:
            if contender.name == name:
                return contender
        raise KeyError(f"no implementation {name!r}; there are {', '.join(c.name for c in self.contenders)}")

    def table(self) -> PrintableTable:
        """One row per implementation; both `print` and rich show it. The time of a wrong one is struck out."""
        rows = []
        for c in self.contenders:
            figures = [f"[red]{c.status}[/red]" if c.status == "wrong" else c.status]
            if c.seconds is not None and c.status == "wrong":
                # Terminals and files differ in what they can strike out; a word is understood everywhere.
                median, interval = times(c.seconds)
                figures = [f"[strike]{median}[/strike] [red]wrong[/red]", f"[strike]{interval}[/strike]"]
            elif c.seconds is not None:
                ratio = "is it" if c.name == self.reference else speedup(c.comparison) or "timed differently"
                rates = _rates(self.bytes / c.seconds.median, c.share_of_copy)
                figures = [*times(c.seconds), *rates, ratio, f"{c.relative_error or 0.0:.1e}"]
            rows.append([escape(c.name), *figures])
        columns = ("implementation", *TIMES, *RATES, f"vs {escape(self.reference)}", "error")
        reasons = [f"{c.name} {c.status}: {c.reason}" for c in self.contenders if c.reason]
        notes = (*reasons, f"Allowed: {self.tolerance}.", *self.notes)
        return table(self.heading(self.title), columns, rows, *notes, text=1)

    def plot(self, path: Path | str) -> Path:
        """Draw the times with their intervals, PNG or SVG by the name of the file; wrong ones are hatched.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
            ValueError: another suffix.
        """
        path = Path(path)
        if path.suffix not in SUFFIXES:
            raise ValueError(f"given {str(path)!r}; allowed are names that end in {' or '.join(SUFFIXES)}")
        import matplotlib
        from matplotlib.figure import Figure

        with matplotlib.rc_context({"svg.hashsalt": "kernel-pytorch", "font.size": 9}):
            figure = Figure(figsize=(7, 1.1 + 0.4 * len(self.contenders)), layout="constrained")
            axis = figure.subplots()
            names = []
            for row, c in enumerate(self.contenders):
                known = seconds(c.seconds.median) if c.status == "measured" and c.seconds else c.status
                names.append(f"{c.name}{' (reference)' * (c.name == self.reference)}: {known}")
                s, wrong = c.seconds or Interval(0.0, 0.0, 0.0), {"color": "none", "edgecolor": "0.6", "hatch": "///"}
                ends = [[1e3 * (s.median - s.low)], [1e3 * (s.high - s.median)]]
                axis.barh(row, 1e3 * s.median, xerr=ends, **({"color": "C0"} if c.status == "measured" else wrong))
            axis.set_yticks(range(len(names)), names, parse_math=False)
            axis.invert_yaxis()
            axis.set_xlabel(f"ms per call, median and 99% interval, on {self.device}", parse_math=False)
            axis.set_title(self.title, loc="left", parse_math=False)
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
        return path


TIMES, RATES = ("median", "99% interval"), ("GB/s", "of copy")
"""Columns of tables."""


def times(interval: Interval) -> tuple[str, str]:
    """The cells of `TIMES`."""
    return seconds(interval.median), f"{seconds(interval.low)} to {seconds(interval.high)}"


def _rates(bytes_per_second: float, share: float | None) -> tuple[str, str]:
    return f"{bytes_per_second / 1e9:,.1f}", TOO_FAST if share is None else f"{share:.0%}"
