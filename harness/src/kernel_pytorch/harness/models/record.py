"""What a run of models leaves: one JSON file a device."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from kernel_pytorch.harness.environment import Environment
from kernel_pytorch.harness.models.profiles import Kernel

FILE = "models.json"


class RecordError(Exception):
    """A file that holds no record of models."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Ratio(_Frozen):
    """Time of the baseline over that of a variant, of the same rounds; above 1 the variant is faster.

    Attributes:
        median: of the rounds.
        low: lower end of its 99 % interval.
        high: upper end.
    """

    median: float
    low: float
    high: float


class Cost(_Frozen):
    """What a step of a variant costs.

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
    """

    wall: float
    wall_low: float
    wall_high: float
    host: float
    device: float | None
    launches: int
    peak_bytes: int | None
    first_call: float
    kernels: tuple[Kernel, ...]
    losses: tuple[float, ...]
    difference: float
    gradients: float | None = None
    replaced: int


class Row(_Frozen):
    """A variant of a model at one work.

    Attributes:
        model: its name.
        work: name of the work.
        variant: name of the variant.
        cost: what it costs; None where it did not run.
        ratio: to stock of the same process; None where it did not run.
        reason: why it did not run; None where it did.
        failed: whether it raised an error, and was not left out.
    """

    model: str
    work: str
    variant: str
    cost: Cost | None = None
    ratio: Ratio | None = None
    reason: str | None = None
    failed: bool = False


class Origin(_Frozen):
    """When, where and of what something was measured.

    Attributes:
        date: of its end, ISO.
        environment: where.
        tiny: whether it was the model for a CPU.
        transformers: version.
        packages: digest of the sources of what was patched in, by technique.
    """

    date: str
    environment: Environment
    tiny: bool
    transformers: str
    packages: dict[str, str]


class Run(Origin):
    """One model at one work.

    Attributes:
        rows: what was measured.
    """

    rows: tuple[Row, ...]


class Curves(_Frozen):
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


class Record(_Frozen):
    """All models of a device, each work with the run that measured it.

    Attributes:
        runs: by `run_name`.
        losses: by the name of the model.
    """

    runs: dict[str, Run]
    losses: dict[str, LossRun] = {}

    def save(self, file: Path) -> None:
        """Write the file as a whole."""
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(".unfinished")
        unfinished.write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")
        unfinished.replace(file)


def run_name(model: str, work: str) -> str:
    """Under which a record holds a model at a work."""
    return f"{model}/{work}"


def load(file: Path) -> Record:
    """Read a record. Raises RecordError naming the file and what is wrong with it."""
    try:
        return Record.model_validate_json(file.read_text(encoding="utf-8"))
    except (OSError, ValidationError) as error:
        raise RecordError(f"{file} is no record of models: {str(error).splitlines()[0]}") from None
