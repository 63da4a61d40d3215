"""What the declarations of the operations share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from kernel_pytorch.harness.technique import Implementation, Level

HERE = "kernel_pytorch.cuda_ops"
CUDA = ("cuda",)

UNSUPPORTED = {
    "opcheck": "no operator of its own: PyTorch checks those that it is made of",
    "FLOP counter": "PyTorch's counter has no formula for elementwise operators and sums",
}


NO_FLOAT64 = {
    "double backward on cuda": "checked in float64, which the CUDA kernels do not take; its formula is that of the CPU"
}

# Of a level that is compiled already.
NOT_TRACED = (
    dict.fromkeys(("export", "AOTInductor"), "torch 2.10 does not trace into what is compiled already")
    if torch.__version__ < "2.11"
    else {}
)


def unsupported(level: Level) -> dict[str, str]:
    """The rows of the support table in which a level says no."""
    if level is Level.CUDA:
        return NO_FLOAT64
    found = dict(UNSUPPORTED)
    if level is Level.COMPILE:
        found["selective checkpointing"] = "a policy sees no operator: what is compiled is in one piece"
        found["double backward"] = "AOTAutograd refuses it"
        found["batch invariance on cuda"] = "TorchInductor makes another kernel for another number of rows"
        found |= NOT_TRACED
    return found


def implementations(
    function: str, says_no: Mapping[Level, Mapping[str, str]] | None = None, **budgets: dict[str, Any]
) -> list[Implementation]:
    """One per level.

    Args:
        function: its name, and that of its folder.
        says_no: the rows of the support table in which a level says no; None: those of `unsupported`.
        **budgets: by level, what else there is to say of it.
    """
    files = {Level.REFERENCE: "reference", Level.NATIVE: "native", Level.COMPILE: "compiled"}
    targets = {level: f"{HERE}.{function}.{file}:{function}" for level, file in files.items()}
    targets[Level.CUDA] = f"{HERE}.{function}.operator:{function}"
    rows = {level: unsupported(level) for level in targets} if says_no is None else says_no
    return [
        Implementation(level.value, level, target, unsupported=rows[level], **budgets.get(level.value, {}))
        for level, target in targets.items()
    ]
