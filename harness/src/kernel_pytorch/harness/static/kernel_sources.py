"""What the kernels of a technique are made of: its Triton level, its CUDA units, and the digest of both."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from kernel_pytorch.harness.contracts import CudaUnit
from kernel_pytorch.harness.sources import compiled_digest, digest, kernel_files
from kernel_pytorch.harness.technique import Implementation, Level, Technique

HEADERS = {".h", ".hpp", ".hh", ".cuh", ".inl", ".inc"}
# Text and characters are matched first, so that what looks like a comment inside them is none.
TEXT_OR_COMMENT = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])\'|//[^\n]*|/\*.*?\*/', re.DOTALL)


class UnitsError(ValueError):
    """The CUDA units of a technique cannot be had, or name what is not there."""


def triton_level(technique: Technique) -> list[Implementation]:
    """The implementations that launch Triton kernels."""
    return [i for o in technique.operations for i in o.implementations if i.level is Level.TRITON]


def cuda_units(technique: Technique) -> tuple[CudaUnit, ...]:
    """The CUDA units of a technique; empty where it has none, or where they are not here.

    Raises:
        UnitsError: the function cannot be imported, or a unit names a file or folder that does not exist.
    """
    if technique.cuda_units is None:
        return ()
    module, _, function = technique.cuda_units.partition(":")
    try:
        units = tuple(getattr(importlib.import_module(module), function)())
    except (ImportError, AttributeError) as error:
        raise UnitsError(f"{technique.name}: cuda_units={technique.cuda_units!r} cannot be loaded: {error}") from error
    for unit in units:
        for path, there in [(unit.source, unit.source.is_file()), *((path, path.is_dir()) for path in unit.include)]:
            if not there:
                raise UnitsError(f"{technique.name}: the CUDA unit {unit.source.name} names {path}, which is not there")
    return units


def kernel_digest(technique: Technique) -> str:
    """The digest of all sources of a technique's kernels, those in Triton and in CUDA C++; empty if it has none."""
    files = {file for implementation in triton_level(technique) for file in kernel_files(implementation)}
    of_triton = digest(sorted(files)) if files else ""
    of_cuda = units_digest(cuda_units(technique))
    return hashlib.sha256(f"{of_triton}\0{of_cuda}".encode()).hexdigest() if of_cuda else of_triton


def units_digests(technique: Technique) -> dict[str, str]:
    """The digest of kernels that results carry of what was compiled from each CUDA unit, by `folder/cuda`.

    A unit that no library here was compiled from has none.
    """
    package = (technique.cuda_units or "").partition(".technique")[0]
    found = {}
    for unit in cuda_units(technique):
        name = unit.source.absolute().parent.name
        with contextlib.suppress(ModuleNotFoundError):  # a unit in no package has no library
            found[f"{name}/{Level.CUDA.value}"] = compiled_digest(f"{package}.{name}", "cuda")
    return {name: digest([], compiled) for name, compiled in found.items() if compiled}


def units_digest(units: Iterable[CudaUnit]) -> str:
    """SHA-256 over CUDA sources, the headers beside them and in their folders, and their options; empty for no unit.

    Comments do not count, nor does where things lie: an option that is a path is left out.
    """
    parts = []
    for unit in units:
        folders = (unit.source.parent, *unit.include)
        headers = [(path, folder) for folder in folders for path in folder.rglob("*") if path.suffix in HEADERS]
        named = sorted((path.relative_to(folder).as_posix(), _code(path)) for path, folder in headers)
        options = [option for option in unit.options if os.sep not in option]
        parts.append((unit.source.name, _code(unit.source), named, options))
    return hashlib.sha256(repr(sorted(parts)).encode()).hexdigest() if parts else ""


def _code(path: Path) -> str:
    """The lines of a source that are neither empty nor a comment."""
    text = TEXT_OR_COMMENT.sub(lambda found: " " if found[0].startswith("/") else found[0], path.read_text("utf-8"))
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip())
