"""Compile the Triton kernels of one technique for one architecture and write the findings, in a separate process.

The process is separate because Triton decides at import whether kernels are interpreted, and because two run at a time.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from kernel_pytorch.harness.discovery import discover
from kernel_pytorch.harness.interpreter import is_interpreting
from kernel_pytorch.harness.static.inspection import Request
from kernel_pytorch.harness.static.triton_code import find_triton


def main(arguments: list[str]) -> None:
    """Read a request (JSON), write findings to the file that the second argument names."""
    if is_interpreting():
        sys.exit("TRITON_INTERPRET=1 is set: kernels would be interpreted, and nothing compiled")
    torch.set_num_threads(1)
    request = Request.model_validate_json(arguments[0])
    findings = find_triton(discover().get(request.technique), request)
    Path(arguments[1]).write_text(findings.model_dump_json())


if __name__ == "__main__":
    main(sys.argv[1:])
