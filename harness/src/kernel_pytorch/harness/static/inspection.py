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
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from kernel_pytorch.harness.records import Part, Record, RecordError
from kernel_pytorch.harness.scratch import scratch_folder
from kernel_pytorch.harness.sources import package_digest, tree_digest
from kernel_pytorch.harness.static.compiled import Compiled
from kernel_pytorch.harness.static.cuda_code import find_cuda, library_folder, read_library
from kernel_pytorch.harness.technique import Implementation, Level, Technique

# Read when a kernel is decorated (interpreter), and the default of Triton 3.6 to 3.9, which a later one changes.
ENVIRONMENT = {"TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1", "CUDA_VISIBLE_DEVICES": ""}
PROCESSES = 2  # a compiler of today takes gigabytes
WORKER = "kernel_pytorch.harness.static.triton_code"
JUDGING = ("cuda_code.py", "gate.py", "record.py", "table.py")
"""Modules here that findings do not depend on."""


class WorkerError(RuntimeError):
    """A worker process ended without findings; the message is what it printed last."""


class Findings(Part):
    """What a worker found.

    Attributes:
        compiled: one for every compilation.
        problems: cases whose launches could not be recorded, and why.
        launches: how many distinct compilations both grids lead to (Triton).
        kernels: by implementation ("operation/implementation") and bench case the digest of its Triton launches.
        not_compiled: why the CUDA kernels are not known here.
    """

    compiled: tuple[Compiled, ...] = ()
    problems: tuple[str, ...] = ()
    launches: int = 0
    kernels: dict[str, dict[str, str]] = Field(default_factory=dict)
    not_compiled: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether every kernel of the technique is among them."""
        return not self.not_compiled


class _Cached(Record):
    key: str
    findings: Findings


@dataclass(frozen=True)
class Inspection:
    """The findings about one technique on one architecture, and whether they were known before."""

    technique: Technique
    arch: str
    findings: Findings
    cached: bool


def inspect(
    techniques: Sequence[Technique],
    archs: Sequence[str],
    *,
    everything: bool = False,
    on_done: Callable[[Inspection], None] = lambda inspection: None,
) -> list[Inspection]:
    """Compile the Triton kernels of these techniques for these architectures, two at a time where there are two cores.

    Kernels in CUDA C++ are those of the compiled library.

    What a kernel does with a float64 scalar is decided before the architecture matters, so that is looked at on the
    first architecture alone.

    Raises:
        WorkerError: a worker could not do its work.
    """

    def answer(about: tuple[Technique, str]) -> Inspection:
        inspection = _look_up(*about, everything, about[1] == archs[0])
        on_done(inspection)
        return inspection

    with ThreadPoolExecutor(min(PROCESSES, len(os.sched_getaffinity(0)))) as pool:
        return list(pool.map(answer, [(t, arch) for t in techniques if has_kernels(t) for arch in archs]))


def triton_level(technique: Technique) -> list[Implementation]:
    """The implementations that launch Triton kernels."""
    return [i for o in technique.operations for i in o.implementations if i.level is Level.TRITON]


def has_kernels(technique: Technique) -> bool:
    """Whether a technique has custom kernels, in Triton or in CUDA C++."""
    return bool(triton_level(technique)) or library_folder(technique) is not None


def _look_up(technique: Technique, arch: str, everything: bool, float64_scalars: bool) -> Inspection:
    found, cached = Findings(), True
    if triton_level(technique):
        found, cached = _of_triton(technique, arch, everything, float64_scalars)
    folder = library_folder(technique)
    if folder is not None:
        try:
            compiled, why = find_cuda(folder, arch)
        except RecordError as error:
            raise WorkerError(str(error)) from error
        both = {"compiled": found.compiled + compiled, "not_compiled": (why,) if why else ()}
        found = found.model_copy(update=both)
    return Inspection(technique, arch, found, cached)


def _of_triton(technique: Technique, arch: str, everything: bool, float64_scalars: bool) -> tuple[Findings, bool]:
    """What the Triton kernels compile to, and whether that was known before."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "kernel-pytorch", "static")
    place = base / f"{technique.name}-{arch}{'-all' if everything else ''}.json"
    request = json.dumps([technique.name, arch, everything, float64_scalars])
    key = _digest([request, sys.version, inputs_key(technique)])
    with contextlib.suppress(RecordError):
        known = _Cached.load(place)
        if known.key == key:
            return known.findings, True
    with scratch_folder() as folder:
        file = Path(folder, "findings.json")
        command = [sys.executable, "-m", WORKER, request, str(file)]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | ENVIRONMENT)  # noqa: S603
        if done.returncode != 0:
            printed = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
            raise WorkerError(f"{technique.name} for {arch}: exit code {done.returncode}\n{printed}")
        findings = Findings.model_validate_json(file.read_text(encoding="utf-8"))
    if not findings.problems and not any(compiled.error for compiled in findings.compiled):
        _Cached(key=key, findings=findings).save(place)
    return findings, False


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()


def inputs_key(technique: Technique) -> str:
    """Digest of all that the findings depend on: the package, cases, compilers, their settings, and this package.

    A compiled library contributes only the sources of its CUDA kernels.

    Raises:
        RecordError: a compiled library has no record.
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


def cuda_sources(folder: Path) -> dict[str, str]:
    """By operator the digest of the sources that a library's CUDA code was compiled from, as the build has it.

    Raises:
        RecordError: the library has no record.
    """
    return {name: digests["cuda"] for name, digests in read_library(folder)["operators"].items()}
