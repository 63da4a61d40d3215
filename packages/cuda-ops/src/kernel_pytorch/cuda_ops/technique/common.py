"""What the declarations of the operations share."""

from __future__ import annotations

from typing import Any

import torch

from kernel_pytorch.harness.technique import Implementation, Level

HERE = "kernel_pytorch.cuda_ops"
CUDA = ("cuda",)

UNSUPPORTED = {
    "opcheck": "no operator of its own: PyTorch checks those that it is made of",
    "FLOP counter": "PyTorch's counter has no formula for elementwise operators and sums",
}


def unsupported(level: Level) -> dict[str, str]:
    """The rows of the support table in which a level says no."""
    if level is Level.CUDA:
        return {}
    found = dict(UNSUPPORTED)
    if level is Level.COMPILE:
        found["selective checkpointing"] = "a policy sees no operator: what is compiled is in one piece"
        found["double backward"] = "AOTAutograd refuses it"
        found["batch invariance on cuda"] = "TorchInductor makes another kernel for another number of rows"
        if torch.__version__ < "2.11":
            found |= dict.fromkeys(("export", "AOTInductor"), "torch 2.10 does not trace into what is compiled already")
    return found


def implementations(function: str, **budgets: dict[str, Any]) -> list[Implementation]:
    """One per level; `budgets` says of a level by name what else there is to say of it."""
    files = {Level.REFERENCE: "reference", Level.NATIVE: "native", Level.COMPILE: "compiled"}
    targets = {level: f"{HERE}.{function}.{file}:{function}" for level, file in files.items()}
    targets[Level.CUDA] = f"{HERE}.{function}.operator:{function}"
    return [
        Implementation(level.value, level, target, unsupported=unsupported(level), **budgets.get(level.value, {}))
        for level, target in targets.items()
    ]
