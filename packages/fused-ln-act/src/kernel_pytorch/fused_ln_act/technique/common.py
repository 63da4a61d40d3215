"""What the declarations of all groups share."""

from __future__ import annotations

import torch
from torch import Tensor

from kernel_pytorch.fused_ln_act.levels import LADDER
from kernel_pytorch.harness.technique import Case, Implementation, Level, Spared

PACKAGE = "kernel_pytorch.fused_ln_act"
# The modules of kernel_pytorch.cuda_ops that level "cuda" is in, by group.
COMPILED = {"norm": "norm_act", "gated": "gated", "softmax": "softmax"}
CUDA = ("cuda",)

# In bytes: far from the 255 registers that it could have, ptxas keeps a value or two of a loop on the stack rather than
# lose a resident block. Which configurations are hit changes with its version; what is too large spills hundreds.
PARKED = 32

# The levels that are made of PyTorch's operators.
UNSUPPORTED = {
    "opcheck": "no operator of its own: PyTorch checks those that it is made of",
    "FLOP counter": "PyTorch's counter has no formula for elementwise operators and sums",
}
NO_FLOAT64 = {
    "double backward on cuda": "checked in float64, which the CUDA kernels do not take; its formula is that of the CPU"
}
INTERPRETED_FIRST = "TorchScript interprets its first calls and fuses the later ones, which may round differently"


def gelu_of_infinity(*arguments: str) -> tuple[Spared, ...]:
    """What the levels of PyTorch's own gelu are spared in these arguments."""
    reason = "PyTorch's gelu of infinity is NaN on a CPU; the definition and PyTorch's kernel for GPUs have infinity"
    return (Spared(arguments, ("infinities",), reason, devices=("cpu",), levels=("native",)),)


def unsupported(level: Level, function: str) -> dict[str, str]:
    """The rows of the support table in which a level says no."""
    if level is Level.TRITON:
        return {}
    if level is Level.CUDA:
        return NO_FLOAT64
    found = dict(UNSUPPORTED)
    if level is Level.REFERENCE and "norm" in function:
        found["batch invariance on cuda"] = "PyTorch lays out its reductions by the number of rows"
    if level is Level.TORCHSCRIPT:
        found["selective checkpointing"] = "a checkpoint ends its second forward by an exception that TorchScript hides"
        found |= dict.fromkeys(("determinism", "batch invariance"), INTERPRETED_FIRST)
    if level is Level.COMPILE:
        found["selective checkpointing"] = "a policy sees no operator: what is compiled is in one piece"
        found["double backward"] = "AOTAutograd refuses it"
        found["batch invariance on cuda"] = "TorchInductor makes another kernel for another number of rows"
        if torch.__version__ < "2.11":
            found |= dict.fromkeys(("export", "AOTInductor"), "torch 2.10 does not trace into what is compiled already")
    return found


def implementations(
    group: str, function: str, budgets: dict[Level, tuple[float, str]] | None = None
) -> list[Implementation]:
    """One per level.

    Args:
        group: folder of the operation.
        function: its name.
        budgets: by level, a budget factor other than 2 and its reason.
    """
    found = []
    for name in LADDER.levels(function):
        level, target = Level(name), f"{PACKAGE}.{group}.levels.{name}:{function}"
        if level is Level.CUDA:
            target = f"kernel_pytorch.cuda_ops.{COMPILED.get(group, function)}:{function}"
        factor, reason = (budgets or {}).get(level, (2.0, ""))
        found.append(Implementation(name, level, target, factor, reason, unsupported(level, function)))
    return found


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
