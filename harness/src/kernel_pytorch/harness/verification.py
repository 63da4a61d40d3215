"""Check implementations against the oracle over a whole grid."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from kernel_pytorch.harness.adversaries import ADVERSARIES, COMMON_OFFSET, LAYOUTS, without_offset
from kernel_pytorch.harness.availability import why_unavailable
from kernel_pytorch.harness.discovery import discover
from kernel_pytorch.harness.environment import describe_environment, now
from kernel_pytorch.harness.implementation import BUDGET_FACTOR
from kernel_pytorch.harness.isolation import Announce, Workers
from kernel_pytorch.harness.known import judge_known
from kernel_pytorch.harness.launches import is_counted, judge_launches
from kernel_pytorch.harness.oracle import (
    ErrorCheck,
    Run,
    confirm,
    failed,
    in_float64,
    judge,
    random_like,
    run,
    run_definition,
    summands_by_shape,
)
from kernel_pytorch.harness.provenance import identify
from kernel_pytorch.harness.results import LevelVerification, VerificationReport
from kernel_pytorch.harness.technique import Case, Direction, Implementation, Level, Operation, Technique
from kernel_pytorch.harness.tensors import is_float
from kernel_pytorch.harness.trials import RANDOM, Trial, is_economical, make_arguments, trials

FRESH = 1000
"""Added to a seed, it gives the inputs that must confirm a miss."""

_last_compiled: tuple[str, str] | None = None


@dataclass(frozen=True)
class Verification:
    """The result of one implementation on one trial.

    Attributes:
        error_checks: one per output and gradient; empty if unavailable.
        unavailable: why it could not run, or None.
    """

    technique: str
    operation: str
    implementation: str
    trial: Trial
    error_checks: tuple[ErrorCheck, ...] = ()
    unavailable: str | None = None

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong; an implementation that could not run is not wrong."""
        return all(j.passed for j in self.error_checks)

    @property
    def worst(self) -> float:
        """The largest error over its budget."""
        return max((j.error_over_budget for j in self.error_checks), default=0.0)

    def failures(self) -> list[str]:
        """One line for each thing that is wrong, naming level, case and quantity."""
        where = f"{self.technique} {self.operation} level {self.implementation!r}, case {self.trial.label}"
        return [f"{where}: {j.quantity} {j.message}" for j in self.error_checks if not j.passed]


@dataclass(frozen=True)
class Expected:
    """What implementations of one trial are checked against.

    Attributes:
        names: of the arguments.
        arguments: by position.
        output_gradients: incoming gradients of the outputs; empty for an operation without gradients.
        reference: the definition in the arguments' dtype.
        truth: the definition in float64.
        summands: by argument, how many terms its gradient is the sum of, where it is one.
        fresh: makes the same of other random numbers, which must confirm a miss; None where there are no others.
    """

    names: list[str]
    arguments: list[object]
    output_gradients: list[Tensor]
    reference: Run
    truth: Run
    summands: Mapping[str, int] = field(default_factory=dict)
    fresh: Callable[[], Expected] | None = None


def expect(
    operation: Operation, trial: Trial, device: torch.device, seed: int = 0, budget_of: Implementation | None = None
) -> Expected:
    """Run the reference, in the trial's dtype and in float64.

    Args:
        operation: whose reference.
        trial: case and kind of input.
        device: where.
        seed: of the random numbers.
        budget_of: the implementation whose error is the budget; the reference if None.
    """
    arguments = make_arguments(operation, trial, device, seed)
    found = expect_for(operation, arguments, device, seed, trial.adversary)
    if budget_of is not None:
        own = run(budget_of.load(), found.names, found.arguments, found.output_gradients)
        found = replace(found, reference=replace(own, terms=found.reference.terms))
    return replace(found, fresh=functools.cache(lambda: expect(operation, trial, device, seed + FRESH, budget_of)))


def expect_for(
    operation: Operation,
    arguments: list[object],
    device: torch.device,
    seed: int = 0,
    adversary: str = RANDOM,
    incoming: list[Tensor] | None = None,
    public: bool = False,
) -> Expected:
    """Run the definition on given arguments, in their dtype and in float64.

    The reference level itself, not the public function at that level, unless `public`: what the function passes on
    wrongly must show.

    Incoming gradients that are not given are random, in the layout of the arguments where the adversary is about that.
    With a common offset the budget is that of the same differences without it: the reference may lose no digits either.
    """
    names, reference_level = operation.signature(), operation.reference
    named = dict(zip(names, arguments, strict=True))
    function = reference_level.load() if public else reference_level.definition()
    compute = partial(run_definition, function, None if public else operation.in_parts, names)
    if not operation.differentiable:
        incoming = []
    elif incoming is None:
        outputs = compute(arguments).outputs
        generator = torch.Generator(device).manual_seed(seed + 1)
        incoming = random_like(outputs, generator)
        if adversary in LAYOUTS:
            incoming = [ADVERSARIES[adversary](g) for g in incoming]
    centred = arguments
    if adversary == COMMON_OFFSET:  # undone as far as the dtype of the arguments held the differences
        centred = [
            without_offset(a) if name in operation.shift_invariant and isinstance(a, Tensor) else a
            for name, a in named.items()
        ]
    reference = compute(centred, incoming)
    truth = compute(in_float64(arguments), in_float64(incoming))
    terms, own_terms = operation.averaged(named), operation.averaged(dict(zip(names, centred, strict=True)))
    if terms is not None and own_terms is not None:
        reference = replace(reference, terms=compute(list(own_terms.values())).outputs)
        truth = replace(truth, terms=compute(in_float64(list(terms.values()))).outputs)
    summands = summands_by_shape(reference.outputs, named) | dict(operation.summands(named))
    return Expected(names, arguments, incoming, reference, truth, summands)


def examine(implementation: Implementation, against: Expected, *, backward: bool = True) -> tuple[ErrorCheck, ...]:
    """Run one implementation and judge it; one that raises is wrong.

    A miss counts only if fresh inputs miss too.
    """

    def judged(against: Expected) -> tuple[ErrorCheck, ...]:
        incoming = against.output_gradients if backward else None
        return judge_call(
            lambda: run(implementation.load(), against.names, against.arguments, incoming),
            implementation,
            against,
            Direction.BOTH if backward else Direction.FORWARD,
        )

    found, fresh = judged(against), against.fresh
    return found if fresh is None else tuple(confirm(found, lambda: judged(fresh())))


def judge_call(
    call: Callable[[], Run], implementation: Implementation, against: Expected, part: Direction
) -> tuple[ErrorCheck, ...]:
    """Judge a call of an implementation that computes outputs (forward), their gradients (backward) or both."""
    try:
        candidate = call()
    except Exception as error:
        return (failed("call", f"raised {type(error).__name__}: {error}"),)
    reference, truth = against.reference, against.truth
    if part is Direction.FORWARD:
        reference, truth = reference.without_gradients(), truth.without_gradients()
    elif part is Direction.BACKWARD:
        reference, truth = Run((), reference.gradients), Run((), truth.gradients)
    return tuple(judge(candidate, reference, truth, implementation.budget_factor, against.summands))


def not_offered(implementation: Implementation, error_checks: tuple[ErrorCheck, ...]) -> str:
    """Why an implementation that may refuse a case (`partial`) refused this one; "" if it did not."""
    said = "raised NotImplementedError: "
    messages = [j.message for j in error_checks if j.message.startswith(said)]
    return messages[0].removeprefix(said) if messages and implementation.partial else ""


def forget_other_shapes(operation: Operation, case: Case) -> None:
    """Reset Dynamo unless it compiled this case last: after eight shapes torch.compile would give up.

    The adversaries of a case have its shapes and, except for two layouts, need no separate compilation.
    """
    global _last_compiled
    if _last_compiled != (operation.name, case.label):
        torch._dynamo.reset()
        _last_compiled = (operation.name, case.label)


def verify_trial(
    technique: Technique,
    operation: Operation,
    implementation: Implementation,
    trial: Trial,
    device: torch.device,
    against: Expected | None = None,
) -> Verification:
    """Run one implementation on one trial, forward and backward, and judge it."""
    about = (technique.name, operation.name, implementation.name, trial)
    reason = why_unavailable(technique, implementation, device, trial.case.dtype)
    exempt = operation.exemption_of(implementation.name, trial.adversary, trial.case.dtype, device.type)
    if exempt is not None and not exempt.instead:
        reason = reason or exempt.reason
    reason = reason or operation.why_lacking(implementation.name, trial.case)
    if reason is not None:
        return Verification(*about, unavailable=reason)
    against = against or expect(operation, trial, device)
    if implementation.level is Level.TRITON:  # its interpreter takes no bfloat16, beside another dtype either
        dtypes = {a.dtype: None for a in filter(is_float, against.arguments)}
        reasons = (why_unavailable(technique, implementation, device, dtype) for dtype in dtypes)
        if reason := next(filter(None, reasons), None):
            return Verification(*about, unavailable=reason)
    if exempt is not None:
        against = expect(operation, trial, device, budget_of=operation.implementation(exempt.instead))
        implementation = replace(implementation, budget_factor=BUDGET_FACTOR)
    error_checks = examine(implementation, against)
    if reason := not_offered(implementation, error_checks):
        return Verification(*about, unavailable=reason)
    if implementation.level is Level.REFERENCE and trial == trials(operation, device)[0]:
        error_checks += judge_known(operation, device)
    if is_counted(implementation.level, device) and trial.case.core and trial.adversary == RANDOM:
        given = (trial.case, against.arguments, against.output_gradients, device)
        try:
            error_checks += (judge_launches(operation, implementation, *given),)
        except Exception as error:  # the call itself did not raise
            error_checks += (failed("launches", f"not counted: {error}"),)
    return Verification(*about, error_checks)


@dataclass(frozen=True)
class Task:
    """One trial, and the implementations that are checked against the same standard."""

    technique: Technique
    operation: Operation
    implementations: tuple[Implementation, ...]
    trial: Trial
    device: torch.device


def tasks(
    technique: Technique, device: torch.device, *, levels: list[str] | None = None, exhaustive: bool = False
) -> list[Task]:
    """List the parts of a verification; the arguments are those of `verify`."""
    found = []
    for operation in technique.operations:
        wanted = [i for i in operation.implementations if levels is None or i.name in levels]
        for trial in trials(operation, device):
            chosen = tuple(i for i in wanted if exhaustive or is_economical(i, trial))
            if chosen:
                found.append(Task(technique, operation, chosen, trial, device))
    return found


def verify(
    technique: Technique,
    device: torch.device,
    *,
    levels: list[str] | None = None,
    exhaustive: bool = False,
    workers: Workers | None = None,
) -> Iterator[Verification]:
    """Verify every implementation of every operation, trial by trial.

    Args:
        technique: what to verify.
        device: where.
        levels: names of the implementations, or None for all.
        exhaustive: run every trial at levels that compile anew for every shape too.
        workers: processes that the trials run in, so that a crash is isolated from the other trials; None for this
            process.

    Returns:
        One verification per implementation and trial, in the order of `tasks`.
    """
    every = tasks(technique, device, levels=levels, exhaustive=exhaustive)
    if workers is None:
        return itertools.chain.from_iterable(map(_verify_together, every))
    return itertools.chain.from_iterable(workers.map(partial(_verify_apart, workers=workers), every))


def _verify_together(task: Task, announce: Announce = lambda stage: None) -> list[Verification]:
    """Check implementations against one standard, in this process."""
    against = expect(task.operation, task.trial, task.device)
    found = []
    for implementation in task.implementations:
        announce(implementation.name)
        if implementation.level is Level.COMPILE:
            forget_other_shapes(task.operation, task.trial.case)
        found.append(verify_trial(task.technique, task.operation, implementation, task.trial, task.device, against))
    return found


def _verify_apart(task: Task, workers: Workers) -> list[Verification]:
    """Do the same in a worker; if it dies, again without the implementation that was running."""
    about = (task.technique.name, task.operation.name)
    dead: dict[str, str] = {}
    names = [i.name for i in task.implementations]
    while True:
        alive = [name for name in names if name not in dead]
        outcome = workers.call(_verify_in_child, *about, alive, task.trial, str(task.device))
        if not outcome.failure:
            found = {v.implementation: v for v in outcome.value}
            break
        if outcome.stage not in alive:  # the reference itself, or the inputs
            dead.update(dict.fromkeys(alive, f"in the reference or its inputs: {outcome.failure}"))
            found = {}
            break
        dead[outcome.stage] = outcome.failure
    for name, reason in dead.items():
        found[name] = Verification(*about, name, task.trial, (failed("call", reason),))
    return [found[name] for name in names]


def _verify_in_child(
    technique: str, operation: str, names: list[str], trial: Trial, device: str, announce: Announce
) -> list[Verification]:
    found = discover().get(technique)
    declared = found.operation(operation)
    implementations = tuple(declared.implementation(name) for name in names)
    return _verify_together(Task(found, declared, implementations, trial, torch.device(device)), announce)


def report(technique: Technique, found: list[Verification], device: torch.device) -> VerificationReport:
    """Sum up the verifications of one technique, level by level."""
    rows: dict[tuple[str, str], list[Verification]] = {}
    for v in found:
        rows.setdefault((v.operation, v.implementation), []).append(v)
    environment = describe_environment(device)
    return VerificationReport(
        technique=technique.name,
        created=now(),
        environment=environment,
        identities=identify(technique, environment),
        levels=tuple(_level(*names, verifications) for names, verifications in rows.items()),
        spared=tuple(f"{o.name}: {each}" for o in technique.operations for each in o.exemptions if each.of_adversary),
    )


def _level(operation: str, implementation: str, found: list[Verification]) -> LevelVerification:
    ran = [v for v in found if v.unavailable is None]
    worst = max((v.worst for v in ran), default=float("inf"))
    return LevelVerification(
        operation=operation,
        implementation=implementation,
        ran=len(ran),
        right=sum(v.passed for v in ran),
        worst=worst if worst != float("inf") else None,
        failures=tuple(line for v in found for line in v.failures()),
        not_run=len(found) - len(ran),
        unavailable=tuple(sorted({v.unavailable for v in found if v.unavailable is not None})),
    )
