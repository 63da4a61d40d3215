"""Carrying device times over to changed sources, where the compiled kernels are provably the same.

What was measured and what is here now are compared as the records of compiled kernels have them, which are committed
beside the results: of each launch of the bench grids, on the architecture that was measured, its types, constants,
warps and the digest of its PTX, made by one compiler; of C++ all kernels of the unit. Host times and whatever else
depends on the code around the kernels is not carried, nor is anything measured on a CPU.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from kernel_pytorch.harness.discovery import discover
from kernel_pytorch.harness.results import Carried, Results
from kernel_pytorch.harness.sources import compiled_modules, kernels_digest, technique_digests
from kernel_pytorch.harness.static.kernel_sources import kernel_digest
from kernel_pytorch.harness.static.record import StaticRecord, load, record_file
from kernel_pytorch.harness.technique import Level, Technique


class CarryError(ValueError):
    """Nothing can be carried; the message says why, and what to do."""


def carry(results: Results, technique: Technique, folder: Path) -> tuple[Results, list[str]]:
    """Let device times stand for the present kernels where these compile to what was measured.

    Args:
        results: of a GPU.
        technique: the one that is installed.
        folder: of all results, within a git checkout: it holds `static/`.

    Returns:
        The results with what was carried, and a line for each implementation that has changed.

    Raises:
        CarryError: they are of a CPU or older than digests of kernels, or no record of compiled kernels is of the
            present sources.
    """
    environment = results.machine.environment
    if environment.compute_capability is None:
        raise CarryError("times of a CPU are not carried; measure them again")
    arch = "sm_" + environment.compute_capability.replace(".", "")
    now = technique_digests(technique, "cuda", kernels_digest)
    present = _present(technique, folder)
    if not results.kernels:
        raise CarryError("these results are older than the digests of kernels in them; measure them again")
    carried, kernels, lines = dict(results.carried), dict(results.kernels), []
    for label, held in results.kernels.items():
        if held == now.get(label):
            continue
        measured = carried[label].kernels if label in carried else held
        unit = _unit_of(technique, label)
        if unit is None and label not in present.kernels:
            lines.append(f"{label}: not carried: only kernels in Triton and C++ are compared; measure it again")
            continue
        if unit is None:
            found = compared(technique.name, label, measured, present, arch, folder)
        else:
            library, name = unit
            name = f"{name}/{Level.CUDA.value}"
            found = compared(library.name, name, measured, _present(library, folder), arch, folder)
        if isinstance(found, str):
            lines.append(f"{label}: not carried: {found}")
            continue
        carried[label], kernels[label] = found, now[label]
        lines.append(f"{label}: carried: {found.compared}")
    return results.model_copy(update={"carried": carried, "kernels": kernels}), lines


def _present(technique: Technique, folder: Path) -> StaticRecord:
    """The record of what the present kernels compile to."""
    file = record_file(folder, technique.name)
    present = load(file)
    if present.sources != kernel_digest(technique):
        raise CarryError(
            f"{file} is of other sources; `kernel-pytorch static {technique.name} --json {folder}` makes it anew"
        )
    return present


def _unit_of(technique: Technique, label: str) -> tuple[Technique, str] | None:
    """The technique whose C++ a level was compiled from, and the folder of its unit; None if it is not of one unit."""
    operation, _, name = label.partition("/")
    for implementation in (i for o in technique.operations if o.name == operation for i in o.implementations):
        if implementation.name == name and implementation.level is Level.CUDA:
            modules = compiled_modules(implementation)
            _, package, unit, *_ = modules[0].split(".")
            library = discover().techniques.get(package.replace("_", "-"))
            return (library, unit) if len(modules) == 1 and library is not None and library.cuda_units else None
    return None


def compared(name: str, label: str, measured: str, present: StaticRecord, arch: str, folder: Path) -> Carried | str:
    """What shows that kernels are the same as when they were measured, or why nothing does.

    Args:
        name: of the technique that the record of compiled kernels is of.
        label: what that record has their digest under.
        measured: the digest of what was measured.
        present: the record of the present kernels.
        arch: the architecture that was measured.
        folder: of all results.
    """
    in_cuda = label.endswith(f"/{Level.CUDA.value}")
    unit = label.partition("/")[0] if in_cuda else ""
    compiler = "nvcc" if in_cuda else "triton"
    for commit, before in history(record_file(folder, name)):
        if before.kernels.get(label) != measured:
            continue
        then, by = getattr(before, compiler), getattr(present, compiler)
        if then != by:
            return f"{compiler.title()} {then} compiled what was measured, {by} what is here"
        old, new = (_launches(record, arch, unit) for record in (before, present))
        if not new:
            return f"no kernel was compiled for {arch}"
        if old != new:
            return f"{len(old ^ new)} of {len(old | new)} kernels compile to something else on {arch}"
        of = unit or "the bench grids"
        what = f"the PTX of all {len(new)} kernels of {of} for {arch}, by {compiler.title()} {by}"
        return Carried(kernels=measured, commit=commit, compared=what)
    return "no committed record of compiled kernels is of the sources that were measured"


def _launches(record: StaticRecord, arch: str, unit: str) -> set[str]:
    """What tells compiled kernels apart: everything but who launches them; without a unit those in Triton."""
    return {
        each.model_dump_json(exclude={"case", "bench"})
        for each in record.compiled
        if each.arch == arch
        and each.bench
        and (each.case.startswith(f"{unit}/") and each.code if unit else each.language == "Triton")
    }


def history(path: Path) -> Iterator[tuple[str, StaticRecord]]:
    """The committed versions of a record, the latest first, as far as they can be read."""

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        done = subprocess.run(command, cwd=path.parent, check=True, capture_output=True, text=True)  # noqa: S603
        return done.stdout

    try:
        commits = git("log", "--format=%H", "--", path.name).split()
        top = Path(git("rev-parse", "--show-toplevel").strip())
    except (OSError, subprocess.CalledProcessError) as error:
        raise CarryError(f"{path} is in no git checkout, whose history would be compared ({error})") from error
    for commit in commits:
        try:
            text = git("show", f"{commit}:{path.resolve().relative_to(top.resolve()).as_posix()}")
            yield commit, StaticRecord.model_validate_json(text)
        except (subprocess.CalledProcessError, ValidationError):  # deleted there, or of another schema
            continue
