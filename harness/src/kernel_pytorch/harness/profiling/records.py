"""The record of a profile: what `profile.json` holds."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kernel_pytorch.harness.machine import Machine
from kernel_pytorch.harness.records import Part, Record
from kernel_pytorch.harness.results import IntervalRecord

if TYPE_CHECKING:
    from kernel_pytorch.harness.profiling.tables import PrintableGroup

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
        step: seconds of one step without the profiler, wall clock, the GPU's work waited for.
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
    step: IntervalRecord
    profiled_seconds: float
    busy_seconds: float | None
    operators: tuple[OperatorUse, ...]
    memory: PeakMemory
    device_peak: int | None

    def to_json(self) -> str:
        """The whole record."""
        return self.model_dump_json(indent=1)

    def table(self, top: int = 20) -> PrintableGroup:
        """The rows that took longest; both `print` and rich show it."""
        from kernel_pytorch.harness.profiling.tables import table

        return table(self, top)

    def write(self, folder: Path | str, top: int | None = None) -> list[Path]:
        """Write `profile.json` into a folder and return its path.

        `top` belonged to the page, which is no longer written, and is ignored with a DeprecationWarning.
        """
        if top is not None:
            warnings.warn(
                "Profile.write(top=...) has no effect: page.html is no longer written; print `table(top)`, and open "
                "the trace at https://ui.perfetto.dev",
                DeprecationWarning,
                stacklevel=2,
            )
        file = Path(folder) / "profile.json"
        self.save(file)
        return [file]
