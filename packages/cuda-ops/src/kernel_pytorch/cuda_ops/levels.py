"""Where the compiled operators run, and the reason why they cannot."""

from __future__ import annotations

import torch

from ._core.device import compute_capability
from .library import INSTALL, LIBRARY

LEVELS = ("reference", "native", "cuda")
MINIMUM_CAPABILITY = (8, 0)
CPU_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
CUDA_DTYPES = CPU_DTYPES[:3]

NVCC = "pip install 'nvidia-cuda-nvcc==13.*' 'nvidia-cuda-runtime==13.*' 'nvidia-cuda-cccl==13.*'"

# Compute capabilities of the cards on which the CUDA kernels were verified. Other cards need an explicit level.
VERIFIED: frozenset[tuple[int, int]] = frozenset({(9, 0)})


def default(operation: str, device: torch.device, dtype: torch.dtype) -> str:
    """Default level of an operation: the compiled one on every CPU and on GPUs where it was verified."""
    if unavailable("cuda", device, dtype) is not None:
        return "native"
    return "cuda" if device.type == "cpu" or compute_capability(device) in VERIFIED else "native"


def unavailable(level: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a level cannot run there, or None if it can."""
    if level != "cuda":
        return None
    if device.type == "cpu":
        return None if dtype in CPU_DTYPES else f"dtype is {dtype}; the CPU backend takes {_names(CPU_DTYPES)}"
    if device.type != "cuda":
        return f"device is {device.type}; compiled are CUDA and CPU code"
    if dtype not in CUDA_DTYPES:
        return f"dtype is {dtype}; the CUDA kernels take {_names(CUDA_DTYPES)}"
    if not LIBRARY.archs:
        return f"the library was built without CUDA; get nvcc ({NVCC}) and install it again, {INSTALL}"
    capability = compute_capability(device)
    if capability < MINIMUM_CAPABILITY or not LIBRARY.runs_on(capability):
        return (
            f"compute capability is {capability[0]}.{capability[1]}; the library was built for"
            f" {', '.join(LIBRARY.archs)} (KERNEL_PYTORCH_CUDA_ARCHS)"
        )
    return None


def describe(level: str, device: torch.device) -> str:
    """What was compiled for that kind of device, by what, and where it was verified."""
    if level != "cuda":
        return ""
    cards = ", ".join(f"{major}.{minor}" for major, minor in sorted(VERIFIED)) or "none yet"
    verified = f"verified on compute capability: {cards}"
    if device.type == "cpu":
        twin = f"CPU backend for {', '.join(LIBRARY.instruction_sets)}, by {LIBRARY.compiler}"
        compiled = f"for {', '.join(LIBRARY.archs)} by {LIBRARY.nvcc}" if LIBRARY.archs else "not compiled"
        return f"{twin}; CUDA code {compiled}, {verified}"
    return f"compiled for {', '.join(LIBRARY.archs)} by {LIBRARY.nvcc}; {verified}"


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
