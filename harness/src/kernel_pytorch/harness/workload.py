"""What the implementations of one job are timed on: sets of tensors that all of them share, and one call on a set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernel_pytorch.harness.clock import on_clock_stream
from kernel_pytorch.harness.jobs import Job
from kernel_pytorch.harness.oracle import Judgement, Run, judge, random_like
from kernel_pytorch.harness.technique import Direction, Implementation
from kernel_pytorch.harness.verification import Standard, standard_for


@dataclass(frozen=True)
class Workload:
    """The tensors of a job.

    Attributes:
        job: what is timed.
        arguments: of each set; where a backward is timed its floating-point tensors require gradients.
        incoming: gradients of the outputs, of each set; empty for a forward.
    """

    job: Job
    arguments: list[tuple[Any, ...]]
    incoming: list[tuple[Tensor, ...]]

    @classmethod
    def of(cls, job: Job, sets: int, generator: torch.Generator) -> Workload:
        """Fill `sets` sets."""
        operation, backward = job.operation, job.direction is not Direction.FORWARD
        arguments = [operation.arguments(job.case, generator) for _ in range(sets)]
        if not backward:
            return cls(job, arguments, [])
        wants = [name not in operation.constants for name in operation.signature()]
        leaves = [
            tuple(a.detach().requires_grad_(w) if _is_float(a) else a for a, w in zip(each, wants, strict=True))
            for each in arguments
        ]
        with torch.no_grad():
            outputs = _tuple(operation.reference.load()(*leaves[0]))
        return cls(job, leaves, [tuple(random_like(outputs, generator)) for _ in range(sets)])

    def call(self, implementation: Implementation) -> Callable[[int], tuple[Tensor, ...]]:
        """One call on a set: outputs of the forward, or the gradients of every floating-point argument."""
        calls, incoming = [implementation.call(each) for each in self.arguments], self.incoming
        if self.job.direction is Direction.FORWARD:

            def forward(index: int) -> tuple[Tensor, ...]:
                with torch.no_grad():
                    return _tuple(calls[index]())

            return forward
        wanted = [[a for a in each if _is_float(a) and a.requires_grad] for each in self.arguments]
        if self.job.direction is Direction.BOTH:
            return lambda index: torch.autograd.grad(_tuple(calls[index]()), wanted[index], incoming[index])
        graphs = [_tuple(call()) for call in calls]
        return lambda index: torch.autograd.grad(graphs[index], wanted[index], incoming[index], retain_graph=True)

    def renew(self, generator: torch.Generator) -> Standard:
        """Give the first set new contents in the same memory, unnoticed by autograd, and say what is true of them.

        A graph that is timed again and again holds its inputs, so of a backward alone the incoming gradients change.
        """
        job = self.job
        pairs: list[tuple[Any, Any]] = []
        if job.direction is not Direction.BACKWARD:
            pairs += zip(self.arguments[0], job.operation.arguments(job.case, generator), strict=True)
        if self.incoming:
            pairs += zip(self.incoming[0], random_like(self.incoming[0], generator), strict=True)
        for old, new in pairs:
            if isinstance(old, Tensor):
                old.data.copy_(new)  # `.data` has a version counter of its own
        arguments = [a.detach() if isinstance(a, Tensor) else a for a in self.arguments[0]]
        incoming = list(self.incoming[0]) if self.incoming else None
        return standard_for(job.operation, arguments, generator.device, incoming=incoming)

    def examine(
        self, implementation: Implementation, call: Callable[[int], tuple[Tensor, ...]], against: Standard
    ) -> tuple[Judgement, ...]:
        """Judge the call that was timed, on the very tensors that it was timed on, after `renew`."""
        try:
            with on_clock_stream(against.truth.outputs[0].device):
                results = call(0)
        except Exception as error:
            message = f"raised {type(error).__name__}: {error}"
            return (Judgement("call", False, error_over_budget=float("inf"), message=message),)
        reference, truth = against.reference, against.truth
        if self.job.direction is Direction.FORWARD:
            candidate = Run(results, {})
            reference, truth = reference.without_gradients(), truth.without_gradients()
        else:
            wanted = [_is_float(a) and a.requires_grad for a in self.arguments[0]]
            names = [name for name, is_wanted in zip(against.names, wanted, strict=True) if is_wanted]
            candidate = Run((), dict.fromkeys(reference.gradients) | dict(zip(names, results, strict=True)))
            reference, truth = Run((), reference.gradients), Run((), truth.gradients)
        return tuple(judge(candidate, reference, truth, implementation.budget_factor, against.summands))


def _is_float(argument: object) -> bool:
    return isinstance(argument, Tensor) and argument.is_floating_point()


def _tuple(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)
