"""The compiled library: loading it, and what it was compiled of."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch

HERE = Path(__file__).parent
FOLDER = "KERNEL_PYTORCH_LIBRARY"
"""Environment variable: the folder of another build of the library, one with sanitizers for example."""

INSTRUCTION_SET = "KERNEL_PYTORCH_CPU_ISA"
"""Environment variable: the best instruction set that the CPU backend may use."""
INSTRUCTION_SETS = ("base", "avx2", "avx512")

INSTALL = "in a checkout of kernel-pytorch: pip install --force-reinstall --no-deps --no-cache-dir ./packages/cuda-ops"
"""What brings a library; the package is on no index."""


@dataclass(frozen=True)
class Library:
    """What was recorded when the library was compiled.

    Attributes:
        file: the shared library.
        compiler: the C++ compiler and its version.
        nvcc: CUDA's compiler and its version; None where there was none.
        archs: architectures that the CUDA code is compiled for, like "sm_90a".
        instruction_sets: those that the CPU backend is compiled for, the best of which is chosen at run time.
        sanitized: whether AddressSanitizer and UndefinedBehaviorSanitizer watch it.
        digest: of the sources.
        operators: by operator and type of device, the digest of its sources.
    """

    file: Path
    compiler: str
    nvcc: str | None
    archs: tuple[str, ...]
    instruction_sets: tuple[str, ...]
    sanitized: bool
    digest: str
    operators: dict[str, dict[str, str]]

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether CUDA code for a card of that compute capability is in it: its own, or of a lower minor number.

        Code for "sm_90a" runs on 9.0 alone; "sm_80" on 8.0, 8.6, 8.9.
        """
        for arch in self.archs:
            number = arch.removeprefix("sm_").rstrip("af")
            major, minor = int(number[:-1]), int(number[-1])
            if major == capability[0] and (minor == capability[1] if arch[-1] in "af" else minor <= capability[1]):
                return True
        return False


def load(folder: Path) -> Library:
    """Load the library that lies in a folder, with its record.

    Raises:
        ImportError: there is none; the message says why, and what to do.
    """
    try:
        record = json.loads((folder / "_library.json").read_text())
    except OSError:
        asked = f"; {FOLDER} is set to {os.environ[FOLDER]!r}" if FOLDER in os.environ else ""
        record = {"problem": f"its build step was not run{asked}; {INSTALL}"}
    problem = record.pop("problem")
    if problem is not None:
        raise ImportError(f"kernel_pytorch.cuda_ops has no compiled library: {problem}")
    wanted = os.environ.get(INSTRUCTION_SET)
    if wanted not in (None, *INSTRUCTION_SETS):
        raise ImportError(f"{INSTRUCTION_SET}: given {wanted!r}; allowed are {', '.join(INSTRUCTION_SETS)}")
    file = folder / "_library.so"
    try:
        torch.ops.load_library(file)
    except OSError as error:
        raise ImportError(
            f"kernel_pytorch.cuda_ops: {file.name} cannot be loaded by torch {torch.__version__}: {error}"
        ) from None
    record["archs"] = tuple(record["archs"])
    record["instruction_sets"] = tuple(record["instruction_sets"])
    return Library(file=file, **record)


LIBRARY = load(Path(os.environ.get(FOLDER, HERE)))

refused: str | None = None
"""Why importing the package rejected this library. Another package that imports it again gets the same reason, because
operators that are already registered cannot be registered twice."""
