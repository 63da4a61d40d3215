"""Holding an implementation against the oracle over a whole grid."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .adversaries import ADVERSARIES, LAYOUTS
from .availability import why_unavailable
from .oracle import Judgement, Run, in_float64, judge, random_like, run
from .technique import Case, Implementation, Level, Operation, Technique

RANDOM = "random"


@dataclass(frozen=True)
class Trial:
    """One case with one kind of input.

    Attributes:
        case: shape and dtype.
        adversary: "random" or a key of `ADVERSARIES`.
    """

    case: Case
    adversary: str

    @property
    def label(self) -> str:
        """The case, and the adversary where there is one."""
        return self.case.label if self.adversary == RANDOM else f"{self.case.label}, {self.adversary}"


@dataclass(frozen=True)
class Verification:
    """What came out for one implementation and one trial.

    Attributes:
        judgements: one per output and gradient; empty if unavailable.
        unavailable: why it could not run, or None.
    """

    technique: str
    operation: str
    implementation: str
    trial: Trial
    judgements: tuple[Judgement, ...] = ()
    unavailable: str | None = None

    @property
    def passed(self) -> bool:
        """Nothing wrong; an implementation that could not run is not wrong."""
        return all(j.passed for j in self.judgements)

    @property
    def worst(self) -> float:
        """The largest error over its budget."""
        return max((j.error_over_budget for j in self.judgements), default=0.0)

    def failures(self) -> list[str]:
        """One line for each thing that is wrong, naming level, case and quantity."""
        where = f"{self.technique} {self.operation} level {self.implementation!r}, case {self.trial.label}"
        return [f"{where}: {j.quantity} {j.message}" for j in self.judgements if not j.passed]


def trials(operation: Operation, device: torch.device) -> list[Trial]:
    """Every case with random input, and every adversary on the first core case of each dtype."""
    cases = operation.test_grid.cases(device.type)
    planted: dict[torch.dtype, Case] = {}
    for case in cases:
        if case.core:
            planted.setdefault(case.dtype, case)
    adversarial = [Trial(case, adversary) for case in planted.values() for adversary in ADVERSARIES]
    return [Trial(case, RANDOM) for case in cases] + (adversarial if operation.adversarial else [])


def is_economical(implementation: Implementation, trial: Trial) -> bool:
    """Whether an ordinary verification runs this trial: what compiles anew for every shape keeps to the core cases."""
    return implementation.level is not Level.COMPILE or trial.case.core


def make_arguments(operation: Operation, trial: Trial, device: torch.device, seed: int = 0) -> list[object]:
    """The arguments of a trial: the same for every implementation, different for every trial and seed."""
    generator = torch.Generator(device).manual_seed(zlib.crc32(trial.label.encode()) ^ seed)
    arguments = list(operation.inputs(trial.case, generator))
    if trial.adversary != RANDOM:
        for position, name in enumerate(operation.signature()):
            argument = arguments[position]
            if name in operation.adversarial and isinstance(argument, Tensor):
                arguments[position] = ADVERSARIES[trial.adversary](argument)
    return arguments


@dataclass(frozen=True)
class Standard:
    """What implementations of one trial are held against: arguments, incoming gradients, reference and truth."""

    names: list[str]
    arguments: list[object]
    output_gradients: list[Tensor]
    reference: Run
    truth: Run


def standard(operation: Operation, trial: Trial, device: torch.device, seed: int = 0) -> Standard:
    """Run the reference, in the trial's dtype and in float64."""
    arguments = make_arguments(operation, trial, device, seed)
    return standard_for(operation, arguments, device, seed, trial.adversary)


def standard_for(
    operation: Operation, arguments: list[object], device: torch.device, seed: int = 0, adversary: str = RANDOM
) -> Standard:
    """Run the reference on given arguments, in their dtype and in float64.

    The incoming gradients are random, in the layout of the arguments where that is what the adversary is about.
    """
    names, function = operation.signature(), operation.reference.load()
    outputs = run(function, names, arguments).outputs
    generator = torch.Generator(device).manual_seed(seed + 1)
    incoming = random_like(outputs, generator)
    if adversary in LAYOUTS:
        incoming = [ADVERSARIES[adversary](g) for g in incoming]
    reference = run(function, names, arguments, incoming)
    truth = run(function, names, in_float64(arguments), in_float64(incoming))
    return Standard(names, arguments, incoming, reference, truth)


def examine(implementation: Implementation, against: Standard, *, backward: bool = True) -> tuple[Judgement, ...]:
    """Run one implementation and judge it; one that raises is wrong, and the others go on."""
    incoming = against.output_gradients if backward else None
    try:
        candidate = run(implementation.load(), against.names, against.arguments, incoming)
    except Exception as error:
        message = f"raised {type(error).__name__}: {error}"
        return (Judgement("call", False, error_over_budget=float("inf"), message=message),)
    reference, truth = against.reference, against.truth
    if not backward:
        reference, truth = reference.without_gradients(), truth.without_gradients()
    return tuple(judge(candidate, reference, truth, implementation.budget_factor))


def verify_trial(
    technique: Technique,
    operation: Operation,
    implementation: Implementation,
    trial: Trial,
    device: torch.device,
    against: Standard | None = None,
) -> Verification:
    """Run one implementation on one trial, forward and backward, and judge it."""
    about = (technique.name, operation.name, implementation.name, trial)
    reason = why_unavailable(technique, implementation, device, trial.case.dtype)
    if reason is not None:
        return Verification(*about, unavailable=reason)
    return Verification(*about, examine(implementation, against or standard(operation, trial, device)))


def verify(
    technique: Technique,
    device: torch.device,
    *,
    levels: list[str] | None = None,
    exhaustive: bool = False,
) -> Iterator[Verification]:
    """Verify every implementation of every operation, trial by trial.

    Args:
        technique: what to verify.
        device: where.
        levels: names of the implementations, or None for all.
        exhaustive: run every trial at levels that compile anew for every shape too.

    Yields:
        One verification per implementation and trial.
    """
    for operation in technique.operations:
        implementations = [i for i in operation.implementations if levels is None or i.name in levels]
        for trial in trials(operation, device):
            against = standard(operation, trial, device)
            for implementation in implementations:
                if not exhaustive and not is_economical(implementation, trial):
                    continue
                if implementation.level is Level.COMPILE:
                    # Past eight shapes torch.compile would raise (fullgraph) or fall back to eager (otherwise).
                    torch._dynamo.reset()
                yield verify_trial(technique, operation, implementation, trial, device, against)
