"""The subject of a check: one implementation of one operation, on its smallest representative case."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernel_pytorch.harness.availability import why_unavailable
from kernel_pytorch.harness.discovery import discover
from kernel_pytorch.harness.isolation import Worker, Workers
from kernel_pytorch.harness.oracle import Run, in_float64, judge
from kernel_pytorch.harness.oracle import run as run_function
from kernel_pytorch.harness.support.processes import Processes
from kernel_pytorch.harness.technique import Implementation, Operation, Technique
from kernel_pytorch.harness.tensors import is_float, leaves
from kernel_pytorch.harness.trials import RANDOM, Trial, make_arguments
from kernel_pytorch.harness.verification import Expected, expect_for

BUDGET_FACTOR = 4.0
"""The largest that the oracle allows: what compiles or splits a function may add its numbers in another order."""


@dataclass(frozen=True)
class Shared:
    """State that all subjects of a technique share.

    Attributes:
        technique: the technique.
        device: where it is tested.
        processes: of one group, for what needs several.
        worker: runs checks that may end their process; None for this process.
        folder: where processes that examine the same technique tell each other what takes long; None where none do.
        found: results that were computed before, by key.
    """

    technique: Technique
    device: torch.device
    processes: Processes | None = None
    worker: Worker | Workers | None = None
    folder: Path | None = None
    found: dict[Any, Any] = field(default_factory=dict)

    def once(self, key: Any, work: Callable[[], Any]) -> Any:
        """`work()`, done the first time only."""
        if key not in self.found:
            self.found[key] = work()
        return self.found[key]

    def once_for_all(self, name: str, work: Callable[[], Any]) -> Any:
        """The same among all processes with this folder; what `work` returns must be JSON."""
        if self.folder is None:
            return self.once(name, work)
        from filelock import FileLock  # torch needs it

        path = self.folder / f"{self.technique.name}-{name.replace(' ', '-')}.json"
        with FileLock(f"{path}.lock"):
            if not path.is_file():
                path.write_text(json.dumps(work()), encoding="utf-8")
        return json.loads(path.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Subject:
    """One implementation of one operation."""

    shared: Shared
    operation: Operation
    implementation: Implementation

    @property
    def label(self) -> str:
        """`operation/implementation`, as in records."""
        return f"{self.operation.name}/{self.implementation.name}"

    @property
    def device(self) -> torch.device:
        """Where it is tested."""
        return self.shared.device

    @property
    def function(self) -> Callable[..., Any]:
        """The implementation, loaded."""
        return self.implementation.load()

    @property
    def names(self) -> list[str]:
        """Names of the arguments."""
        return self.operation.signature()

    def arguments(self, rows: int = 1, seed: int = 0) -> list[Any]:
        """Those of the first core case in float32, with `rows` times as many rows; the same for all levels."""
        cases = self.operation.test_grid.cases(self.device.type)
        case = next((case for case in cases if case.core and case.dtype == torch.float32), None)
        if case is None:
            raise ValueError(f"{self.operation.name}: test_grid has no float32 core case; the support table needs one")
        arguments = make_arguments(self.operation, Trial(case, RANDOM), self.device, seed)
        return [
            torch.cat([a.roll(turn, 0) for turn in range(rows)]) if isinstance(a, Tensor) and self.has_rows(name) else a
            for name, a in zip(self.names, arguments, strict=True)
        ]

    def has_rows(self, name: str) -> bool:
        """Whether an argument is data with rows, such as one per token, and no parameter."""
        return name in (*self.operation.adversarial, *self.operation.with_rows)

    def leaves(self, arguments: Sequence[Any]) -> list[Any]:
        """Copies of arguments that want their gradients, where they can have any."""
        wanted = [self.operation.differentiable and name not in self.operation.constants for name in self.names]
        return leaves([a.clone() if isinstance(a, Tensor) else a for a in arguments], wanted)

    def bound(self, arguments: Sequence[Any]) -> tuple[Callable[..., Any], list[Any]]:
        """The function with its constants bound, in the dtype of what it is given, and the other arguments."""
        free = [name not in self.operation.constants for name in self.names]
        function = self.function
        if all(free):
            return function, list(arguments)

        def call(*own: Any) -> Any:
            rest, wide = iter(own), next(filter(is_float, own)).dtype == torch.float64
            bound = in_float64(arguments) if wide else arguments
            return function(*(next(rest) if is_free else a for is_free, a in zip(free, bound, strict=True)))

        return call, [a for a, is_free in zip(arguments, free, strict=True) if is_free]

    def expect(self, rows: int = 1, seed: int = 0) -> Expected:
        """The expected results on `arguments(rows, seed)`, and the incoming gradients."""
        key = ("standard", self.operation.name, rows, seed)
        return self.shared.once(key, lambda: expect_for(self.operation, self.arguments(rows, seed), self.device))

    def run(self, function: Callable[..., Any], against: Expected) -> Run:
        """Call a function that wraps the implementation, and its backward."""
        return run_function(function, self.names, against.arguments, against.output_gradients)

    def hold(self, candidate: Run, against: Expected) -> None:
        """Raise AssertionError unless every output, and every gradient that there is, is within the budget."""
        reference, truth = against.reference, against.truth
        if not candidate.gradients:
            reference, truth = reference.without_gradients(), truth.without_gradients()
        wrong = [j for j in judge(candidate, reference, truth, BUDGET_FACTOR) if not j.passed]
        assert not wrong, "; ".join(f"{j.quantity} {j.message}" for j in wrong)


@functools.cache
def _shared_by_name(technique: str, device: str) -> Shared:
    return Shared(discover().get(technique), torch.device(device))


def subject_named(technique: str, operation: str, implementation: str, device: str) -> Subject:
    """The subject of these names in a child process, whose subjects of one technique share what they find."""
    shared = _shared_by_name(technique, device)
    declared = shared.technique.operation(operation)
    return Subject(shared, declared, declared.implementation(implementation))


def absence(subject: Subject) -> str | None:
    """Why the implementation cannot run here at all, or None."""
    return why_unavailable(subject.shared.technique, subject.implementation, subject.device, torch.float32)


def declared_no(subject: Subject, row: str) -> str | None:
    """Why the implementation declares that it says no in a row, on this device or everywhere; None if it does not."""
    declared = subject.implementation.unsupported
    return declared.get(f"{row} on {subject.device.type}", declared.get(row))
