"""The Triton kernels of a technique, compiled for one architecture: a covering set of what its cases launch.

This is the program of a separate process, because Triton decides at import whether kernels are interpreted, and because
two run at a time.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from triton import knobs
from triton.runtime.cache import get_cache_manager

from kernel_pytorch.harness.discovery import discover
from kernel_pytorch.harness.static.compiled import Compiled
from kernel_pytorch.harness.static.inspection import Inspection
from kernel_pytorch.harness.static.instructions import code_digest, count_instructions, short_digest
from kernel_pytorch.harness.static.launches import (
    Launch,
    covering_set,
    distinct_launches,
    record_launches,
    use_architecture,
)
from kernel_pytorch.harness.static.limits import ARCHITECTURES
from kernel_pytorch.harness.technique import Level, Technique

KEPT = "ptxas.log"
NEEDS = re.compile(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\s.*Used (\d+) registers"
)


def find_triton(technique: Technique, arch: str, everything: bool, float64_scalars: bool, key: str) -> Inspection:
    """Record the launches, choose among them, compile and read the result.

    Args:
        technique: whose kernels.
        arch: a key of `ARCHITECTURES`.
        everything: every distinct compilation of both grids instead of the covering set.
        float64_scalars: compile kernels with float scalars once more, with these typed float64.
        key: digest of what all that depends on.
    """
    use_architecture(ARCHITECTURES[arch].capability)
    launches, problems = _record(technique)
    distinct = distinct_launches(launches)
    chosen = distinct if everything else covering_set(distinct)
    compiled = [_read(launch, arch) for launch in chosen]
    codes = {(launch.function, launch.key): each for launch, each in zip(chosen, compiled, strict=True)}
    if float64_scalars:
        compiled += [_read(launch, arch, float64=True) for launch in chosen if launch.float_scalars]
    if not distinct and not problems:
        problems.append("no Triton kernel was launched, so nothing was compiled")
    return Inspection(
        technique=technique.name,
        arch=arch,
        key=key,
        compiled=tuple(compiled),
        problems=tuple(problems),
        launches=len(distinct),
        kernels=_kernels([launch for launch in launches if launch.bench], codes),
        cached=False,
    )


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
    # The public functions call their kernels on CPU tensors: these are recorded, and do not run.
    public = any(operation.function for operation in technique.operations)
    available = mock.patch.object(technique.ladder(), "unavailable", return_value=None) if public else None
    # Nothing is computed, so the shapes that only a GPU finishes in time are no harder than the others.
    every = [
        (operation, i.name, i.load(), i.partial, case, grid is operation.bench_grid)
        for operation in technique.operations
        for i in operation.implementations if i.level is Level.TRITON
        for grid in (operation.bench_grid, operation.test_grid)
        for case in grid.cases("cuda")
    ]  # fmt: skip
    with available or contextlib.nullcontext():
        for operation, name, function, partial, case, bench in every:
            try:
                launches += record_launches(operation, name, function, case, bench=bench)
            except Exception as error:  # the next case may be all right
                if not (partial and isinstance(error, NotImplementedError)):  # else it says no to a case
                    problems[_one_line(error)].append(f"{operation.name}, {case.label}")
    return launches, [f"{message}: {len(cases)} cases, {cases[0]} first" for message, cases in problems.items()]


def _read(launch: Launch, arch: str, *, float64: bool = False) -> Compiled:
    """Compile one launch and read the code, and what ptxas says of its needs."""
    about = Compiled(
        kernel=launch.function.__name__,
        arch=arch,
        constants=launch.constants,
        arguments=launch.arguments,
        warps=launch.options.num_warps,
        case=launch.case,
        bench=launch.bench,
        float64_scalars=launch.float_scalars if float64 else (),
    )
    try:
        kernel, said = _compile(launch, float64)
        needs = NEEDS.search(said)
        assert needs is not None, f"ptxas said nothing of what the kernel needs: {said}"
    except Exception as error:  # what does not compile is a finding
        return about.model_copy(update={"error": _one_line(error)})
    stack, stores, loads, registers = map(int, needs.groups())
    ptx, metadata = kernel.asm["ptx"], kernel.metadata
    facts = {
        "warps": metadata.num_warps,  # a kernel with specialised warps has more of them than were asked for
        "registers": registers,
        "stack_bytes": stack,
        "spill_bytes": max(stores, loads),
        "shared_bytes": metadata.shared,
        "code": code_digest(ptx, metadata.name),
    }
    return about.model_copy(update=facts | count_instructions(ptx))


def _compile(launch: Launch, float64: bool) -> tuple[Any, str]:
    """The compiled kernel, and what ptxas said, which is kept beside the kernel in Triton's cache."""
    with knobs.compilation.scope(), knobs.nvidia.scope(), contextlib.redirect_stdout(io.StringIO()) as said:
        knobs.nvidia.dump_ptxas_log = True
        kernel = launch.compile(float64=float64)
        cache = get_cache_manager(kernel.hash)
        if not said.getvalue() and (kept := cache.get_file(KEPT)) is not None:
            return kernel, Path(kept).read_text()
        if not said.getvalue():  # something else than this module has compiled it
            knobs.compilation.always_compile = True
            kernel = launch.compile(float64=float64)
    cache.put(said.getvalue(), KEPT, binary=False)
    return kernel, said.getvalue()


def _one_line(error: Exception) -> str:
    """An error as a finding: compilers explain themselves over pages; the first and the last words are the reason."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) < 400 else f"{text[:200]} ... {text[-200:]}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    name, *request = json.loads(sys.argv[1])
    find_triton(discover().get(name), *request).save(Path(sys.argv[2]))
