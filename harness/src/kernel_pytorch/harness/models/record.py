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
    """The launches of one kernel in a step."""

    name: str
    seconds: Amount  # of all launches
    count: Count  # of launches


class Cost(Part):
    """The cost of a step of a variant; times in seconds."""

    wall: Amount  # median of the rounds
    wall_low: Amount  # lower end of its 99 % interval
    wall_high: Amount  # upper end
    host: Amount  # until the step returned, without waiting for the device
    device: Amount | None  # of all kernels; None on a CPU
    launches: Count  # kernels, copies and fills; 0 on a CPU
    peak_bytes: Count | None  # memory above what the step finds; None on a CPU
    first_call: Amount  # the first step, which compiles
    kernels: tuple[Kernel, ...]  # those that take longest
    losses: tuple[float, ...]  # of the first steps of training after the first
    difference: Amount  # of the first result, loss or logits, from the baseline's: the largest, over its largest
    gradients: Amount | None = None  # the same of the norms of all gradients; None where nothing was compared
    replaced: Count  # parts of the model that were patched
    limit: Amount | None = None  # in which the device reads what a decoded token needs, at the rate of the same run


class Row(Part):
    """A variant of a model at one work."""

    model: Name
    work: Name
    variant: Name
    cost: Cost | None = None  # None where it did not run
    ratio: Interval | None = None  # time of stock over that of the variant, of the same rounds
    reason: str | None = None  # why it did not run
    failed: bool = False  # whether it raised an error, and was not left out


class Origin(Part):
    """When, where and of what something was measured."""

    date: str  # of its end, ISO
    environment: Environment
    tiny: bool  # whether it was the model for tests
    transformers: str  # version
    packages: tuple[Name, ...]  # the techniques that were patched in
    identities: dict[Name, str] = Field(default_factory=dict)  # the `fingerprint` of each; empty in older files

    @field_validator("packages", mode="before")
    @classmethod
    def _names(cls, packages: Any) -> tuple[str, ...]:
        return tuple(packages)  # older files have digests by name

    def matches(self, now: Origin) -> bool:
        """Whether it was measured of the same code, on the same device, with models of the same size."""
        mine, other = ((each.packages, each.identities, each.tiny, each.environment.slug) for each in (self, now))
        return mine == other


class Run(Origin):
    """One model at one work."""

    rows: tuple[Row, ...]

    @model_validator(mode="after")
    def _check_rows(self) -> Run:
        check_once((row.model, row.work, row.variant) for row in self.rows)
        return self


class Curves(Part):
    """The losses of the first steps of training, without dropout, from the same weights on the same batch."""

    former = frozenset({"seeds"})

    dtype: str  # of the weights
    stock: tuple[float, ...]  # of the model as it comes
    ours: tuple[float, ...]  # with the techniques patched in
    exact: tuple[float, ...] = ()  # of stock that computes in float32; none in float32, or in older records
    difference: float  # the largest of a step between ours and stock, over the loss
    errors: tuple[float, float] | None = None  # the same of ours and of stock from `exact`
    allowed: float  # the largest that `held` may be

    @property
    def held(self) -> float:
        """The distance that is limited: that of ours from float32, or from stock where that was not computed."""
        return self.difference if self.errors is None else self.errors[0]


class LossRun(Origin, Curves):
    """The curves of one model, and where they were measured."""


class Record(File):
    """All models of a device, each work with the run that measured it."""

    kind = "a record of models"

    runs: dict[Name, Run]  # by `run_name`
    losses: dict[Name, LossRun] = Field(default_factory=dict)  # by the name of the model

    def done(self, now: Origin, variants: Iterable[str]) -> set[str]:
        """Names of what matches `now`: of losses, and of runs that hold all these variants, none of which failed."""
        whole = {
            name: run
            for name, run in self.runs.items()
            if {*variants} <= {row.variant for row in run.rows if not row.failed}
        }
        return {name for name, each in (*self.losses.items(), *whole.items()) if each.matches(now)}


load = Record.load


def run_name(model: str, work: str) -> str:
    """Under which a record holds a model at a work."""
    return f"{model}/{work}"
