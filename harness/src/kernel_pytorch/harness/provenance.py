"""What identifies a measured implementation, by facts about the code that ran.

Triton kernels are what they compile to: the PTX of each launch of a bench case without names, its warps and its grid.
Kernels in CUDA C++ are the sources that the library was compiled from, without comments, and the registers, spills and
shared memory that ptxas gave them. Everything else is the syntax tree of the level's file, and the torch that ran it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kernel_pytorch.harness.environment import Environment
from kernel_pytorch.harness.errors import UserError
from kernel_pytorch.harness.implementation import Implementation, Level, PublicLevel
from kernel_pytorch.harness.records import Identity
from kernel_pytorch.harness.sources import tree_digest
from kernel_pytorch.harness.static.cuda_code import LIBRARY, read_library
from kernel_pytorch.harness.static.inspection import inspect, triton_level
from kernel_pytorch.harness.static.instructions import short_digest
from kernel_pytorch.harness.static.limits import ARCHITECTURES
from kernel_pytorch.harness.static.record import known
from kernel_pytorch.harness.technique import Operation, Technique
from kernel_pytorch.harness.tensors import EveryCall

RESULTS = Path("results")
DERIVED = ("reference", "native")
"""The files that define levels without a separate file."""


def identify(
    technique: Technique, environment: Environment, results: Path = RESULTS, *, compiling: bool = True
) -> dict[str, Identity]:
    """Identify the present implementations of a technique on a device, by `operation/implementation`.

    What cannot be identified there is left out: peers, what is not installed, Triton's kernels on a CPU and on
    architectures that `kernel-pytorch static` does not know.

    Args:
        technique: which.
        environment: that of the device; it need not be this machine's.
        results: the folder of results, whose record of compiled kernels is read where it is of the present kernels.
        compiling: whether Triton kernels are compiled where that record is not of the present ones; else they are left
            out.
    """
    arch = _architecture(environment)
    launched = _launched(technique, arch, results, compiling=compiling) if arch in ARCHITECTURES else {}
    found: dict[str, Identity | None] = {}
    for operation in technique.operations:
        in_cpp = None  # one identity for all implementations of an operation
        for i in operation.implementations:
            label = f"{operation.name}/{i.name}"
            if i.level is Level.TRITON and label in launched:
                found[label] = Identity(made_by=f"Triton {_version('triton')}", kernels=launched[label])
            elif i.level is Level.CUDA:
                found[label] = in_cpp = in_cpp or _in_cpp(technique, operation, i, environment.device_type, arch)
            elif i.level not in (Level.TRITON, Level.PEER):
                found[label] = _written(i)
    return {label: identity for label, identity in found.items() if identity is not None}


def compile_ahead(techniques: Iterable[Technique], environment: Environment, results: Path = RESULTS) -> None:
    """Compile side by side what `identify` would compile one technique after the other."""
    arch = _architecture(environment)
    if arch in ARCHITECTURES and find_spec("triton") is not None:
        with contextlib.suppress(UserError):  # it is of one technique; `identify` meets it again
            inspect([each for each in techniques if triton_level(each) and known(each, results) is None], [arch])


def _architecture(environment: Environment) -> str:
    """As `kernel-pytorch static` calls that of a device; empty without a GPU."""
    return f"sm_{environment.compute_capability.replace('.', '')}" if environment.compute_capability else ""


def fingerprint(identities: dict[str, Identity]) -> str:
    """One digest of several identities. What ptxas said about C++ is left out: not each build is for each device."""
    every = ((label, i.sources, {} if i.sources else i.kernels) for label, i in sorted(identities.items()))
    return short_digest([(label, sorted(s.items()), sorted(k.items())) for label, s, k in every])


def _version(distribution: str) -> str:
    """Without what tells builds of one version apart: "2.13.0" of "2.13.0+cu130"."""
    return importlib.metadata.version(distribution).partition("+")[0]


def _launched(technique: Technique, arch: str, results: Path, *, compiling: bool) -> dict[str, dict[str, str]]:
    """By implementation and bench case the digest of its launches; empty if it is not known and cannot be found out."""
    if not triton_level(technique) or find_spec("triton") is None:
        return {}
    if (record := known(technique, results)) is not None:
        return record.kernels.get(arch, {})
    try:
        return inspect([technique], [arch])[0].kernels if compiling else {}
    except UserError:  # `kernel-pytorch static` says what is missing
        return {}


def _written(implementation: Implementation) -> Identity | None:
    """The identity of a level that is Python on top of PyTorch."""
    target = implementation.level_target() if isinstance(implementation, PublicLevel) else implementation.target
    module = target.partition(":")[0]
    package = module.rpartition(".")[0]
    for names in ([module], [f"{package}.{name}" for name in DERIVED]):
        files = [file for name in names if (file := _file(name)) is not None]
        if files:
            sources = {file.stem: tree_digest([file]) for file in files}
            return Identity(made_by=f"torch {_version('torch')}", sources=sources)
    return None


def _file(module: str) -> Path | None:
    """The Python file of a module; None where there is none."""
    try:
        spec = find_spec(module)
    except (ImportError, ValueError):  # a module outside packages; ValueError: one that was made at run time
        return None
    return Path(spec.origin) if spec is not None and spec.origin and spec.origin.endswith(".py") else None


def _in_cpp(
    technique: Technique, operation: Operation, implementation: Implementation, device_type: str, arch: str
) -> Identity | None:
    """The identity of a level in C++: of the operators that a call of the operation's level "cuda" leads to."""
    level = next((i for i in operation.implementations if i.name == Level.CUDA.value), implementation)
    if technique.ladder().unavailable(level.name, torch.device("cpu"), torch.float32) is not None:
        return None
    called: set[str] = set()
    noted = EveryCall(lambda operator, *_: called.add(operator._schema.name.partition("::")[2]))
    for case in operation.bench_grid.cases("cpu"):
        if operation.why_lacking(level.name, case) is None:
            with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), noted:
                level.load()(*operation.arguments(case, torch.Generator().manual_seed(0)))
            break
    files = {getattr(module, "__file__", None) for name, module in sys.modules.items() if name.count(".") == 1}
    for folder in sorted({Path(file).parent for file in files if file}):  # of packages that were imported
        if not (folder / LIBRARY).is_file():
            continue
        library = read_library(folder)
        operators = sorted({library["functions"][name] for name in called & library["functions"].keys()})
        if operators:
            sources = {name: library["operators"][name][device_type] for name in operators}
            target = ARCHITECTURES[arch].target if arch in ARCHITECTURES else ""
            kernels = {name: _resources(library["kernels"], name, target) for name in operators} if target else {}
            made_by = library["nvcc"] or "no nvcc" if device_type == "cuda" else library["compiler"]
            return Identity(made_by=made_by, sources=sources, kernels={k: v for k, v in kernels.items() if v})
    return None


def _resources(kernels: list[dict[str, Any]], operator: str, target: str) -> str:
    """The digest of what the kernels of an operator need on an architecture; empty if it was not compiled for it."""
    found = [k for k in kernels if (k["operator"], k["arch"]) == (operator, target)]
    needs = sorted((k["registers"], k["spill_bytes"], k["shared_bytes"]) for k in found)
    return short_digest(needs) if found else ""
