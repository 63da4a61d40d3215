"""Everything about a technique's kernels: from the cache where nothing has changed, else from worker processes."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import inspect as python_inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pydantic import Field

from kernel_pytorch.harness.errors import UserError
from kernel_pytorch.harness.records import Record
from kernel_pytorch.harness.sources import package_digest, tree_digest
from kernel_pytorch.harness.static.compiled import Compiled
from kernel_pytorch.harness.static.cuda_code import cuda_sources, find_cuda, library_folder
from kernel_pytorch.harness.technique import Implementation, Level, Technique

# Read when a kernel is decorated (interpreter), and the default of Triton 3.6 to 3.9, which a later one changes.
ENVIRONMENT = {"TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1", "CUDA_VISIBLE_DEVICES": ""}
PROCESSES = 8  # at most, and one a core: a compiler of today takes gigabytes
WORKER = "kernel_pytorch.harness.static.triton_code"
JUDGING = ("cuda_code.py", "gate.py", "record.py", "table.py")
"""Modules here that an inspection does not depend on."""


class WorkerError(UserError):
    """A worker process ended without a result; the message is what it printed last."""


class Inspection(Record):
    """What was found out about one technique on one architecture.

    Attributes:
        technique: its name.
        arch: a key of `ARCHITECTURES`.
        key: digest of what the Triton kernels depend on.
        compiled: one for every compilation.
        problems: cases whose launches could not be recorded, and why.
        launches: how many distinct compilations both grids lead to (Triton).
        kernels: by implementation ("operation/implementation") and bench case the digest of its Triton launches.
        not_compiled: why the CUDA kernels are not known here; empty if they are.
        cached: whether the Triton kernels were known before.
    """

    technique: str
    arch: str
    key: str = ""
    compiled: tuple[Compiled, ...] = ()
    problems: tuple[str, ...] = ()
    launches: int = 0
    kernels: dict[str, dict[str, str]] = Field(default_factory=dict)
    not_compiled: str = ""
    cached: bool = True


def inspect(
    techniques: Sequence[Technique],
    archs: Sequence[str],
    *,
    everything: bool = False,
    on_done: Callable[[Inspection], None] = lambda inspection: None,
) -> list[Inspection]:
    """Compile the Triton kernels of these techniques for these architectures, one on each of up to 8 cores.

    Kernels in CUDA C++ are those of the compiled library.

    What a kernel does with a float64 scalar is decided before the architecture matters, so that is looked at on the
    first architecture alone.

    Raises:
        WorkerError: a worker could not do its work.
        UserError: a compiled library has no record.
    """

    def answer(about: tuple[Technique, str]) -> Inspection:
        technique, arch = about
        found = Inspection(technique=technique.name, arch=arch)
        if triton_level(technique):
            found = _of_triton(technique, arch, everything, arch == archs[0])
        if (folder := library_folder(technique)) is not None:
            compiled, why = find_cuda(folder, arch)
            found = found.model_copy(update={"compiled": found.compiled + compiled, "not_compiled": why})
        on_done(found)
        return found

    with ThreadPoolExecutor(min(PROCESSES, len(os.sched_getaffinity(0)))) as pool:
        return list(pool.map(answer, [(t, arch) for t in techniques if has_kernels(t) for arch in archs]))


def triton_level(technique: Technique) -> list[Implementation]:
    """The implementations that launch Triton kernels."""
    return [i for o in technique.operations for i in o.implementations if i.level is Level.TRITON]


def has_kernels(technique: Technique) -> bool:
    """Whether a technique has custom kernels, in Triton or in CUDA C++."""
    return bool(triton_level(technique)) or library_folder(technique) is not None


def _of_triton(technique: Technique, arch: str, everything: bool, float64_scalars: bool) -> Inspection:
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "kernel-pytorch", "static")
    place = base / f"{technique.name}-{arch}{'-all' if everything else ''}.json"
    request = [technique.name, arch, everything, float64_scalars]
    key = _digest([request, sys.version, inputs_key(technique)])
    with contextlib.suppress(UserError):
        known = Inspection.load(place)
        if known.key == key and not known.problems and not any(compiled.error for compiled in known.compiled):
            return known.model_copy(update={"cached": True})
    command = [sys.executable, "-m", WORKER, json.dumps([*request, key]), str(place)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | ENVIRONMENT)  # noqa: S603
    if done.returncode != 0:
        printed = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        raise WorkerError(f"{technique.name} for {arch}: exit code {done.returncode}\n{printed}")
    return Inspection.load(place)


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def inputs_key(technique: Technique) -> str:
    """Digest of all that an inspection depends on: the package, cases, compilers, their settings, and this package.

    A compiled library contributes only the sources of its CUDA kernels.

    Raises:
        UserError: a compiled library has no record.
    """
    folder = library_folder(technique)
    parts = [] if folder is None else [repr(cuda_sources(folder))]
    if triton_level(technique):
        declared = {python_inspect.getsourcefile(operation.inputs) for operation in technique.operations}
        files = {file for file in Path(__file__).parent.glob("*.py") if file.name not in JUDGING}
        files |= {Path(file) for file in declared if file}
        grids = [grid for o in technique.operations for grid in (o.test_grid, o.bench_grid)]
        cases = [case.label for grid in grids for case in grid.cases("cuda")]
        versions = [importlib.metadata.version(name) for name in ("torch", "triton")]
        settings = sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith("TRITON_") and k not in ENVIRONMENT)
        parts += [package_digest(technique), tree_digest(files), repr((cases, versions, settings))]
    return _digest(parts)
