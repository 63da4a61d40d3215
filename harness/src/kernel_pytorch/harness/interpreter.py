"""Triton's interpreter: how kernels are checked where there is no GPU."""

from __future__ import annotations

import os

import torch


def interpret_without_gpu() -> bool:
    """Turn the interpreter on where there is no CUDA device, unless the user has decided. Must run before Triton loads.

    Triton reads `TRITON_INTERPRET` when a kernel is decorated, that is, when its module is imported.

    Returns:
        Whether kernels will be interpreted.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
    return is_interpreting()


def is_interpreting() -> bool:
    """Whether Triton kernels run in the interpreter: right or wrong can be told, fast or slow cannot."""
    return os.environ.get("TRITON_INTERPRET") == "1"
