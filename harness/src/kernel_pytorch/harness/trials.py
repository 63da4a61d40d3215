"""Trials: the cases of an operation, each with random input, adversarial input or activations."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from kernel_pytorch.harness.adversaries import ADVERSARIES, IMITATED, TOKENS, imitated_activations
from kernel_pytorch.harness.technique import Case, Implementation, Level, Operation

RANDOM = "random"


@dataclass(frozen=True)
class Trial:
    """One case with one kind of input.

    Attributes:
        case: shape and dtype.
        adversary: "random", a key of `ADVERSARIES`, or "imitated activations".
    """

    case: Case
    adversary: str

    @property
    def label(self) -> str:
        """The case, and the adversary where there is one."""
        return self.case.label if self.adversary == RANDOM else f"{self.case.label}, {self.adversary}"


def trials(operation: Operation, device: torch.device) -> list[Trial]:
    """List every case with random input, and every adversary on the first core case of each dtype.

    In these dtypes imitated activations too, if the operation declares `real_input`.
    """
    cases = operation.test_grid.cases(device.type)
    planted: dict[torch.dtype, Case] = {}
    for case in cases:
        if case.core:
            planted.setdefault(case.dtype, case)
    return (
        [Trial(case, RANDOM) for case in cases]
        + [
            Trial(case, adversary)
            for case in planted.values()
            for adversary in ADVERSARIES
            if operation.planted_in(adversary, case.dtype, device.type)
        ]
        + [
            Trial(Case("hidden states", dtype, {"tokens": TOKENS}), IMITATED)
            for dtype in planted
            if operation.real_input is not None
        ]
    )


def is_economical(implementation: Implementation, trial: Trial) -> bool:
    """Whether an ordinary verification runs this trial: levels that compile for every shape run only the core cases."""
    return implementation.level is not Level.COMPILE or trial.case.core


def make_arguments(operation: Operation, trial: Trial, device: torch.device, seed: int = 0) -> list[object]:
    """Make the arguments of a trial: the same for every implementation, different for every trial and seed."""
    if trial.adversary == IMITATED:
        given = operation.real_arguments(imitated_activations(seed).to(device), trial.case.dtype)
        return [a.to(device) if isinstance(a, Tensor) else a for a in given]
    generator = torch.Generator(device).manual_seed(zlib.crc32(trial.label.encode()) ^ seed)
    arguments = list(operation.arguments(trial.case, generator))
    if trial.adversary != RANDOM:
        names = operation.signature()
        for name in operation.planted_in(trial.adversary, trial.case.dtype, device.type):
            if name not in names:
                raise ValueError(f"{operation.name}: adversarial names {name!r}; arguments are {', '.join(names)}")
            argument = arguments[names.index(name)]
            if isinstance(argument, Tensor):
                arguments[names.index(name)] = ADVERSARIES[trial.adversary](argument)
    return arguments
