"""The record of a profile: what `profile.json` holds."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Literal

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from kernel_pytorch.harness.clock import Interval
from kernel_pytorch.harness.machine import Machine
from kernel_pytorch.harness.records import Part, Record
from kernel_pytorch.harness.report import seconds, size
from kernel_pytorch.harness.tables import PrintableGroup

Bound = Literal["memory", "compute", "overhead"]


class KernelUse(Part):
    """A kernel that an operator launched.

    Attributes:
        name: as the GPU's profiler prints it.
        calls: over all steps.
        seconds: over all steps.
    """

    name: str
    calls: int
    seconds: float


class Attainment(Part):
    """How near an operator comes to what the machine can do.

    Attributes:
        bytes_per_second: compulsory bytes over the median time of a call; None where the bytes are not known.
        share_of_copy: of the copy rate of the memory that the operator's own bytes fit in; see `roofline.attain`.
        flops_per_second: None where the FLOPs are not counted.
        share_of_matmul: of the matmul rate in that dtype; None where FLOPs are not counted or that was not measured.
        bound: what must take longest on this machine: moving the bytes, doing the arithmetic, or launching it. None
            where the bytes are not known.
        above: the rates that are above their limit, "memory" or "compute"; their shares mean nothing.
        problem: what that may come from; empty if none is.
    """

    bytes_per_second: float | None = None
    share_of_copy: float | None = None
    flops_per_second: float | None = None
    share_of_matmul: float | None = None
    bound: Bound | None = None
    above: tuple[Literal["memory", "compute"], ...] = ()
    problem: str = ""


class OperatorUse(Part):
    """All calls of one operator with one set of shapes.

    Attributes:
        name: of the operator, with its overload.
        kind: see `events.Call`.
        inputs: dtype and shape of each tensor that it was given.
        calls: over all steps.
        seconds: over all steps; of its kernels on a GPU, else of the call without what other rows count.
        seconds_per_call: median.
        share: of the time of all rows.
        bytes: compulsory traffic of one call, None where it is not known.
        bytes_note: why not, or what is left out.
        flops: of one call, None where they are not counted.
        flops_note: why not.
        attained: rates, against the machine's limits.
        kernels: its launches, the longest first. Several share one rate: the bytes of each are not recorded.
    """

    name: str
    kind: Literal["operator", "function", "kernel", "host"]
    inputs: tuple[str, ...]
    calls: int
    seconds: float
    seconds_per_call: float
    share: float
    bytes: int | None = None
    bytes_note: str = ""
    flops: int | None = None
    flops_note: str = ""
    attained: Attainment = Attainment()
    kernels: tuple[KernelUse, ...] = ()


class PeakMemory(Part):
    """The most memory that a step holds.

    Attributes:
        peak: bytes.
        at_peak: bytes by category at that time ("parameters", "activations", ...), or "allocated" alone; categories
            without any are left out.
        note: why it is not split by category; empty if it is.
    """

    peak: int
    at_peak: dict[str, int]
    note: str = ""


class Profile(Record):
    """Where the time and the memory of a module go.

    Attributes:
        module: name of its class.
        inputs: dtype and shape of each tensor among its inputs.
        direction: "forward" without gradients, or "both": forward and backward.
        compiled: whether it ran under torch.compile.
        created: UTC, ISO 8601.
        machine: what it ran on, and the measured limits that shares are of.
        steps: how many were profiled.
        step: seconds of one step without the profiler, wall clock; steps repeat until a sample takes 20 ms, and each
            sample waits for the GPU.
        profiled_seconds: wall clock over all profiled steps. The profiler slows the host down.
        busy_seconds: how long the GPU had work during these; None on a CPU.
        operators: one row per operator and shapes, the longest first. Their times add up to at most
            `profiled_seconds` (on a GPU: unless kernels overlap).
        memory: the peak over one step.
        device_peak: the most that PyTorch had allocated on the GPU during that step, from its allocator; None on a
            CPU.
    """

    module: str
    inputs: tuple[str, ...]
    direction: Literal["forward", "both"]
    compiled: bool
    created: str
    machine: Machine
    steps: int
    step: Interval
    profiled_seconds: float
    busy_seconds: float | None
    operators: tuple[OperatorUse, ...]
    memory: PeakMemory
    device_peak: int | None

    def table(self, top: int = 20) -> PrintableGroup:
        """The rows that took longest, within 80 columns; both `print` and rich show it.

        Name and inputs, below them the figures and a GPU's kernels.
        """
        how = "forward and backward" if self.direction == "both" else "forward"
        how += ", torch.compile" if self.compiled else ""
        title = f"{self.module}, {how}, on {self.machine.environment.device_name}"
        found: list[RenderableType] = [Text(title, style="italic")]
        for number, row in enumerate(self.operators[:top]):
            name = row.name if row.kind == "operator" else f"{row.name} ({row.kind})"
            # Equal labels that follow each other appear once.
            runs = [(label, len(list(group))) for label, group in itertools.groupby(row.inputs)]
            inputs = ", ".join(label if times == 1 else f"{times} of {label}" for label, times in runs)
            line = Table(box=None, padding=(0, 1, 0, 0), show_header=number == 0, header_style="dim")
            for column, width in WIDTHS.items():
                line.add_column(column, justify="left" if column == "bound" else "right", width=width, overflow="fold")
            line.add_row(*cells(row, self.steps))
            found += [Text.assemble((name, "bold"), "  ", (inputs, "dim")), line]
            for kernel in row.kernels if row.kind != "kernel" else ():
                about = f"  {kernel.calls / self.steps:.3g} x {seconds(kernel.seconds / kernel.calls)}  {kernel.name}"
                found.append(Text(about, style="dim", no_wrap=True, overflow="ellipsis"))
        return PrintableGroup(*found, Text(LEGEND, style="dim italic"))

    def write(self, folder: Path | str, top: int | None = None) -> list[Path]:
        """Write `profile.json` into a folder and return its path; `top` has no effect, with a DeprecationWarning."""
        if top is not None:
            replaced = "page.html is no longer written; print table(top), open the trace at https://ui.perfetto.dev"
            warnings.warn(f"Profile.write(top=...): {replaced}", DeprecationWarning, stacklevel=2)
        file = Path(folder) / "profile.json"
        self.save(file)
        return [file]


WIDTHS = {"calls": 5, "time": 7, "share": 6, "bytes": 10, "bytes/s, of copy": 15, "FLOPs": 6,
          "FLOP/s, of matmul": 15, "bound": 8}  # fmt: skip
NOT_KNOWN = "not known"
TOO_FAST = "above the limit"
LEGEND = (
    "calls: per step; time: median of a call; share: of the time of all rows; of copy, of matmul: of what this machine "
    "reached in a plain copy and a plain matrix product; bound: what must take longest here"
)


def cells(row: OperatorUse, steps: int) -> list[str]:
    """The figures of a row, by `WIDTHS`."""
    placed, least = row.attained, "≥ " if row.bytes_note.startswith("at least") else ""
    moves = "" if row.kind == "host" else NOT_KNOWN if row.bytes is None else least + size(row.bytes)
    copy = _rate(placed.bytes_per_second, placed.share_of_copy, 1e9, "GB/s")
    matmul = _rate(placed.flops_per_second, placed.share_of_matmul, 1e12, "TFLOP/s")
    return [
        f"{row.calls / steps:.3g}",
        seconds(row.seconds_per_call),
        f"{row.share:.1%}",
        moves,
        TOO_FAST if "memory" in placed.above else copy and least + copy,
        "" if row.flops is None else _count(row.flops),
        TOO_FAST if "compute" in placed.above else matmul,
        placed.bound or "",
    ]


def summary(profile: Profile) -> list[str]:
    """What the rows do not say, one sentence each."""
    s, memory = profile.step, profile.memory
    rows = seconds(sum(row.seconds for row in profile.operators))
    lines = [
        f"A step takes {seconds(s.median)} (median, 99% interval {seconds(s.low)} to {seconds(s.high)}) "
        "without the profiler.",
        f"Under it, {profile.steps} steps took {seconds(profile.profiled_seconds)}; all rows together are {rows}.",
    ]
    if profile.busy_seconds is not None:
        busy = profile.busy_seconds / profile.steps
        idle = 1.0 - busy / s.median
        waits = f": {idle:.0%} of the step it waits for the host." if idle > 0.1 else "."
        lines.append(f"The GPU had work for {seconds(busy)} a step{waits}")
    at_peak = ", ".join(f"{name} {size(count)}" for name, count in memory.at_peak.items())
    lines.append(f"Memory of a step, at most: {size(memory.peak)} ({at_peak or 'nothing'}).")
    if profile.device_peak is not None:
        lines.append(f"PyTorch had {size(profile.device_peak)} allocated on the GPU then, all tensors counted.")
    return [*lines, f"Memory is {memory.note}."] if memory.note else lines


def remarks(profile: Profile, top: int) -> list[str]:
    """Why cells of the first rows have no figure, or one that means less, each reason once."""
    found: dict[str, dict[str, None]] = {}
    for row in profile.operators[:top]:
        said = {
            f"bytes {row.bytes_note}": row.bytes_note and row.kind != "host" and row.bytes != 0,
            f"FLOPs {row.flops_note}": row.flops is not None and row.flops_note,
            row.attained.problem.partition(" (")[0]: row.attained.problem,
            "no matmul rate was measured in this dtype": row.flops and row.attained.share_of_matmul is None,
            "several kinds of kernels, placed together": len(row.kernels) > 1,
        }
        for reason in (reason for reason, holds in said.items() if holds):
            found.setdefault(reason, {})[row.name] = None
    return [f"{', '.join(names)}: {reason}" for reason, names in found.items()]


def _count(value: float) -> str:
    """A number with three significant digits and a decimal prefix."""
    for prefix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}"
    return f"{value:.3g}"


def _rate(value: float | None, share: float | None, factor: float, unit: str) -> str:
    if not value:
        return ""
    figure = f"{value / factor:,.0f}" if value >= 100 * factor else f"{value / factor:.3g}"
    return f"{figure} {unit}" + ("" if share is None else f", {share:.0%}")
