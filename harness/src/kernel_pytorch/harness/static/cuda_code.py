"""The CUDA kernels of a technique, compiled for one architecture: every instantiation of every `__global__` function.

Nothing is launched, so nothing is known of a launch: the block is the largest that `__launch_bounds__` allows, and the
shared memory is what the code itself declares.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from kernel_pytorch.harness.contracts import CudaUnit
from kernel_pytorch.harness.scratch import scratch_folder
from kernel_pytorch.harness.static.compiled import Compiled, one_line
from kernel_pytorch.harness.static.entries import Entry, entries
from kernel_pytorch.harness.static.inspection import Findings, Request
from kernel_pytorch.harness.static.instructions import code_digest, count_instructions
from kernel_pytorch.harness.static.kernel_sources import cuda_units
from kernel_pytorch.harness.static.limits import ARCHITECTURES, Limits
from kernel_pytorch.harness.static.nvcc import MISSING, CompileError, Nvcc, find_nvcc
from kernel_pytorch.harness.static.resources import AssemblerLog
from kernel_pytorch.harness.technique import Technique

UNNAMED = re.compile(r"[\w$]*_GLOBAL__N_[\w$]*")
"""Symbols in unnamed namespaces, which nvcc names after the contents of the whole file."""


def find_cuda(technique: Technique, request: Request) -> Findings:
    """Compile the CUDA units of a technique and read the result, or say why that is not possible here."""
    units, nvcc = cuda_units(technique), find_nvcc()
    if not units:
        return Findings(not_compiled=("its CUDA sources are not here (it is installed from a wheel)",))
    if nvcc is None:
        return Findings(not_compiled=(MISSING,))
    if reason := nvcc.why_not(ARCHITECTURES[request.arch]):
        return Findings(not_compiled=(reason,))
    compiled = [each for unit in units for each in _read_unit(unit, nvcc, request.arch)]
    # Where the front end stopped, nobody knows which kernels there are.
    unread = {c.kernel for c in compiled if c.error} & set(map(_name, units))
    instantiations = sum(c.kernel not in unread for c in compiled)
    return Findings(
        compiled=tuple(compiled), instantiations=instantiations, nvcc=nvcc.version, unread=tuple(sorted(unread))
    )


def _name(unit: CudaUnit) -> str:
    """File and folder, for files of one name in many folders: "rms_norm/cuda.cu"."""
    return "/".join(unit.source.absolute().parts[-2:])


def _read_unit(unit: CudaUnit, nvcc: Nvcc, arch: str) -> list[Compiled]:
    limits = ARCHITECTURES[arch]
    whole = Compiled(kernel=_name(unit), language="CUDA", arch=arch, constants={}, arguments={}, warps=None,
                     case=_name(unit), bench=True)  # fmt: skip
    with scratch_folder() as folder:
        ptx = Path(folder, "unit.ptx")
        try:
            nvcc.to_ptx(unit, limits, ptx)
        except CompileError as error:
            return [whole.model_copy(update={"error": one_line(error)})]
        found = entries(ptx.read_text(encoding="utf-8"))
        if not found:
            return [whole.model_copy(update={"error": "no __global__ function is instantiated in it"})]
        logs = _assemble(unit, nvcc, limits, ptx, found)
        return [_read(entry, logs[entry.symbol], whole) for entry in found]


def _assemble(
    unit: CudaUnit, nvcc: Nvcc, limits: Limits, ptx: Path, found: list[Entry]
) -> Mapping[str, str | CompileError]:
    """What ptxas says about each kernel: all in one go, and one by one where one of them is refused."""
    try:
        return dict.fromkeys((entry.symbol for entry in found), nvcc.to_machine_code(unit, limits, ptx))
    except CompileError:
        logs: dict[str, str | CompileError] = {}
        for entry in found:
            try:
                logs[entry.symbol] = nvcc.to_machine_code(unit, limits, ptx, entry.symbol)
            except CompileError as error:
                logs[entry.symbol] = error
        return logs


def _read(entry: Entry, log: str | CompileError, about: Compiled) -> Compiled:
    constants = {} if entry.template is None else {"template": entry.template}
    facts = {
        "kernel": entry.name,
        "constants": constants,
        "arguments": entry.types,
        "warps": entry.warps,
        "dynamic_shared": entry.dynamic_shared,
        "code": code_digest(UNNAMED.sub("unnamed", entry.code)),
    }
    if isinstance(log, CompileError):
        return about.model_copy(update=facts | {"error": one_line(log)})
    said = AssemblerLog(log)
    facts |= vars(said.resources(entry.symbol, entry.functions)) | {"shared_bytes": said.shared_bytes(entry.symbol)}
    return about.model_copy(update=facts | vars(count_instructions(entry.code)))
