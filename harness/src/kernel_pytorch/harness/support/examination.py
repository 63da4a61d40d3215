"""Asking every implementation about every row, and holding the answer against the declaration."""

from __future__ import annotations

import datetime
import functools
import sys
import warnings
from collections.abc import Callable

import torch

from kernel_pytorch.harness.availability import why_unavailable
from kernel_pytorch.harness.checks import Skipped
from kernel_pytorch.harness.discovery import discover
from kernel_pytorch.harness.environment import Environment, describe_environment
from kernel_pytorch.harness.isolation import Announce, Workers
from kernel_pytorch.harness.provenance import identify
from kernel_pytorch.harness.support.capabilities import CAPABILITIES, Capability, capability, check_declaration
from kernel_pytorch.harness.support.freshness import up_to_date
from kernel_pytorch.harness.support.processes import Processes
from kernel_pytorch.harness.support.record import Absent, Outcome, SupportRecord
from kernel_pytorch.harness.support.subject import Shared, Subject, declared_no
from kernel_pytorch.harness.technique import Technique

UNDECLARED = "does not work, and is not declared as unsupported"
OUTDATED = "declared as unsupported, but works: remove it"


def examine(subject: Subject, row: Capability) -> Outcome:
    """Ask one implementation, which must be able to run here, about one row."""
    elsewhere = row.elsewhere(subject.device)
    if elsewhere is not None:
        return _outcome(subject, row, "not tested here", elsewhere)
    if "torch._dynamo" in sys.modules:  # importing it takes seconds
        torch._dynamo.reset()  # what one check compiled, or gave up to compile, is no part of the next
    error = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each torch warns of other things; what is asked here is whether it works
        try:
            row.check(subject)
        except Skipped as reason:
            return _outcome(subject, row, "not tested here", str(reason))
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    return _judged(subject, row, error)


def _judged(subject: Subject, row: Capability, error: str) -> Outcome:
    """Hold what was raised, if anything was, against the declaration."""
    declared = declared_no(subject, row.name)
    if declared is None:
        return _outcome(subject, row, "wrong", UNDECLARED, error) if error else _outcome(subject, row, "yes")
    if not error:
        return _outcome(subject, row, "no", declared) if row.promise else _outcome(subject, row, "wrong", OUTDATED)
    return _outcome(subject, row, "no", declared, error.splitlines()[0])


def _outcome(subject: Subject, row: Capability, answer: str, reason: str = "", error: str = "") -> Outcome:
    about = {"operation": subject.operation.name, "implementation": subject.implementation.name}
    return Outcome.model_validate(
        about | {"capability": row.name, "answer": answer, "reason": reason, "error": error.strip()}
    )


def absence(subject: Subject) -> str | None:
    """Why the implementation cannot run here at all, or None."""
    return why_unavailable(subject.shared.technique, subject.implementation, subject.device, torch.float32)


def examine_technique(
    technique: Technique,
    device: torch.device,
    *,
    workers: Workers | None = None,
    processes: Processes | None = None,
    known: SupportRecord | None = None,
    on_question: Callable[[str], None] = lambda label: None,
) -> SupportRecord:
    """Ask every implementation of every operation about every row.

    Args:
        technique: the technique.
        device: where.
        workers: processes that the checks run in, so that one that crashes costs itself alone; None for this process.
        processes: of one group, for the rows that need several.
        known: an earlier record; what it holds of the present code, torch, Triton and device is not asked again.
        on_question: called, from any thread, with what is about to be asked.

    Raises:
        KeyError: an implementation declares a row unsupported that does not exist.
    """
    shared = Shared(technique, device, processes, workers)
    subjects: list[Subject] = []
    absent: list[Absent] = []
    for operation in technique.operations:
        check_declaration(operation)
        for implementation in (i for i in operation.implementations if not i.partial):
            subject = Subject(shared, operation, implementation)
            reason = absence(subject)
            if reason is None:
                subjects.append(subject)
            else:
                absent.append(Absent(operation=operation.name, implementation=implementation.name, reason=reason))
    environment = describe_environment(device)
    answers = {} if known is None or not _same_machine(known.environment, environment) else _answers(known, technique)
    questions = [(subject, row) for subject in subjects for row in CAPABILITIES]
    asked = iter(_ask([question for question in questions if _key(*question) not in answers], workers, on_question))
    return SupportRecord(
        technique=technique.name,
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        environment=environment,
        identities=identify(technique, environment),
        outcomes=tuple(answers.get(_key(*question)) or next(asked) for question in questions),
        absent=tuple(absent),
    )


def _same_machine(known: Environment, now: Environment) -> bool:
    return all(getattr(known, name) == getattr(now, name) for name in ("device_name", "torch", "triton", "python"))


def _answers(known: SupportRecord, technique: Technique) -> dict[tuple[str, str, str], Outcome]:
    """What a record holds of the present code, without what was wrong."""
    kept = [
        o for o in up_to_date(known, technique)[0].outcomes if f"{o.operation}/{o.implementation}" in known.identities
    ]
    return {(o.operation, o.implementation, o.capability): o for o in kept if o.answer != "wrong"}


def _key(subject: Subject, row: Capability) -> tuple[str, str, str]:
    return subject.operation.name, subject.implementation.name, row.name


def _ask(
    questions: list[tuple[Subject, Capability]], workers: Workers | None, on_question: Callable[[str], None]
) -> list[Outcome]:
    """Answers in the order of the questions: of those that have processes of their own here, one after the other."""

    def ask(question: tuple[Subject, Capability]) -> Outcome:
        subject, row = question
        on_question(f"{subject.operation.name} {subject.implementation.name}: {row.name}")
        if workers is None or row.own_processes:
            return examine(subject, row)
        return _examine_apart(subject, row, workers)

    if workers is None:
        return [ask(question) for question in questions]
    answers = workers.map(ask, [question for question in questions if not question[1].own_processes])
    return [ask(question) if question[1].own_processes else next(answers) for question in questions]


def _examine_apart(subject: Subject, row: Capability, workers: Workers) -> Outcome:
    names = (subject.shared.technique.name, subject.operation.name, subject.implementation.name, row.name)
    outcome = workers.call(_examine_in_child, *names, str(subject.device))
    return outcome.value if not outcome.failure else _judged(subject, row, outcome.failure)


def _examine_in_child(
    technique: str, operation: str, implementation: str, row: str, device: str, announce: Announce
) -> Outcome:
    shared = _shared_in_child(technique, device)
    declared = shared.technique.operation(operation)
    return examine(Subject(shared, declared, declared.implementation(implementation)), capability(row))


@functools.cache
def _shared_in_child(technique: str, device: str) -> Shared:
    """The same for all calls of this process."""
    return Shared(discover().get(technique), torch.device(device))
