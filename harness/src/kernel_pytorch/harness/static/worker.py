"""Compile the Triton kernels of one technique for one architecture and write the findings, in a separate process.

The process is separate because Triton decides at import whether kernels are interpreted, and because two run at a time.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from kernel_pytorch.harness.discovery import discover
from kernel_pytorch.harness.interpreter import is_interpreting
from kernel_pytorch.harness.static.triton_code import find_triton


def main(arguments: list[str]) -> None:
    """Write findings to a file.

    Args:
        arguments: JSON of the technique's name, the architecture, and the two options of `find_triton`; the file.
    """
    if is_interpreting():
        sys.exit("TRITON_INTERPRET=1 is set: kernels would be interpreted, and nothing compiled")
    torch.set_num_threads(1)
    technique, arch, everything, float64_scalars = json.loads(arguments[0])
    findings = find_triton(discover().get(technique), arch, everything=everything, float64_scalars=float64_scalars)
    Path(arguments[1]).write_text(findings.model_dump_json())


if __name__ == "__main__":
    main(sys.argv[1:])
