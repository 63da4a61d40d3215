"""What the declarations of all groups share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernel_pytorch.fused_ln_act.levels import LADDER
from kernel_pytorch.harness.technique import Case, Exemption

PACKAGE = "kernel_pytorch.fused_ln_act"
CUDA, CPU = ("cuda",), ("cpu",)

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
LOW = (F32, F16, BF16)
HALF = (F16, BF16)
WIDE_AND_HALF = (F32, F16)
ONE = (F32,)
BENCH = (BF16,)

# In bytes: far from the 255 registers that it could have, ptxas keeps a value or two of a loop on the stack rather than
# lose a resident block. Which configurations are hit changes with its version; what is too large spills hundreds.
TOLERATED_SPILL_BYTES = 32


GELU_OF_INFINITY = Exemption(
    ("infinities",),
    "PyTorch's gelu of infinity is NaN on a CPU; the definition and PyTorch's kernel for GPUs have infinity",
    ("native",),
    devices=CPU,
)


def public(function: str) -> dict[str, Any]:
    """The public function of that name and its levels, as fields of an operation."""
    return {"function": f"{PACKAGE}:{function}", "levels": LADDER.levels(function)}


def normal(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(shape, generator=generator, device=generator.device).to(dtype)


def data(case: Case, generator: torch.Generator) -> Tensor:
    """Standard normal numbers, `(*case.shape)`."""
    return normal(case.shape, case.dtype, generator)


def seed_of(case: Case, generator: torch.Generator) -> Tensor | None:
    """The seed of a case: `()`, int64; None where nothing is dropped."""
    if not case.sizes.get("dropout_p", 0.0):
        return None
    return torch.randint(2**62, (), generator=generator, device=generator.device)


def bytes_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """What reading or writing a tensor once moves."""
    return torch.Size(shape).numel() * dtype.itemsize
