"""The record of a benchmark: one JSON file per technique and device, versioned, written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from kernel_pytorch.harness.clock import Comparison, Interval
from kernel_pytorch.harness.environment import Environment
from kernel_pytorch.harness.machine import Machine
from kernel_pytorch.harness.noise import Trace
from kernel_pytorch.harness.technique import Case

SCHEMA_VERSION: Literal[1] = 1
VERIFICATION_SUFFIX = ".verification.json"

Status = Literal["measured", "unavailable", "wrong", "rejected", "crashed"]


class ResultsError(ValueError):
    """A results file that cannot be read; the message says which and why."""


FORMER = {"accuracy", "burst", "real_input", "sustained"}
"""Fields of older files that are no longer measured; reading a file drops them."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_former_fields(cls, data: Any) -> Any:
        return {k: v for k, v in data.items() if k not in FORMER} if isinstance(data, dict) else data


class IntervalRecord(_Record):
    """A median and its bootstrap interval."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, interval: Interval) -> IntervalRecord:
        """From the clock's own type."""
        return cls(median=interval.median, low=interval.low, high=interval.high)


class ComparisonRecord(_Record):
    """How many times faster than a baseline, from the paired ratios of the same rounds."""

    speedup: IntervalRecord
    verdict: Literal["FASTER", "SLOWER", "SAME", "UNSURE"]

    @classmethod
    def of(cls, comparison: Comparison) -> ComparisonRecord:
        """From the clock's own type."""
        return cls.model_validate(
            {"speedup": IntervalRecord.of(comparison.speedup), "verdict": comparison.verdict.name}
        )


class CaseRecord(_Record):
    """A case, with sizes as JSON can hold them."""

    name: str
    dtype: str
    sizes: dict[str, Any]

    @classmethod
    def of(cls, case: Case) -> CaseRecord:
        """From the declaration's own type."""
        return cls(name=case.name, dtype=case.dtype_name, sizes={k: _plain(v) for k, v in case.sizes.items()})

    @property
    def label(self) -> str:
        """Name, sizes and dtype for tables; it tells the cases of an operation apart."""
        shape = "x".join(map(str, self.sizes.get("shape", ())))
        sizes = [f"{name}={value}" for name, value in self.sizes.items() if name != "shape"]
        return " ".join(filter(None, [self.name, shape, *sizes, self.dtype]))


class RangeRecord(_Record):
    """Smallest, median and largest of some readings."""

    low: float
    median: float
    high: float


class Conditions(_Record):
    """What the machine did while the implementations of one case were timed in turns; None: it does not tell.

    Attributes:
        clock_hz: of the multiprocessors; on a CPU the mean of the cores that the process may use.
        power_watts: of the card.
        load: processes that want a core, per core.
        throttled: why the clock was held down, if it was.
    """

    clock_hz: RangeRecord | None = None
    power_watts: RangeRecord | None = None
    load: RangeRecord | None = None
    throttled: tuple[str, ...] = ()

    @classmethod
    def of(cls, trace: Trace) -> Conditions:
        """From the watcher's readings."""
        ranges = {name: trace.range_of(name) for name in ("clock_hz", "power_watts", "load")}
        records = {
            name: RangeRecord(low=found[0], median=found[1], high=found[2]) for name, found in ranges.items() if found
        }
        return cls(**records, throttled=trace.throttle_reasons())


class Run(_Record):
    """One run of the benchmark: a resumed file holds what several found out."""

    created: str
    commit: str | None
    dirty: bool | None
    torch: str
    triton: str | None


class Carried(_Record):
    """Why device times stand for kernels whose sources have changed since.

    Attributes:
        kernels: the digest of the sources that were measured.
        commit: whose record of compiled kernels is that of these sources.
        compared: what was found to be the same.
    """

    kernels: str
    commit: str
    compared: str


class Measurement(_Record):
    """One implementation on one case in one direction.

    Attributes:
        run: which of the file's runs found it out.
        status: "measured"; "unavailable" (cannot run or be timed here); "wrong" (failed the oracle, so nobody cares
            how fast it is); "rejected" (faster than this machine can be); "crashed" (ended its process, or did not
            end). All but the first carry a reason.
        seconds: device time per call on a GPU, wall time on a CPU.
        samples: seconds per call, one per round; rounds are paired among the implementations of a case.
        bytes: compulsory traffic that bytes_per_second was divided from.
        share_of_copy: the speed over that of a copy of as many bytes, in the same rounds; in files that are older than
            `same_size`, of the copy bandwidth of the memory that `pool_bytes` fit in.
        share_of_matmul: over that of the same matrix products by PyTorch, in the same rounds; where the cost names
            none, and in older files, of the fastest matrix product of the machine.
        same_size: whether shares are of the same rounds.
        comparisons: by baseline, every PyTorch level that was measured in the same rounds.
        relative_error: ||output - truth|| / ||truth||, worst output; the truth is the reference in float64.
        error_over_budget: the worst element's error divided by what it is allowed.
        marked: indices of the samples that were taken while the clock moved.
        conditions: of the machine meanwhile, the same for all implementations of a case.
    """

    operation: str
    case: CaseRecord
    direction: Literal["forward", "backward", "both"]
    implementation: str
    level: str
    status: Status
    reason: str = ""
    seconds: IntervalRecord | None = None
    samples: tuple[float, ...] = ()
    calls_per_sample: int = 0
    method: str = ""
    pool_bytes: int = 0
    bytes: int = 0
    flops: int = 0
    bytes_per_second: float | None = None
    share_of_copy: float | None = None
    share_of_matmul: float | None = None
    same_size: bool = False
    comparisons: dict[str, ComparisonRecord] = {}
    relative_error: float | None = None
    error_over_budget: float | None = None
    marked: tuple[int, ...] = ()
    conditions: Conditions | None = None
    run: int = 0


class WholeCost(_Record):
    """What one implementation costs beside device time, on one case. None: not measured here; `missing` says why.

    Attributes:
        eager: seconds of host time per call from Python; on a CPU those of the whole call.
        compiled: the same from a function under `torch.compile(fullgraph=True)`.
        graph: the same for the replay of a CUDA graph.
        forward_peak: bytes allocated at most in a forward without gradients, output included, arguments not.
        training_peak: the same over a forward and its backward.
        saved_for_backward: bytes that the graph keeps between the two, arguments and outputs not counted.
        cold_start: seconds that the first forward and backward take longer than the second, caches on disk empty.
        warm_start: the same in the next process.
        launches: kernels that one forward launches.
        missing: by the name of a figure, why it is not there.
        run: which of the file's runs found it out.
    """

    operation: str
    implementation: str
    case: CaseRecord
    eager: float | None = None
    compiled: float | None = None
    graph: float | None = None
    forward_peak: int | None = None
    training_peak: int | None = None
    saved_for_backward: int | None = None
    cold_start: float | None = None
    warm_start: float | None = None
    launches: int | None = None
    missing: dict[str, str] = {}
    run: int = 0


class Results(_Record):
    """Everything that one benchmark run found out about one technique.

    Attributes:
        quick: fewer cases and rounds than the declaration asks for.
        complete: false if the run was interrupted.
        sources: SHA-256 of the files that each implementation consists of, by `operation/implementation`.
        kernels: SHA-256 of those that run on the device, by the same; empty in files that are older than it.
        carried: by the same, why device times stand for kernels whose sources have changed.
        runs: that found this out; empty in files that are older than it.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    technique: str
    created: str
    quick: bool
    complete: bool = True
    machine: Machine
    sources: dict[str, str]
    kernels: dict[str, str] = {}
    carried: dict[str, Carried] = {}
    runs: tuple[Run, ...] = ()
    measurements: tuple[Measurement, ...]
    costs: tuple[WholeCost, ...] = ()

    def save(self, path: Path) -> None:
        """Write the file in one step: a crash half-way leaves the previous file whole."""
        write_atomically(path, self.model_dump_json(indent=1) + "\n")


class LevelVerification(_Record):
    """What the verification of one level came to.

    Attributes:
        ran: trials that it ran.
        right: how many of them were within the budget in every quantity.
        worst: the largest error over its budget; None where nothing ran or something was not finite.
        failures: one line for each thing that was wrong.
        not_run: trials that could not run.
        unavailable: why they could not, each reason once.
    """

    operation: str
    implementation: str
    ran: int
    right: int
    worst: float | None
    failures: tuple[str, ...]
    not_run: int
    unavailable: tuple[str, ...]


class VerificationReport(_Record):
    """Everything that one verification found out about one technique on one device."""

    schema_version: Literal[1] = SCHEMA_VERSION
    technique: str
    created: str
    environment: Environment
    sources: dict[str, str]
    levels: tuple[LevelVerification, ...]
    spared: tuple[str, ...] = ()

    def save(self, path: Path) -> None:
        """Write the file in one step."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, self.model_dump_json(indent=1) + "\n")


def load(path: Path) -> Results:
    """Read a results file.

    Raises:
        ResultsError: it cannot be read, is no results file, or has another schema version.
    """
    try:
        return Results.model_validate_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ResultsError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ResultsError(f"{path}: not a results file, not even text ({error.reason})") from error
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "file"
        raise ResultsError(
            f"{path}: not a results file of schema version {SCHEMA_VERSION} ({where}: {first['msg']})"
        ) from error


def write_atomically(path: Path, text: str) -> None:
    """Write beside the target, then rename over it; folders that are missing are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException as error:
        os.unlink(temporary)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value).removeprefix("torch.")
