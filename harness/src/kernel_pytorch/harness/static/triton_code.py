"""The Triton kernels of a technique, compiled for one architecture: a covering set of what its cases launch.

This is the program of a separate process, because Triton decides at import whether kernels are interpreted, and because
two run at a time.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from kernel_pytorch.harness.discovery import discover
from kernel_pytorch.harness.static.compiled import Compiled, one_line
from kernel_pytorch.harness.static.inspection import Findings
from kernel_pytorch.harness.static.instructions import code_digest, count_instructions, short_digest
from kernel_pytorch.harness.static.launches import Launch, covering_set, every_launch, record_launches, use_architecture
from kernel_pytorch.harness.static.limits import ARCHITECTURES
from kernel_pytorch.harness.static.resources import ToolMissingError, measure_resources
from kernel_pytorch.harness.technique import Level, Operation, Technique


def find_triton(technique: Technique, arch: str, *, everything: bool, float64_scalars: bool) -> Findings:
    """Record the launches, choose among them, compile and read the result.

    Args:
        technique: whose kernels.
        arch: a key of `ARCHITECTURES`.
        everything: every distinct compilation of both grids instead of the covering set.
        float64_scalars: compile kernels with float scalars once more, with these typed float64.
    """
    use_architecture(ARCHITECTURES[arch].capability)
    launches, problems = _record(technique)
    distinct = every_launch(launches)
    chosen = distinct if everything else covering_set(launches)
    compiled = [_read(launch, arch) for launch in chosen]
    codes = {(launch.function, launch.key): each for launch, each in zip(chosen, compiled, strict=True)}
    if float64_scalars:
        compiled += [_read(launch, arch, float64=True) for launch in chosen if launch.float_scalars]
    if not distinct and not problems:
        problems.append("no Triton kernel was launched, so nothing was compiled")
    kernels = _kernels([launch for launch in launches if launch.bench], codes)
    return Findings(compiled=tuple(compiled), problems=tuple(problems), launches=len(distinct), kernels=kernels)


def _kernels(launches: list[Launch], codes: Mapping[tuple[Any, str], Compiled]) -> dict[str, dict[str, str]]:
    """By implementation and bench case the digest of what it launches, in order: PTX, warps and grid of each launch."""
    found: dict[str, dict[str, list[tuple[str, int | None, tuple[int, ...]]]]] = {}
    for launch in launches:
        compiled = codes[launch.function, launch.key]
        case = launch.case.partition(", ")[2]
        what = (compiled.code or compiled.error, compiled.warps, launch.grid)
        found.setdefault(launch.implementation, {}).setdefault(case, []).append(what)
    return {name: {case: short_digest(each) for case, each in cases.items()} for name, cases in found.items()}


def _record(technique: Technique) -> tuple[list[Launch], list[str]]:
    """Launches of all Triton-level implementations on both grids, and what went wrong on the way."""
    launches: list[Launch] = []
    problems: dict[str, list[str]] = defaultdict(list)
    with _available(technique):
        for operation in technique.operations:
            _record_operation(operation, launches, problems)
    return launches, [f"{message}: {len(cases)} cases, {cases[0]} first" for message, cases in problems.items()]


@contextlib.contextmanager
def _available(technique: Technique) -> Iterator[None]:
    """Let the technique's public functions call their kernels on CPU tensors: these are recorded, and do not run."""
    if not any(operation.function for operation in technique.operations):
        yield
        return
    with mock.patch.object(technique.ladder(), "unavailable", return_value=None):
        yield


def _record_operation(operation: Operation, launches: list[Launch], problems: dict[str, list[str]]) -> None:
    functions = [(i.name, i.load(), i.partial) for i in operation.implementations if i.level is Level.TRITON]
    # Nothing is computed, so the shapes that only a GPU finishes in time are no harder than the others.
    cases = [(case, bench) for grid, bench in ((operation.bench_grid, True), (operation.test_grid, False))
             for case in grid.cases("cuda")]  # fmt: skip
    for name, function, partial in functions:
        for case, bench in cases:
            try:
                launches += record_launches(operation, name, function, case, bench=bench)
            except Exception as error:  # the next case may be all right
                if partial and isinstance(error, NotImplementedError):
                    continue  # a kernel that says no to a case, or to an architecture
                problems[one_line(error)].append(f"{operation.name}, {case.label}")


def _read(launch: Launch, arch: str, *, float64: bool = False) -> Compiled:
    """Compile one launch and read the code."""
    about = Compiled(
        kernel=launch.kernel,
        arch=arch,
        constants=launch.constants,
        arguments=launch.arguments,
        warps=launch.options.num_warps,
        case=launch.case,
        bench=launch.bench,
        float64_scalars=launch.float_scalars if float64 else (),
    )
    try:
        kernel = (launch.with_float64_scalars() if float64 else launch).compile()
        ptx, metadata = kernel.asm["ptx"], kernel.metadata
        resources = measure_resources(metadata.name, kernel.asm["cubin"], ptx, ARCHITECTURES[arch].capability)
    except ToolMissingError:
        raise
    except Exception as error:  # what does not compile is a finding
        return about.model_copy(update={"error": one_line(error)})
    # A kernel with specialised warps has more of them than were asked for.
    facts = {"warps": metadata.num_warps, "shared_bytes": metadata.shared, "code": code_digest(ptx, metadata.name)}
    return about.model_copy(update=facts | resources | vars(count_instructions(ptx)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    name, arch, everything, float64_scalars = json.loads(sys.argv[1])
    found = find_triton(discover().get(name), arch, everything=everything, float64_scalars=float64_scalars)
    Path(sys.argv[2]).write_text(found.model_dump_json())
