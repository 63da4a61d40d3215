"""The record of a benchmark: one JSON file per technique and device, versioned, written whole or not at all."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from kernel_pytorch.harness.clock import Comparison, Interval
from kernel_pytorch.harness.environment import Environment
from kernel_pytorch.harness.machine import Machine
from kernel_pytorch.harness.noise import Trace
from kernel_pytorch.harness.records import Amount, Count, Identity, Name, Part, Record, check_once
from kernel_pytorch.harness.technique import Case

SCHEMA_VERSION: Literal[1] = 1
VERIFICATION_SUFFIX = ".verification.json"

Status = Literal["measured", "unavailable", "wrong", "rejected", "crashed"]


class CaseRecord(Part):
    """A case, with sizes as JSON can hold them."""

    name: Name
    dtype: Name
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


class Conditions(Part):
    """What the machine did while the implementations of one case were timed in turns; None where that is unknown.

    Attributes:
        clock_hz: of the multiprocessors; on a CPU the mean of the cores that the process may use.
        power_watts: of the card.
        load: processes that want a core, per core.
        throttled: why the clock was held down, if it was.
    """

    clock_hz: Interval | None = None
    power_watts: Interval | None = None
    load: Interval | None = None
    throttled: tuple[str, ...] = ()

    @classmethod
    def of(cls, trace: Trace) -> Conditions:
        """From the watcher's readings."""
        ranges = {name: trace.range_of(name) for name in ("clock_hz", "power_watts", "load")}
        records = {name: Interval(low=r[0], median=r[1], high=r[2]) for name, r in ranges.items() if r}
        return cls(**records, throttled=trace.throttle_reasons())


class BenchmarkRun(Part):
    """One run of the benchmark: a resumed file holds the results of several."""

    created: str
    commit: str | None
    dirty: bool | None
    torch: str
    triton: str | None


class Measurement(Part):
    """One implementation on one case in one direction.

    Attributes:
        run: which of the file's runs produced it.
        status: "measured"; "unavailable" (cannot run or be timed here); "wrong" (failed the oracle, so its
            speed is meaningless); "rejected" (faster than this machine can be); "crashed" (ended its process, or did
            not end). All but the first carry a reason.
        seconds: device time per call on a GPU, wall time on a CPU.
        samples: seconds per call, one per round; rounds are paired among the implementations of a case.
        bytes: compulsory traffic, from which bytes_per_second was computed.
        share_of_copy: the speed over that of a copy of as many bytes, in the same rounds; in files that are older than
            `same_size`, of the copy bandwidth of the memory that `pool_bytes` fit in.
        share_of_matmul: over that of the same matrix products by PyTorch, in the same rounds; where the cost names
            none, and in older files, of the fastest matrix product of the machine.
        same_size: whether shares are of the same rounds.
        comparisons: by baseline, every PyTorch level and other library timed in the same rounds by the same method.
        relative_error: ||output - truth|| / ||truth||, worst output; the truth is the reference in float64.
        error_over_budget: the worst element's error divided by what it is allowed.
        marked: indices of the samples that were taken while the clock moved.
        conditions: of the machine meanwhile, the same for all implementations of a case.
    """

    former = frozenset({"burst", "sustained"})

    operation: Name
    case: CaseRecord
    direction: Literal["forward", "backward", "both"]
    implementation: Name
    level: Name
    status: Status
    reason: str = ""
    seconds: Interval | None = None
    samples: tuple[Amount, ...] = ()
    calls_per_sample: Count = 0
    method: str = ""
    pool_bytes: Count = 0
    bytes: Count = 0
    flops: Count = 0
    bytes_per_second: Amount | None = None
    share_of_copy: Amount | None = None
    share_of_matmul: Amount | None = None
    same_size: bool = False
    comparisons: dict[Name, Comparison] = Field(default_factory=dict)
    relative_error: Amount | None = None
    error_over_budget: Amount | None = None
    marked: tuple[Count, ...] = ()
    conditions: Conditions | None = None
    run: Count = 0

    @property
    def time(self) -> Interval | None:
        """`seconds`, unless the measurement does not count."""
        return self.seconds if self.status == "measured" else None

    @property
    def over_budget(self) -> bool:
        """Whether its error is larger than allowed: PyTorch's own levels are timed all the same."""
        return self.error_over_budget is not None and self.error_over_budget > 1.0

    @property
    def label(self) -> str:
        """What it is of, for tables and messages."""
        return f"{self.operation} {self.implementation}, {self.direction}, {self.case.label}"


class WholeCost(Part):
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
        run: which of the file's runs produced it.
    """

    operation: Name
    implementation: Name
    case: CaseRecord
    eager: Amount | None = None
    compiled: Amount | None = None
    graph: Amount | None = None
    forward_peak: Count | None = None
    training_peak: Count | None = None
    saved_for_backward: Count | None = None
    cold_start: float | None = None
    warm_start: float | None = None
    launches: Count | None = None
    missing: dict[str, str] = Field(default_factory=dict)
    run: Count = 0


class Results(Record):
    """Everything that one benchmark run found out about one technique.

    Attributes:
        quick: fewer cases and rounds than the declaration asks for.
        complete: false if the run was interrupted.
        identities: what identifies each implementation, by `operation/implementation`; empty in files that are older.
        runs: that measured it; empty in files that are older than this field.
    """

    kind = f"a results file of schema version {SCHEMA_VERSION}"
    former = frozenset({"sources", "kernels", "carried", "accuracy", "real_input"})

    schema_version: Literal[1] = SCHEMA_VERSION
    technique: Name
    created: str
    quick: bool
    complete: bool = True
    machine: Machine
    identities: dict[Name, Identity] = Field(default_factory=dict)
    runs: tuple[BenchmarkRun, ...] = ()
    measurements: tuple[Measurement, ...]
    costs: tuple[WholeCost, ...] = ()

    @model_validator(mode="after")
    def _check_rows(self) -> Results:
        check_once((m.operation, m.case.label, m.direction, m.implementation) for m in self.measurements)
        check_once((c.operation, c.case.label, c.implementation) for c in self.costs)
        return self


class LevelVerification(Part):
    """What the verification of one level came to.

    Attributes:
        ran: trials that it ran.
        right: how many of them were within the budget in every quantity.
        worst: the largest error over its budget; None where nothing ran or something was not finite.
        failures: one line for each thing that was wrong.
        not_run: trials that could not run.
        unavailable: why they could not, each reason once.
    """

    operation: Name
    implementation: Name
    ran: int
    right: int
    worst: float | None
    failures: tuple[str, ...]
    not_run: int
    unavailable: tuple[str, ...]


class VerificationReport(Record):
    """Everything that one verification found out about one technique on one device."""

    kind = f"a verification of schema version {SCHEMA_VERSION}"
    former = frozenset({"sources"})

    schema_version: Literal[1] = SCHEMA_VERSION
    technique: Name
    created: str
    environment: Environment
    identities: dict[Name, Identity] = Field(default_factory=dict)
    levels: tuple[LevelVerification, ...]
    spared: tuple[str, ...] = ()


load = Results.load


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    return value if isinstance(value, (bool, int, float, str, type(None))) else str(value).removeprefix("torch.")
