"""The record of what kernels compile to: one JSON file per technique, with one line per compiled kernel."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from kernel_pytorch.harness.errors import UserError
from kernel_pytorch.harness.records import Name, Record, write_atomically
from kernel_pytorch.harness.static.compiled import Compiled
from kernel_pytorch.harness.static.cuda_code import cuda_sources, library_folder, read_library
from kernel_pytorch.harness.static.gate import Violation, violations
from kernel_pytorch.harness.static.inspection import Inspection, inputs_key, triton_level
from kernel_pytorch.harness.static.limits import ARCHITECTURES
from kernel_pytorch.harness.technique import Technique

SCHEMA_VERSION: Literal[1] = 1
SUFFIX = ".kernels.json"
"""Tells it from results, which are `<device>/<technique>.json`."""


class StaticRecord(Record):
    """Everything that was found out about the kernels of one technique.

    Attributes:
        key: changes with all that was found; empty where an architecture or a compiler was missing.
        kernels: by architecture, implementation ("operation/implementation") and bench case the digest of what is
            launched in Triton: PTX without names, warps, grid, and how often.
        sources: by operator the digest of the sources of its CUDA kernels.
        triton: version of the compiler of its Triton kernels; empty if it has none.
        nvcc: the compiler of its CUDA kernels and its version; empty if none was compiled.
        broken: broken contracts, and cases whose launches could not be recorded.
        not_compiled: why CUDA kernels are not known.
        compiled: one per kernel, configuration and architecture.
    """

    kind = "a record of compiled kernels"

    schema_version: Literal[1] = SCHEMA_VERSION
    technique: Name
    key: str = ""
    kernels: dict[Name, dict[Name, dict[str, str]]] = Field(default_factory=dict)
    sources: dict[Name, str] = Field(default_factory=dict)
    triton: str
    nvcc: str
    broken: tuple[Violation, ...]
    not_compiled: tuple[str, ...]
    compiled: tuple[Compiled, ...]

    def save(self, path: Path) -> None:
        """Write the file in one step."""
        head = self.model_dump_json(indent=1, exclude={"compiled"}).removesuffix("\n}")
        lines = ",\n".join(c.model_dump_json(exclude_defaults=True) for c in self.compiled)
        write_atomically(path, f'{head},\n "compiled": [\n{lines}\n]}}\n')


def record_file(results: Path, technique: str) -> Path:
    """Where the record of a technique is: beside the folders of devices, since it depends on none."""
    return results / "static" / f"{technique}{SUFFIX}"


def summarize(technique: Technique, inspections: Sequence[Inspection]) -> StaticRecord:
    """Join what was found about one technique on all architectures, of which there is at least one."""
    compiled = tuple(c for i in inspections for c in i.compiled)
    problems = [
        Violation(technique.name, "", i.arch, "", "launches can be recorded", "no error", problem)
        for i in inspections
        for problem in i.problems
    ]
    folder = library_folder(technique)
    not_compiled = tuple(dict.fromkeys(i.not_compiled for i in inspections if i.not_compiled))
    everywhere = not (not_compiled or problems) and {i.arch for i in inspections} == {*ARCHITECTURES}
    return StaticRecord(
        technique=technique.name,
        key=inputs_key(technique) if everywhere else "",
        kernels={i.arch: i.kernels for i in inspections if i.kernels},
        sources=cuda_sources(folder) if folder is not None else {},
        triton=importlib.metadata.version("triton") if triton_level(technique) else "",
        nvcc=(read_library(folder).get("nvcc") or "") if folder is not None else "",
        broken=tuple(dict.fromkeys([*problems, *violations(technique, compiled, complete=not not_compiled)])),
        not_compiled=not_compiled,
        compiled=compiled,
    )


load = StaticRecord.load


def known(technique: Technique, results: Path) -> StaticRecord | None:
    """The record of what the kernels of a technique compile to now, its contracts checked again.

    None where there is none, or where anything changed since that the record depends on.
    """
    try:
        record = load(record_file(results, technique.name))
        if not record.key or record.key != inputs_key(technique):
            return None
    except UserError:  # the command that compiles says what is missing
        return None
    return record.model_copy(update={"broken": tuple(violations(technique, record.compiled, complete=True))})


def changed_kernels(before: StaticRecord, now: StaticRecord) -> list[str]:
    """Name the implementations and operators of C++ whose kernels differ from the recorded ones.

    Args:
        before: the record. What another Triton compiled is not compared.
        now: what the present kernels compile to, on all architectures of the record or on some of them.
    """
    changed = {f"{name}/cuda" for name, digest in now.sources.items() if before.sources.get(name) != digest}
    if before.triton == now.triton:
        changed |= {
            name
            for arch, implementations in now.kernels.items()
            for name, cases in implementations.items()
            if before.kernels.get(arch, {}).get(name) != cases
        }
    return sorted(changed)
