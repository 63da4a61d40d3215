"""The rows of the support table, where each can be checked, and the examination of a technique."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernel_pytorch.harness import availability
from kernel_pytorch.harness.checks import Skipped
from kernel_pytorch.harness.environment import describe_environment, now
from kernel_pytorch.harness.isolation import Announce, Workers
from kernel_pytorch.harness.provenance import identify
from kernel_pytorch.harness.support import features
from kernel_pytorch.harness.support.processes import Processes
from kernel_pytorch.harness.support.record import Absent, Answer, Outcome, SupportRecord
from kernel_pytorch.harness.support.subject import Shared, Subject, absence, declared_no, subject_named
from kernel_pytorch.harness.technique import Operation, Technique

UNDECLARED = "does not work, and is not declared as unsupported"
OUTDATED = "declared as unsupported, but works: remove it"
MACHINE = ("device_name", "torch", "triton", "python")
"""Fields of an environment on which answers depend."""


@dataclass(frozen=True)
class Capability:
    """One row.

    Attributes:
        name: of the row; `Implementation.unsupported` speaks of it by this name.
        check: raises whatever it raises if the implementation does not support it.
        elsewhere: `device -> None`, or the reason why only another machine can tell.
        own_processes: whether the check starts processes itself: for code that may end its process, or for a group.
        promise: whether a yes promises something of all calls: then the few that are tried may agree by luck, and a
            declared no stays one.
    """

    name: str
    check: Callable[[Subject], None]
    elsewhere: Callable[[torch.device], str | None] = lambda device: None
    own_processes: bool = False
    promise: bool = False


def without_compiler(device: torch.device) -> str | None:
    """The reason why TorchInductor cannot compile here: even a GPU's code is called from C++."""
    return None if availability._cpp_compiler() else "needs a C++ compiler: $CXX, g++ or clang++ on PATH"


def without_a_device_each(device: torch.device) -> str | None:
    """The reason why two processes cannot have a device each."""
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        return "needs two GPUs, or none: two processes share a CPU, not a GPU"
    return None


CAPABILITIES = (
    Capability("fullgraph", features.check_fullgraph),
    Capability("dynamic shapes", features.check_dynamic_shapes, without_compiler),
    Capability("opcheck", features.check_opcheck),
    Capability("export", features.check_export),
    Capability(features.AOTINDUCTOR, features.check_aotinductor, without_compiler, own_processes=True),
    Capability("autocast", features.check_autocast),
    Capability(
        "CUDA graphs",
        features.check_cuda_graphs,
        lambda device: None if device.type == "cuda" else "needs a CUDA device",
    ),
    Capability("selective checkpointing", features.check_selective_checkpointing),
    Capability("FLOP counter", features.check_flop_counter),
    Capability("double backward", features.check_double_backward),
    Capability("FSDP2/DTensor", features.check_sharded, without_a_device_each, own_processes=True),
    Capability("determinism", features.check_determinism, promise=True),
    Capability("batch invariance", features.check_batch_invariance, promise=True),
)


def capability(name: str) -> Capability:
    """The row of that name. Raises KeyError naming all of them."""
    for candidate in CAPABILITIES:
        if candidate.name == name:
            return candidate
    raise KeyError(f"the support table has no row {name!r}; it has {', '.join(c.name for c in CAPABILITIES)}")


def check_declaration(operation: Operation) -> None:
    """Raise KeyError if an implementation declares a row unsupported that does not exist."""
    for implementation in operation.implementations:
        for name in implementation.unsupported:
            capability(name.removesuffix(" on cpu").removesuffix(" on cuda"))


def examine(subject: Subject, row: Capability, error: str = "") -> Outcome:
    """Test one implementation, which must be able to run here, for one row, and compare with the declaration.

    `error` says how the process ended in which it was tested, if it did not answer.
    """
    elsewhere = row.elsewhere(subject.device)
    if elsewhere is None and not error:
        if "torch._dynamo" in sys.modules:  # importing it takes seconds
            torch._dynamo.reset()  # compiled functions of one check must not reach the next
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # each version of torch warns of other things
            try:
                row.check(subject)
            except Skipped as skipped:
                elsewhere = str(skipped)
            except Exception as raised:
                error = f"{type(raised).__name__}: {raised}"
    declared = declared_no(subject, row.name)
    answer: Answer = "yes"
    reason = ""
    if elsewhere is not None:
        answer, reason = "not tested here", elsewhere
    elif declared is None and error:
        answer, reason = "wrong", UNDECLARED
    elif declared is not None and not error and not row.promise:
        answer, reason = "wrong", OUTDATED
    elif declared is not None:
        answer, reason, error = "no", declared, error.partition("\n")[0]
    names = {"operation": subject.operation.name, "implementation": subject.implementation.name}
    return Outcome(**names, capability=row.name, answer=answer, reason=reason, error=error.strip())


def examine_technique(
    technique: Technique,
    device: torch.device,
    *,
    workers: Workers | None = None,
    processes: Processes | None = None,
    known: SupportRecord | None = None,
    on_question: Callable[[str], None] = lambda label: None,
) -> SupportRecord:
    """Test every implementation of every operation for every row.

    Args:
        technique: the technique.
        device: where.
        workers: processes that the checks run in, so that one that crashes does not affect the others; None for this
            process.
        processes: of one group, for the rows that need several.
        known: an earlier record; its answers for the present code, torch, Triton and device are kept.
        on_question: called, from any thread, with the label of each test.

    Raises:
        KeyError: an implementation declares a row unsupported that does not exist.
    """
    shared = Shared(technique, device, processes, workers)
    environment = describe_environment(device)
    identities = identify(technique, environment)
    kept: dict[tuple[str, str, str], Outcome] = {}
    if known is not None and all(getattr(known.environment, name) == getattr(environment, name) for name in MACHINE):
        same = {label for label, then in known.identities.items() if then == identities.get(label)}
        kept = {o.key: o for o in known.outcomes if o.label in same and o.answer != "wrong"}
    absent: list[Absent] = []
    questions: list[tuple[Subject, Capability]] = []
    for operation in technique.operations:
        check_declaration(operation)
        for implementation in (i for i in operation.implementations if not i.partial):
            subject = Subject(shared, operation, implementation)
            if (reason := absence(subject)) is None:
                questions += [(subject, row) for row in CAPABILITIES]
            else:
                absent.append(Absent(operation=operation.name, implementation=implementation.name, reason=reason))

    def answer(question: tuple[Subject, Capability]) -> Outcome:
        subject, row = question
        names = (subject.operation.name, subject.implementation.name, row.name)
        if names in kept:
            return kept[names]
        on_question(f"{names[0]} {names[1]}: {names[2]}")
        if workers is None or row.own_processes:
            return examine(subject, row)
        outcome = workers.call(_examine_in_child, technique.name, *names, str(device))
        return outcome.value or examine(subject, row, outcome.failure)

    side_by_side = (workers.map if workers else map)(answer, [q for q in questions if not q[1].own_processes])
    outcomes = tuple(answer(q) if q[1].own_processes else next(side_by_side) for q in questions)
    return SupportRecord(
        technique=technique.name,
        created=now(),
        environment=environment,
        identities=identities,
        outcomes=outcomes,
        absent=tuple(absent),
    )


def _examine_in_child(
    technique: str, operation: str, implementation: str, row: str, device: str, announce: Announce
) -> Outcome:
    return examine(subject_named(technique, operation, implementation, device), capability(row))
