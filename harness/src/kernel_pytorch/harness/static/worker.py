"""Compiles the kernels of one technique for one architecture and writes what it found; a process of its own.

A process of its own, because Triton decides at import whether kernels are interpreted, and because two run at a time.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from kernel_pytorch.harness.discovery import discover
from kernel_pytorch.harness.interpreter import is_interpreting
from kernel_pytorch.harness.static.cuda_code import find_cuda
from kernel_pytorch.harness.static.inspection import Findings, Request
from kernel_pytorch.harness.static.kernel_sources import triton_level


def find(request: Request) -> Findings:
    """Compile all that the technique has: its Triton level, its CUDA units."""
    technique = discover().get(request.technique)
    found = Findings()
    if triton_level(technique):
        from kernel_pytorch.harness.static.triton_code import find_triton  # Triton is not needed for CUDA alone

        found = find_triton(technique, request)
    if technique.cuda_units is not None:
        of_cuda = find_cuda(technique, request)
        both = {"compiled": found.compiled + of_cuda.compiled}
        found = of_cuda.model_copy(update=both | {"problems": found.problems, "launches": found.launches})
    return found


def main(arguments: list[str]) -> None:
    """Read a request (JSON), write findings to the file that the second argument names."""
    if is_interpreting():
        sys.exit("TRITON_INTERPRET=1 is set: kernels would be interpreted, and nothing compiled")
    torch.set_num_threads(1)
    findings = find(Request.model_validate_json(arguments[0]))
    Path(arguments[1]).write_text(findings.model_dump_json())


if __name__ == "__main__":
    main(sys.argv[1:])
