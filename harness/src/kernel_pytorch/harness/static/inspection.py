"""Everything about a technique's kernels: from the cache where nothing has changed, else from worker processes."""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect as python_inspect
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from kernel_pytorch.harness.records import write_atomically
from kernel_pytorch.harness.scratch import scratch_folder
from kernel_pytorch.harness.sources import digest, kernel_files
from kernel_pytorch.harness.static.compiled import Compiled
from kernel_pytorch.harness.static.kernel_sources import UnitsError, cuda_units, triton_level, units_digest
from kernel_pytorch.harness.static.nvcc import find_nvcc
from kernel_pytorch.harness.static.resources import ToolMissingError
from kernel_pytorch.harness.technique import Technique

# Read when a kernel is decorated (interpreter), and the default of Triton 3.6 to 3.9, which a later one changes.
ENVIRONMENT = {"TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1", "CUDA_VISIBLE_DEVICES": ""}
PROCESSES = 2  # a compiler of today takes gigabytes
WORKER = "kernel_pytorch.harness.static.worker"
JUDGING = ("gate.py", "record.py", "table.py")
"""Modules here that findings do not depend on."""


class WorkerError(RuntimeError):
    """A worker process ended without findings; the message is what it printed last."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Request(_Record):
    """What a worker is asked.

    Attributes:
        technique: its name.
        arch: a key of `ARCHITECTURES`.
        everything: every distinct compilation of both grids instead of the covering set.
        float64_scalars: compile kernels with float scalars once more, with these typed float64.
    """

    technique: str
    arch: str
    everything: bool
    float64_scalars: bool


class Findings(_Record):
    """What a worker found.

    Attributes:
        compiled: one for every compilation.
        problems: cases whose launches could not be recorded, and why.
        launches: how many distinct compilations both grids lead to (Triton).
        instantiations: how many CUDA kernels the units hold.
        nvcc: version of the compiler that compiled them; empty if none did.
        not_compiled: why the CUDA kernels were not compiled here.
        unread: names of CUDA units that did not compile, so that nobody knows their kernels.
    """

    compiled: tuple[Compiled, ...] = ()
    problems: tuple[str, ...] = ()
    launches: int = 0
    instantiations: int = 0
    nvcc: str = ""
    not_compiled: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether every kernel of the technique is among them."""
        return not (self.not_compiled or self.unread)


class _Cached(_Record):
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
    """Compile the kernels of these techniques for these architectures, two at a time where there are two cores.

    What a kernel does with a float64 scalar is decided before the architecture matters, so that is looked at on the
    first architecture alone.

    Raises:
        WorkerError: a worker could not do its work.
    """
    requests = [
        (
            technique,
            Request(technique=technique.name, arch=arch, everything=everything, float64_scalars=arch == archs[0]),
        )
        for technique in techniques
        if triton_level(technique) or technique.cuda_units is not None
        for arch in archs
    ]

    def answer(request: tuple[Technique, Request]) -> Inspection:
        inspection = _look_up(*request)
        on_done(inspection)
        return inspection

    with ThreadPoolExecutor(min(PROCESSES, len(os.sched_getaffinity(0)))) as pool:
        return list(pool.map(answer, requests))


def _look_up(technique: Technique, request: Request) -> Inspection:
    place = cache_folder() / f"{request.technique}-{request.arch}{'-all' if request.everything else ''}.json"
    try:
        key = _key(technique, request)
    except (UnitsError, ToolMissingError) as error:
        raise WorkerError(str(error)) from error
    try:
        known = _Cached.model_validate_json(place.read_text(encoding="utf-8"))
    except (OSError, ValidationError):
        known = None
    if known is not None and known.key == key:
        return Inspection(technique, request.arch, known.findings, cached=True)
    findings = _ask_worker(request)
    if findings.complete and not findings.problems and not any(compiled.error for compiled in findings.compiled):
        place.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(place, _Cached(key=key, findings=findings).model_dump_json())
    return Inspection(technique, request.arch, findings, cached=False)


def cache_folder() -> Path:
    """Where findings are kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kernel-pytorch" / "static"


def _key(technique: Technique, request: Request) -> str:
    """Changes with all that can change the findings of a request."""
    return hashlib.sha256(repr([request.model_dump_json(), sys.version, inputs_key(technique)]).encode()).hexdigest()


def inputs_key(technique: Technique) -> str:
    """Changes with all that the findings depend on: sources, cases, compilers, their settings, and this package.

    Raises:
        UnitsError: a CUDA unit names files that are not there.
        ToolMissingError: a compiler does not say its version.
    """
    in_triton = triton_level(technique)
    declared = {python_inspect.getsourcefile(operation.inputs) for operation in technique.operations}
    files = {file for implementation in in_triton for file in kernel_files(implementation)}
    files |= {Path(file) for file in declared if file}
    files |= {file for file in Path(__file__).parent.glob("*.py") if file.name not in JUDGING}
    cases = [case.label for o in technique.operations for g in (o.test_grid, o.bench_grid) for case in g.cases("cuda")]
    compilers = ("torch", "triton") if in_triton else ("torch",)
    versions = [importlib.metadata.version(name) for name in compilers]
    prefixes = ("TRITON_", "NVCC_")
    settings = sorted(f"{k}={v}" for k, v in os.environ.items() if k.startswith(prefixes) and k not in ENVIRONMENT)
    ordered = sorted(files, key=lambda file: (file.name, file.read_bytes()))  # wherever they are installed
    parts = [digest(ordered), cases, versions, settings]
    if units := cuda_units(technique):
        nvcc = find_nvcc()
        parts += [units_digest(units), repr([unit.options for unit in units]), nvcc.version if nvcc else ""]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _ask_worker(request: Request) -> Findings:
    with scratch_folder() as folder:
        file = Path(folder, "findings.json")
        command = [sys.executable, "-m", WORKER, request.model_dump_json(), str(file)]
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | ENVIRONMENT)  # noqa: S603
        if done.returncode != 0:
            printed = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
            raise WorkerError(f"{request.technique} for {request.arch}: exit code {done.returncode}\n{printed}")
        return Findings.model_validate_json(file.read_text(encoding="utf-8"))
