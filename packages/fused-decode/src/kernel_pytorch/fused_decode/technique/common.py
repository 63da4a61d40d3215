"""What the declarations of all operations share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernel_pytorch.fused_decode.levels import LADDER
from kernel_pytorch.harness.exemptions import COMPILED_COUNTED, GRADIENTS, PRODUCTS, Exemption
from kernel_pytorch.harness.technique import Case

PACKAGE = "kernel_pytorch.fused_decode"
CUDA = ("cuda",)
LOW = (torch.float32, torch.float16, torch.bfloat16)
SOME = (torch.float32, torch.float16)  # of what is no core case: float16 is what the interpreter computes rightly
BENCH = (torch.bfloat16,)
TENSOR_CORES = dict.fromkeys(("sm_80", "sm_90", "sm_120"), "mma")
OPERATORS = ("reference", "native", "torchscript")

BUDGETS = {
    "native": (4.0, "rounds what goes from one operator of PyTorch to the next"),
    "compile": (4.0, "TorchInductor adds in another order than PyTorch, and multiplies by reciprocals"),
    "triton": (4.0, "rounds the operands of its products to the dtype of the weight or cache, and adds in shares"),
}

EXEMPTIONS = (
    Exemption((GRADIENTS,), "generation is inference"),
    Exemption(("FLOP counter",), None, OPERATORS),  # PyTorch's counter knows products
    COMPILED_COUNTED,
    Exemption(("batch invariance",), PRODUCTS, (*OPERATORS, "compile")),
)


def public(function: str) -> dict[str, Any]:
    """The public function of that name, its levels and their budgets, as fields of an operation."""
    return {"function": f"{PACKAGE}:{function}", "levels": LADDER.levels(function), "budgets": BUDGETS}


def normal(shape: tuple[int, ...], case: Case, generator: torch.Generator, scale: float = 1.0) -> Tensor:
    """Normal numbers of that standard deviation."""
    drawn = torch.randn(shape, generator=generator, device=generator.device)
    return (drawn * scale).to(case.dtype)


def norm_weight(columns: int, case: Case, generator: torch.Generator) -> Tensor:
    """Around one as in trained models, or around zero where an offset is added."""
    around = 1.0 - case.sizes.get("norm_offset", 0.0)
    drawn = torch.randn(columns, generator=generator, device=generator.device) * 0.25 + around
    return drawn.to(case.sizes.get("norm_dtype", case.dtype))
