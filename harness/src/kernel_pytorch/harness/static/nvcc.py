"""NVIDIA's compiler: where it is, what it knows, and how it is asked. No GPU, driver or torch with CUDA is needed."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from kernel_pytorch.harness.contracts import CudaUnit
from kernel_pytorch.harness.static.limits import Limits
from kernel_pytorch.harness.static.resources import ToolMissingError

VERSION = re.compile(r"release [\d.]+, V(?P<version>[\d.]+)")
CAPABILITY = re.compile(r"^compute_(\d+)", re.MULTILINE)
HOW_TO_GET = "pip install 'nvidia-cuda-nvcc==13.*' 'nvidia-cuda-runtime==13.*' 'nvidia-cuda-cccl==13.*'"
MISSING = f"there is no nvcc in CUDA_HOME, in PATH or among the packages of pip; {HOW_TO_GET} brings one"


class CompileError(RuntimeError):
    """What the compiler said instead of compiling."""


@dataclass(frozen=True)
class Nvcc:
    """A compiler that was found.

    Attributes:
        path: of the program.
        version: as it says itself: "13.0.88".
        capabilities: compute capabilities that it compiles for: 90 is 9.0.
    """

    path: Path
    version: str
    capabilities: frozenset[int]

    def why_not(self, limits: Limits) -> str:
        """Why it does not compile for an architecture; empty if it does."""
        return "" if limits.capability in self.capabilities else f"nvcc {self.version} knows no sm_{limits.capability}"

    def to_ptx(self, unit: CudaUnit, limits: Limits, ptx: Path) -> None:
        """Compile the device code of a unit.

        Raises:
            CompileError: the source does not compile.
        """
        include = [f"-I{folder}" for folder in unit.include]
        virtual = limits.target.replace("sm_", "compute_")
        self._run("-ptx", f"-arch={virtual}", *include, *unit.options, "-o", str(ptx), str(unit.source))

    def to_machine_code(self, unit: CudaUnit, limits: Limits, ptx: Path, entry: str | None = None) -> str:
        """Assemble the kernels in a PTX file, or one of them, and return what ptxas says about each.

        Raises:
            CompileError: ptxas refuses one of them.
        """
        verbose = "--ptxas-options=-v" + (f",--entry={entry}" if entry else "")
        cubin = ptx.with_suffix(".cubin")
        return self._run("-cubin", f"-arch={limits.target}", verbose, *unit.options, "-o", str(cubin), str(ptx))

    def _run(self, *arguments: str) -> str:
        done = subprocess.run([self.path, *arguments], capture_output=True, text=True)  # noqa: S603
        if done.returncode != 0:
            said = done.stderr.strip() or done.stdout.strip()
            errors = "\n".join(line for line in said.splitlines() if re.search(r"\b(error|fatal)\b", line))
            raise CompileError(errors or said or f"{self.path} ended with exit code {done.returncode}")
        return done.stderr


@functools.cache
def find_nvcc() -> Nvcc | None:
    """The compiler of CUDA_HOME, of PATH or of pip's packages, the first that is there; None if there is none.

    Raises:
        ToolMissingError: it is there and cannot be run.
    """
    path = next((place for place in _places() if place.is_file()), None)
    if path is None:
        return None
    printed = []
    for question in ("--version", "--list-gpu-arch"):
        try:
            done = subprocess.run([path, question], check=True, capture_output=True, text=True)  # noqa: S603
        except (OSError, subprocess.CalledProcessError) as error:
            raise ToolMissingError(f"{path} cannot be run: {error}") from error
        printed.append(done.stdout)
    version = VERSION.search(printed[0])
    if version is None:
        raise ToolMissingError(f"{path} --version names no version, so it is no nvcc:\n{printed[0].strip()}")
    return Nvcc(path, version["version"], frozenset(map(int, CAPABILITY.findall(printed[1]))))


def _places() -> list[Path]:
    """Where nvcc may be, in order. NVIDIA's wheels put it into site-packages/nvidia/cu13/bin."""
    named = os.environ.get("CUDA_HOME")
    in_path = shutil.which("nvcc")
    packages = find_spec("nvidia")
    folders = packages.submodule_search_locations or [] if packages is not None else []
    of_pip = [place for folder in folders for place in sorted(Path(folder).glob("cu*/bin/nvcc"), reverse=True)]
    return [*([Path(named, "bin", "nvcc")] if named else []), *([Path(in_path)] if in_path else []), *of_pip]
