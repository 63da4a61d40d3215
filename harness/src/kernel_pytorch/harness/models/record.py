"""The record of models: one JSON file per device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import Field, field_validator, model_validator

from kernel_pytorch.harness.clock import Interval
from kernel_pytorch.harness.environment import Environment
from kernel_pytorch.harness.records import Amount, Count, Name, Part, check_once
from kernel_pytorch.harness.records import Record as File

FILE = "models.json"


class Kernel(Part):
    """The launches of one kernel in a step.

    Attributes:
        name: of the kernel.
        seconds: of all its launches.
        count: of launches.
    """

    name: str
    seconds: Amount
    count: Count


class Cost(Part):
    """The cost of a step of a variant.

    Attributes:
        wall: seconds, median of the rounds.
        wall_low: lower end of its 99 % interval.
        wall_high: upper end.
        host: seconds until the step returned, without waiting for the device.
        device: seconds of all kernels; None on a CPU.
        launches: kernels, copies and fills; 0 on a CPU.
        peak_bytes: memory above what the step finds; None on a CPU.
        first_call: seconds of the first step, which compiles.
        kernels: those that take longest.
        losses: of the first steps of training after the first.
        difference: largest difference of the first result, loss or logits, from the baseline's, over its largest.
        gradients: the same of the norms of the gradients of all parameters; None where nothing is trained, and where a
            run did not compare them yet.
        replaced: parts of the model that were patched.
        limit: seconds in which the device reads what a decoded word needs, at the rate of the same run; None for other
            works, and on a CPU.
    """

    wall: Amount
    wall_low: Amount
    wall_high: Amount
    host: Amount
    device: Amount | None
    launches: Count
    peak_bytes: Count | None
    first_call: Amount
    kernels: tuple[Kernel, ...]
    losses: tuple[float, ...]
    difference: Amount
    gradients: Amount | None = None
    replaced: Count
    limit: Amount | None = None


class Row(Part):
    """A variant of a model at one work.

    Attributes:
        model: its name.
        work: name of the work.
        variant: name of the variant.
        cost: what it costs; None where it did not run.
        ratio: time of stock over that of the variant, of the same rounds, without unit; None where it did not run.
        reason: why it did not run; None where it did.
        failed: whether it raised an error, and was not left out.
    """

    model: Name
    work: Name
    variant: Name
    cost: Cost | None = None
    ratio: Interval | None = None
    reason: str | None = None
    failed: bool = False


class Origin(Part):
    """When, where and of what something was measured.

    Attributes:
        date: of its end, ISO.
        environment: where.
        tiny: whether it was the model for a CPU.
        transformers: version.
        packages: the techniques that were patched in.
        identities: by technique that was patched in the `fingerprint` of its code; empty in files that are older.
    """

    date: str
    environment: Environment
    tiny: bool
    transformers: str
    packages: tuple[Name, ...]
    identities: dict[Name, str] = Field(default_factory=dict)

    @field_validator("packages", mode="before")
    @classmethod
    def _names(cls, packages: Any) -> tuple[str, ...]:
        return tuple(packages)  # older files have digests by name

    def matches(self, now: Origin) -> bool:
        """Whether it was measured of the same code, on the same device, with models of the same size."""
        mine, other = ((each.packages, each.identities, each.tiny, each.environment.slug) for each in (self, now))
        return mine == other


class Run(Origin):
    """One model at one work.

    Attributes:
        rows: what was measured.
    """

    rows: tuple[Row, ...]

    @model_validator(mode="after")
    def _check_rows(self) -> Run:
        check_once((row.model, row.work, row.variant) for row in self.rows)
        return self


class Curves(Part):
    """The losses of the first steps of training, without dropout, from the same weights on the same batch.

    Attributes:
        dtype: of the weights.
        stock: losses of the model as it comes.
        ours: with the techniques patched in.
        exact: of stock that computes in float32; none in float32, or in older records.
        difference: the largest of a step between ours and stock, over the loss.
        errors: the same difference of ours and of stock from `exact`.
        allowed: the largest that `held` may be.
        seeds: in older records, losses of stock with other rounding errors, which limited `difference` there.
    """

    dtype: str
    stock: tuple[float, ...]
    ours: tuple[float, ...]
    exact: tuple[float, ...] = ()
    difference: float
    errors: tuple[float, float] | None = None
    allowed: float
    seeds: tuple[tuple[float, ...], ...] = ()

    @property
    def held(self) -> float:
        """The distance that is limited: that of ours from float32, or from stock where everything is in float32."""
        return self.difference if self.errors is None or self.seeds else self.errors[0]


class LossRun(Origin, Curves):
    """The curves of one model, and where they were measured."""


class Record(File):
    """All models of a device, each work with the run that measured it.

    Attributes:
        runs: by `run_name`.
        losses: by the name of the model.
    """

    kind = "a record of models"

    runs: dict[Name, Run]
    losses: dict[Name, LossRun] = Field(default_factory=dict)

    def done(self, now: Origin, variants: Iterable[str]) -> set[str]:
        """Names of the runs that match `now` and hold all these variants, none of which failed."""
        return {
            name
            for name, run in self.runs.items()
            if run.matches(now) and {*variants} <= {row.variant for row in run.rows if not row.failed}
        }


load = Record.load


def run_name(model: str, work: str) -> str:
    """Under which a record holds a model at a work."""
    return f"{model}/{work}"
