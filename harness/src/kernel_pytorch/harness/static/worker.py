"""Compiles the kernels of one technique for one architecture and writes what it found; a process of its own.

A process of its own, because Triton decides at import whether kernels are interpreted, and because two run at a time.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

import torch

from kernel_pytorch.harness.discovery import discover
from kernel_pytorch.harness.interpreter import is_interpreting
from kernel_pytorch.harness.static.compiled import Compiled
from kernel_pytorch.harness.static.inspection import Findings, Request
from kernel_pytorch.harness.static.instructions import count_instructions
from kernel_pytorch.harness.static.launches import Launch, record_launches, use_architecture
from kernel_pytorch.harness.static.limits import ARCHITECTURES
from kernel_pytorch.harness.static.plan import covering_set, every_launch
from kernel_pytorch.harness.static.resources import ToolMissingError, measure_resources
from kernel_pytorch.harness.technique import Level, Technique


def find(request: Request) -> Findings:
    """Record the launches, choose among them, compile and read the result."""
    capability = ARCHITECTURES[request.arch].capability
    use_architecture(capability)
    launches, problems = _record(discover().get(request.technique))
    distinct = every_launch(launches)
    chosen = distinct if request.everything else covering_set(launches)
    compiled = [_read(launch, request.arch) for launch in chosen]
    if request.float64_scalars:
        compiled += [_read(launch, request.arch, float64=True) for launch in chosen if launch.float_scalars]
    if not distinct and not problems:
        problems.append("no Triton kernel was launched, so nothing was compiled")
    return Findings(compiled=tuple(compiled), problems=tuple(problems), launches=len(distinct))


def _record(technique: Technique) -> tuple[list[Launch], list[str]]:
    """Launches of all Triton-level implementations on both grids, and what went wrong on the way."""
    launches: list[Launch] = []
    problems: dict[str, list[str]] = defaultdict(list)
    for operation in technique.operations:
        functions = [i.load() for i in operation.implementations if i.level is Level.TRITON]
        # Nothing is computed, so the shapes that only a GPU finishes in time are no harder than the others.
        cases = [(case, bench) for grid, bench in ((operation.bench_grid, True), (operation.test_grid, False))
                 for case in grid.cases("cuda")]  # fmt: skip
        for function in functions:
            for case, bench in cases:
                try:
                    launches += record_launches(operation, function, case, bench=bench)
                except Exception as error:  # the next case may be all right
                    problems[_one_line(error)].append(f"{operation.name}, {case.label}")
    return launches, [f"{message}: {len(cases)} cases, {cases[0]} first" for message, cases in problems.items()]


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
        return about.model_copy(update={"error": _one_line(error)})
    # A kernel with specialised warps has more of them than were asked for.
    facts = {"warps": metadata.num_warps, "shared_bytes": metadata.shared}
    return about.model_copy(update=facts | vars(resources) | vars(count_instructions(ptx)))


def _one_line(error: Exception) -> str:
    """Compilers explain themselves over pages; the last words are the reason."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) < 400 else f"{text[:200]} ... {text[-200:]}"


def main(arguments: list[str]) -> None:
    """Read a request (JSON), write findings to the file that the second argument names."""
    if is_interpreting():
        sys.exit("TRITON_INTERPRET=1 is set: kernels would be interpreted, and nothing compiled")
    torch.set_num_threads(1)
    findings = find(Request.model_validate_json(arguments[0]))
    Path(arguments[1]).write_text(findings.model_dump_json())


if __name__ == "__main__":
    main(sys.argv[1:])
