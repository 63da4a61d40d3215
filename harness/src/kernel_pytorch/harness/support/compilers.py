"""Rows of the support table about compilers: Dynamo, export and AOTInductor."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernel_pytorch.harness.availability import why_unavailable
from kernel_pytorch.harness.checks import Skipped
from kernel_pytorch.harness.discovery import discover
from kernel_pytorch.harness.isolation import Announce
from kernel_pytorch.harness.oracle import Run
from kernel_pytorch.harness.scratch import scratch_folder
from kernel_pytorch.harness.support.subject import Shared, Subject, declared_no, tensors

AOTINDUCTOR = "AOTInductor"


def check_fullgraph(subject: Subject) -> None:
    """A caller is captured with its backward in one graph (`fullgraph=True`), and what that computes is right.

    The graph runs uncompiled; `check_dynamic_shapes` tests TorchInductor's code.
    """
    against = subject.expect()
    subject.hold(subject.run(_compile_caller(subject, backend="aot_eager"), against), against)


def check_dynamic_shapes(subject: Subject) -> None:
    """Compiled with `dynamic=True`, another number of rows needs no other graph, and is right too."""
    compiled = _compile_caller(subject, dynamic=True)
    subject.hold(subject.run(compiled, subject.expect()), subject.expect())
    with torch._dynamo.config.patch(error_on_recompile=True):
        subject.hold(subject.run(compiled, subject.expect(rows=2)), subject.expect(rows=2))


def _compile_caller(subject: Subject, **options: Any) -> Callable[..., Any]:
    """A compiled function that calls the implementation, as a network does."""
    function = subject.function
    return torch.compile(lambda *arguments: function(*arguments), fullgraph=True, **options)


def check_export(subject: Subject) -> None:
    """`torch.export` with a dynamic number of rows; what it exports is right at another number."""
    outputs = _export([subject]).module()(*_inputs([subject], rows=2))
    subject.hold(Run(tuple(outputs[0]), {}), subject.expect(rows=2))


def check_aotinductor(subject: Subject) -> None:
    """The exported program, compiled into a library and loaded again, is right at both numbers of rows.

    The compiler takes most of the time to read headers, so all implementations of a technique go into one library; if
    that fails, each gets its own. Libraries are loaded in another process where there is one. On a GPU that process
    first loads the library of a sum: if that fails, nothing of ours has been tested.

    Raises:
        Skipped: not even the sum can be loaded here.
    """
    shared, label = subject.shared, _label(subject)
    if (worker := shared.worker) is not None and shared.device.type == "cuda":
        device = str(shared.device)
        reason = shared.once_for_all(f"{AOTINDUCTOR} sum", lambda: worker.call(_load_a_sum, device).failure)
        if reason:
            raise Skipped(f"this torch cannot load what AOTInductor makes here, not even of a sum: {reason}")
    found = shared.once_for_all(AOTINDUCTOR, lambda: _package_together(shared))
    wrong = found[label] if label in found else _package(shared, [subject])[label]
    assert not wrong, wrong


def _package_together(shared: Shared) -> dict[str, str]:
    """The errors of all implementations that are expected to work; none if one of them stops the others."""
    every = [Subject(shared, o, i) for o in shared.technique.operations for i in o.implementations]
    expected = [
        subject
        for subject in every
        if declared_no(subject, AOTINDUCTOR) is None
        and why_unavailable(shared.technique, subject.implementation, shared.device, subject.case.dtype) is None
    ]
    try:
        return _package(shared, expected)
    except Exception:  # the one that failed fails again when it is tested alone
        return {}


def _package(shared: Shared, subjects: Sequence[Subject]) -> dict[str, str]:
    """The error of each of them, compiled into one library; empty for what is right."""
    if shared.worker is None:
        return _hold_packaged(subjects)
    names = [(subject.operation.name, subject.implementation.name) for subject in subjects]
    outcome = shared.worker.call(_hold_packaged_apart, shared.technique.name, names, str(shared.device))
    assert not outcome.failure, outcome.failure
    found: dict[str, str] = outcome.value
    return found


def _load_a_sum(device: str, announce: Announce) -> None:
    class Sum(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + x

    x = torch.ones(4, device=device)
    with _loaded(torch.export.export(Sum(), (x,))) as loaded:
        loaded(x)


def _hold_packaged_apart(
    technique: str, names: list[tuple[str, str]], device: str, announce: Announce
) -> dict[str, str]:
    shared = Shared(discover().get(technique), torch.device(device))
    operations = [(shared.technique.operation(operation), implementation) for operation, implementation in names]
    return _hold_packaged([Subject(shared, operation, operation.implementation(i)) for operation, i in operations])


def _hold_packaged(subjects: Sequence[Subject]) -> dict[str, str]:
    wrong = dict.fromkeys(map(_label, subjects), "")
    with _loaded(_export(subjects)) as loaded:
        for rows in (1, 2):
            for subject, outputs in zip(subjects, loaded(*_inputs(subjects, rows)), strict=True):
                try:
                    subject.hold(Run(tuple(outputs), {}), subject.expect(rows))
                except AssertionError as error:
                    wrong[_label(subject)] = str(error)
    return wrong


@contextlib.contextmanager
def _loaded(program: torch.export.ExportedProgram) -> Iterator[Any]:
    """Compile a program with AOTInductor and load the library."""
    with scratch_folder() as folder:
        target = str(Path(folder) / "package.pt2")
        yield torch._inductor.aoti_load_package(torch._inductor.aoti_compile_and_package(program, package_path=target))


def _label(subject: Subject) -> str:
    return f"{subject.operation.name}/{subject.implementation.name}"


def _inputs(subjects: Sequence[Subject], rows: int = 1) -> tuple[Tensor, ...]:
    """The inputs of an exported program of these subjects: the tensors of each operation once, in order."""
    operations = {subject.operation.name: subject for subject in subjects}
    return tuple(a for s in operations.values() for a in s.expect(rows).arguments if isinstance(a, Tensor))


def _export(subjects: Sequence[Subject]) -> torch.export.ExportedProgram:
    """Export a program that gives the outputs of each subject, with a dynamic number of rows for each operation."""
    operations = {subject.operation.name: subject for subject in subjects}
    functions = [(subject.operation.name, subject.function) for subject in subjects]

    class Exported(torch.nn.Module):
        def forward(self, *inputs: Tensor) -> list[tuple[Tensor, ...]]:
            rest = iter(inputs)
            own = {
                name: [next(rest) if isinstance(a, Tensor) else a for a in subject.expect().arguments]
                for name, subject in operations.items()
            }
            return [tensors(function(*own[name])) for name, function in functions]

    shapes = []
    for name, subject in operations.items():
        rows = torch.export.Dim(f"rows_of_{name}", min=2)
        for argument_name, argument in zip(subject.names, subject.expect().arguments, strict=True):
            if isinstance(argument, Tensor):
                shapes.append({0: rows} if subject.has_rows(argument_name) else None)
    return torch.export.export(Exported(), _inputs(subjects), dynamic_shapes={"inputs": tuple(shapes)})
