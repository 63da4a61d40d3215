"""What is done to a model before it is used: patched, fused, or both, at default levels or with our own code forced.

On a CPU most defaults are level native, where a patched module runs the forward of its class. So the levels are chosen
here: the CPU backend of level "cuda" where a function has it, and native through our own functions elsewhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from replaced import PATCHES

from kernel_pytorch.linear_cross_entropy import replacements as head
from kernel_pytorch.qkv_fusion import LinearGroup, fuse, unfuse

Model = torch.nn.Module


class RefusedError(Exception):
    """A model that was left as it is, with the reason."""


@dataclass(frozen=True)
class Variant:
    """What is done to a model.

    Attributes:
        patched: whether all packages patch it.
        fused: whether `fuse` makes products of its layers, before.
        forced: whether our code runs where the default is PyTorch's.
    """

    patched: bool = False
    fused: bool = False
    forced: bool = True

    def prepare(self, model: Model) -> Model:
        """Change a model in place. Raises RefusedError if nothing is left to test."""
        if self.fused:
            try:
                fuse(model)
            except (TypeError, ValueError) as error:
                raise RefusedError(f"fuse: {error}") from None
            if not any(isinstance(module, LinearGroup) for module in model.modules()):
                raise RefusedError("fuse: nothing is fused")
        if self.patched:
            for technique in PATCHES:
                technique.patch(model, gpu_bound=True)
        return model

    def levels(self) -> contextlib.AbstractContextManager[None]:
        """The levels that its modules compute with."""
        return ours() if self.forced else contextlib.nullcontext()


STOCK = Variant(forced=False)
VARIANTS = {
    "patched": Variant(patched=True),
    "fused": Variant(fused=True),
    "both": Variant(patched=True, fused=True),
    "patched at default levels": Variant(patched=True, forced=False),
}


@contextlib.contextmanager
def ours() -> Iterator[None]:
    """Let the functions of the packages compute on a CPU, at level "cuda" where they have it."""
    with contextlib.ExitStack() as stack:
        for technique in PATCHES:
            ladder = technique.ladder()
            stack.enter_context(mock.patch.object(ladder, "is_native", _never))
            stack.enter_context(mock.patch.object(ladder, "default", _highest_of(ladder)))
            ladder.forget()
            stack.callback(ladder.forget)
        stack.enter_context(mock.patch.object(head, "_is_faster_rounded", _never))
        yield


def _never(*arguments: object) -> bool:
    return False


def _highest_of(ladder: Any) -> Callable[..., str]:
    def default(
        function: str, device: torch.device, dtype: torch.dtype, traced: bool = False, features: Collection[str] = ()
    ) -> str:
        for level in ("cuda", "native"):
            able = level in ladder.levels(function) and ladder.why_lacking(level, features) is None
            if able and ladder.unavailable(level, device, dtype) is None:
                return level
        return "reference"

    return default


def undo(model: Model) -> Model:
    """Make a prepared model stock again, in place."""
    for technique in PATCHES:
        technique.unpatch(model)
    return unfuse(model)
