"""What a changed model costs beside the original: time by the paired clock, peak memory, bytes that are saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kernel_pytorch.harness.clock import compare_paired
from kernel_pytorch.harness.clock.wall import step_seconds
from kernel_pytorch.harness.memory import peak

from .memory import saved
from .state import Loss, call, device_of, loss_of

ROUNDS = 8
Inputs = tuple[Sequence[Any], Mapping[str, Any]]


def check_rounds(rounds: int) -> None:
    """Raise ValueError unless so many rounds can be compared."""
    if rounds and rounds < ROUNDS:
        raise ValueError(f"rounds is {rounds}; it must be at least {ROUNDS}, or 0 to time nothing")


def performance(
    original: torch.nn.Module, optimized: torch.nn.Module, given: Inputs, loss: Loss | None, rounds: int
) -> dict[str, Any]:
    """Time whole steps in turns by the wall clock: a forward, and its backward where the module trains.

    The host's work is part of a step, as it is in use; a CUDA graph of a step would leave it out and hold its memory.
    """
    steps = {"original": step(original, given, loss), "optimized": step(optimized, given, loss)}
    took = step_seconds(steps, device_of(original, given), rounds)
    found = compare_paired(took["original"][0], took["optimized"][0])
    return {
        "speedup": found.speedup.median,
        "low": found.speedup.low,
        "high": found.speedup.high,
        "verdict": found.verdict.value,
        "rounds": rounds,
    }


def step(module: torch.nn.Module, given: Inputs, loss: Loss | None) -> Any:
    """A forward in evaluation; a forward and backward in training, without touching `.grad`."""
    wanted = [p for p in module.parameters() if p.requires_grad]

    def train() -> None:
        torch.autograd.grad(loss_of(call(module, *given), loss), wanted, allow_unused=True)

    def infer() -> None:
        with torch.no_grad():
            call(module, *given)

    return train if module.training and wanted else infer


def memory_use(
    original: torch.nn.Module, optimized: torch.nn.Module, given: Inputs, loss: Loss | None
) -> dict[str, Any]:
    """Peak of a step, and bytes kept for the backward, each before and after."""
    device = device_of(original, given)
    peaks = tuple(peak(step(m, given, loss), device) for m in (original, optimized))
    kept = tuple(sum(k.bytes for k in saved(m, *given)) for m in (original, optimized))
    return {"peak": peaks, "saved": kept}
