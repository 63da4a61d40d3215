"""Exemptions: properties that a level or an operation does not have, each with its reason.

Every property is checked at every level unless an exemption names it. `COMMON` holds the exemptions of every technique,
which follow from PyTorch itself; a declaration adds only what differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from kernel_pytorch.harness.adversaries import ADVERSARIES, IMITATED, LAYOUTS
from kernel_pytorch.harness.implementation import OUR_KERNELS, Level

SUPPORT_ROWS = (
    "fullgraph", "dynamic shapes", "opcheck", "export", "AOTInductor", "autocast", "CUDA graphs",
    "selective checkpointing", "FLOP counter", "double backward", "FSDP2/DTensor", "determinism", "batch invariance",
)  # fmt: skip
"""Rows of the support table."""

GRADIENTS = "gradients"
"""Exempts an operation for inference from everything that needs a gradient: its forward alone is verified and timed."""
BACKWARD_TIME = "backward time"
"""Exempts an operation that computes its gradients in the forward from timing the backward alone."""
CASE = "case."
"""`case.window` exempts a level from the cases that have a size `window`: from a feature that it does not have."""

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

# For more than one technique, but not for all.
PRODUCTS = "PyTorch's products add in another order where there are fewer rows"
REDUCTIONS = "PyTorch lays out its reductions by the number of rows"
COUNTER_MODE = "Dynamo compiles nothing while a dispatch mode like the counter's is on"


@dataclass(frozen=True)
class Exemption:
    """A property that does not hold, or is not checked, with the reason.

    Attributes:
        what: the properties: a row of the support table ("opcheck"), an adversary ("NaN"; where `levels` are named also
            "imitated activations"), "case.<size>" for the cases with a feature, `GRADIENTS` or
            `BACKWARD_TIME`. Layouts (views) change no number, so nothing is exempt from them.
        reason: why; `kernel-pytorch verify` and the support table print it. None takes an exemption of `COMMON` back.
        levels: names of implementations; None for all of them. A kernel of this project is exempt from an adversary
            only with `instead`, because it reproduces the definition's behaviour.
        arguments: names of the arguments that the adversary is not planted in, if no levels are named.
        dtypes: in which dtypes the adversary is exempt; None for all.
        devices: on which kinds of device; None for all.
        instead: name of the implementation whose error, times two, is the budget of the named levels for this
            adversary; "" to leave them out.
    """

    what: tuple[str, ...]
    reason: str | None
    levels: tuple[str, ...] | None = None
    arguments: tuple[str, ...] = ()
    dtypes: tuple[torch.dtype, ...] | None = None
    devices: tuple[str, ...] | None = None
    instead: str = ""

    def __post_init__(self) -> None:
        adversaries = [name for name in ADVERSARIES if name not in LAYOUTS] + [IMITATED] * bool(self.levels)
        allowed = (*SUPPORT_ROWS, GRADIENTS, BACKWARD_TIME, *adversaries)
        named = ", ".join(self.what)
        for name in self.what:
            if name not in allowed and not name.startswith(CASE):
                known = f"{', '.join(allowed)} and {CASE}<size>"
                raise ValueError(f"exemption: {name!r} is no property that can be exempt; allowed are {known}")
        if not self.reason and (self.reason == "" or set(self.what) - set(SUPPORT_ROWS)):
            raise ValueError(f"exemption: {named} needs a reason")
        if self.of_adversary:
            if set(self.what) - set(adversaries) or not (self.levels or self.arguments):
                raise ValueError(f"exemption: {named} must be adversaries alone, with levels or arguments")
            if ours := [level for level in self.levels or () if level in OUR_KERNELS and not self.instead]:
                raise ValueError(f"exemption: levels names {ours[0]!r}, which must handle {named}, or name instead")
        elif self.arguments or self.dtypes or self.instead or (self.devices and set(self.what) - set(SUPPORT_ROWS)):
            raise ValueError(f"exemption: {named} holds for all arguments and dtypes, or for none")

    @property
    def of_adversary(self) -> bool:
        """Whether it is about adversarial inputs."""
        return not {*ADVERSARIES, IMITATED}.isdisjoint(self.what)

    def covers(self, adversary: str, dtype: torch.dtype, device: str) -> bool:
        """Whether it is about this adversary, in this dtype, on this kind of device."""
        return (
            adversary in self.what
            and (self.dtypes is None or dtype in self.dtypes)
            and (self.devices is None or device in self.devices)
        )

    def __str__(self) -> str:
        dtypes = [str(dtype).removeprefix("torch.") for dtype in self.dtypes or ()]
        where = [(" of ", self.arguments), (" in ", dtypes), (" at ", self.levels or ()), (" on ", self.devices or ())]
        places = "".join(word + ", ".join(names) for word, names in where if names)
        instead = f" (checked against {self.instead} instead)" if self.instead else ""
        return f"{', '.join(self.what)}{places}{instead}: {self.reason}"


OPERATORS = ("reference", "native", "torchscript", "compile")
COMMON = (
    Exemption(("opcheck",), NO_OPERATOR, OPERATORS),
    Exemption(("FLOP counter",), NO_FORMULA, OPERATORS),
    Exemption(("selective checkpointing",), HIDDEN_EXCEPTION, ("torchscript",)),
    Exemption(("determinism", "batch invariance"), INTERPRETED_FIRST, ("torchscript",)),
    Exemption(("selective checkpointing",), ONE_PIECE, ("compile",)),
    Exemption(("double backward",), ONE_BACKWARD, ("compile",)),
    Exemption(("batch invariance",), OTHER_KERNEL, ("compile",), devices=("cuda",)),
    Exemption(("export", "AOTInductor"), NOT_TRACED if torch.__version__ < "2.11" else None, ("compile",)),
    Exemption(("double backward",), NO_FLOAT64, ("cuda",), devices=("cuda",)),
)
COMPILED_COUNTED = Exemption(("FLOP counter",), COUNTER_MODE if torch.__version__ >= "2.12" else None, ("compile",))
"""For `compile` where PyTorch's counter has a formula: torch 2.11 compiled under the mode all the same."""


def unsupported_rows(level: Level, declared: Sequence[Exemption]) -> dict[str, str]:
    """Rows of the support table that a level does not support, "<row>" or "<row> on <device>", with the reasons.

    Later exemptions replace earlier ones of the same row; those of a declaration come after `COMMON`.
    """
    rows: dict[str, str | None] = {}
    without = Exemption(("selective checkpointing", "double backward"), NO_GRADIENT)
    inference = [without] if any(GRADIENTS in each.what for each in declared) else []
    for each in (*COMMON, *inference, *declared):
        if each.levels is None or level.value in each.levels:
            for row in (name for name in each.what if name in SUPPORT_ROWS):
                rows |= {f"{row} on {d}": each.reason for d in each.devices or ()} or {row: each.reason}
    return {row: reason for row, reason in rows.items() if reason is not None}


def of_levels(exemptions: Iterable[Exemption], names: Sequence[str]) -> tuple[Exemption, ...]:
    """The exemptions that are left of these for an operation with these implementations alone."""
    kept = [e for e in exemptions if e.levels is None or set(e.levels) & set(names)]
    return tuple(replace(e, levels=e.levels and tuple(n for n in e.levels if n in names)) for e in kept)
