"""What the levels of every technique have in common: the rows of the support table in which PyTorch itself says no.

A declaration states only what differs: an entry of its own replaces the one here, None takes it away.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kernel_pytorch.harness.implementation import Level

NO_OPERATOR = "no operator of its own: PyTorch checks those that it is made of"
NO_FORMULA = "PyTorch's counter has no formula for elementwise operators and sums"
NO_FLOAT64 = "checked in float64, which the CUDA kernels do not take; its formula is that of the CPU"
ONE_PIECE = "a policy sees no operator: what is compiled is in one piece"
HIDDEN_EXCEPTION = "a checkpoint ends its second forward by an exception that TorchScript hides"
INTERPRETED_FIRST = "TorchScript interprets its first calls and fuses the later ones, which may round differently"
ONE_BACKWARD = "AOTAutograd refuses it"
OTHER_KERNEL = "TorchInductor makes another kernel for another number of rows"
NO_GRADIENT = "the operation has no gradients"
NOT_TRACED = "torch 2.10 does not trace into what is compiled already"

# Not of every technique, but of more than one.
PRODUCTS = "PyTorch's products add in another order where there are fewer rows"
REDUCTIONS = "PyTorch lays out its reductions by the number of rows"
COUNTER_MODE = "Dynamo compiles nothing while a dispatch mode like the counter's is on"

OF_OPERATORS = {"opcheck": NO_OPERATOR, "FLOP counter": NO_FORMULA}
"""Of a level that is made of PyTorch's operators."""

OF_COMPILED = {
    "selective checkpointing": ONE_PIECE,
    "double backward": ONE_BACKWARD,
    "batch invariance on cuda": OTHER_KERNEL,
    **(dict.fromkeys(("export", "AOTInductor"), NOT_TRACED) if torch.__version__ < "2.11" else {}),
}
"""Of a level that torch.compile has compiled before it is called."""

COUNTED_MODE = {"FLOP counter": COUNTER_MODE if torch.__version__ >= "2.12" else None}
"""Of such a level where PyTorch's counter has a formula: torch 2.11 compiled under the mode all the same."""

WITHOUT_GRADIENTS = dict.fromkeys(("selective checkpointing", "double backward"), NO_GRADIENT)
"""Of every level of an operation that is not differentiable."""

BY_LEVEL: Mapping[Level, Mapping[str, str]] = {
    Level.REFERENCE: OF_OPERATORS,
    Level.NATIVE: OF_OPERATORS,
    Level.TORCHSCRIPT: {
        **OF_OPERATORS,
        "selective checkpointing": HIDDEN_EXCEPTION,
        "determinism": INTERPRETED_FIRST,
        "batch invariance": INTERPRETED_FIRST,
    },
    Level.COMPILE: {**OF_OPERATORS, **OF_COMPILED},
    Level.TRITON: {},
    Level.CUDA: {"double backward on cuda": NO_FLOAT64},
    Level.PEER: {},
}


def unsupported_rows(level: Level, declared: Mapping[str, str | None], differentiable: bool = True) -> dict[str, str]:
    """The rows in which a level says no, with reasons: those of all techniques, as far as a declaration leaves them.

    Args:
        level: the rung.
        declared: row of the support table -> reason, or None where it works although it does not elsewhere.
        differentiable: whether the operation has gradients.
    """
    rows = {**BY_LEVEL[level], **({} if differentiable else WITHOUT_GRADIENTS), **declared}
    return {row: reason for row, reason in rows.items() if reason is not None}
