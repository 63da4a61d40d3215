"""One operation for each folder of csrc/: its numbered kernels, on the inputs of the technique that it belongs to.

The oracle, the shapes and the costs are those of that technique, as far as its package is installed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from kernel_pytorch.cuda_ops.levels import LEVELS
from kernel_pytorch.cuda_ops.library import LIBRARY
from kernel_pytorch.cuda_ops.rungs import rung
from kernel_pytorch.harness.exemptions import of_levels
from kernel_pytorch.harness.implementation import Level, PublicLevel, imported
from kernel_pytorch.harness.technique import Operation

OF: dict[str, tuple[str, str]] = {
    "rms_norm": ("rmsnorm", "rms_norm"),
    "norm_act": ("fused_ln_act", "layer_norm_act"),
    "gated": ("fused_ln_act", "swiglu"),
    "bias_act": ("fused_ln_act", "bias_act"),
    "bias_dropout_add": ("fused_ln_act", "bias_dropout_add"),
    "softmax": ("fused_ln_act", "softmax"),
    "cross_entropy": ("linear_cross_entropy", "cross_entropy"),
    "rotary_embedding": ("qkv_fusion", "rotary_embedding"),
    "qk_norm_rope": ("qkv_fusion", "qk_norm_rope"),
    "flash_attention": ("flash_attn_triton", "flash_attention"),
}
"""By folder of csrc/ the package and the function whose level "cuda" it is; of several functions the fullest."""

CSRC = Path(__file__).resolve().parents[4] / "csrc"
EMULATED = LIBRARY.instruction_sets == ("CUDA, emulated",)
NOT_FOR_IT = "could not launch"
"""What the library says where a kernel cannot run a shape: rows too long, too short or not aligned for it."""

IN_ORDER = "one thread adds a row in order, and its error grows with the length of the row"
SUMS_IN_ORDER = ("rms_norm", "norm_act", "softmax")
LONGEST_IN_ORDER = 8192
"""The first kernels of SUMS_IN_ORDER refuse longer rows: their error exceeds every budget."""


@dataclass(frozen=True)
class Rung(PublicLevel):
    """Level "cuda" of a function with the kernel of a number, forward; the backward is the one that it picks.

    Attributes:
        number: of the kernel, see `rung`.
        longest: the longest rows that it accepts, or None for any.
    """

    partial: ClassVar[bool] = True

    number: int = 0
    longest: int | None = None

    def why_absent(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """On a CPU there are no rungs, unless the CUDA kernels are emulated there."""
        return "the CPU backend is one kernel" if device.type == "cpu" and not EMULATED else None

    def load(self) -> Callable[..., Any]:
        """The public function; what that kernel cannot run raises NotImplementedError."""
        function = super().load()

        def call(*arguments: Any) -> Any:
            if self.longest is not None and arguments[0].shape[-1] > self.longest:
                raise NotImplementedError(IN_ORDER)
            try:
                with rung(self.number):
                    return function(*arguments)
            except RuntimeError as error:
                if NOT_FOR_IT not in str(error):
                    raise
                raise NotImplementedError(str(error)) from None

        return call

    def bound_to(self, arguments: Sequence[Any]) -> Callable[[], Any]:
        """A call with what chooses the kernel around it."""
        return functools.partial(self.load(), *arguments)


def operation(folder: str) -> Operation | None:
    """The operation of a folder, or None where the package that it belongs to is not installed."""
    package, function = OF[folder]
    try:
        given: Operation = imported(f"kernel_pytorch.{package}.technique:technique").operation(function)
    except ModuleNotFoundError as error:
        if not str(error.name).startswith(f"kernel_pytorch.{package}"):
            raise
        return None
    files = sorted((CSRC / folder / "kernels").glob("[0-9]_*.cuh"))  # none where it is installed from a wheel
    numbered = [_rung(folder, file.stem, given) for file in files]
    kept = {name: given.budgets[name] for name in LEVELS if name in given.budgets}
    names = [each.name for each in numbered]
    exemptions = [
        replace(each, levels=(*each.levels, *names)) if each.levels == (Level.CUDA.value,) else each
        for each in of_levels(given.exemptions, LEVELS)
    ]
    return replace(given, levels=[*LEVELS, *numbered], budgets=kept, exemptions=exemptions)


def _rung(folder: str, stem: str, given: Operation) -> Rung:
    """Return the level of one kernel file."""
    of_cuda, number = given.implementation(Level.CUDA.value), int(stem.partition("_")[0])
    if number == 1 and folder in SUMS_IN_ORDER:
        return Rung(stem, Level.CUDA, given.function, 4.0, IN_ORDER, number=number, longest=LONGEST_IN_ORDER)
    return Rung(stem, Level.CUDA, given.function, of_cuda.budget_factor, of_cuda.budget_reason, number=number)


operations = [found for folder in OF if (found := operation(folder)) is not None]
