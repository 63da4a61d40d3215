"""Does this clock, on this machine, now, tell equal from unequal? Asked live, of work whose answer is known."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernel_pytorch.harness.clock.interleave import measure
from kernel_pytorch.harness.clock.statistics import Comparison, Verdict, compare_paired
from kernel_pytorch.harness.clock.subject import Subject

ELEMENTS = {"cpu": 16 * 2**10, "cuda": 8 * 2**20}
"""float32 elements per operation. On a processor few enough for one core's cache and for one thread (torch divides a
sigmoid from 32768 elements on; it divides a sine much earlier, and threads that wait for each other are noise): the
time is the number of operations times the time of one. On a GPU enough to fill it."""

SETS = 4


@dataclass(frozen=True)
class SelfTestResult:
    """One question to the clock.

    Attributes:
        name: what was compared.
        expected: the true answer.
        comparison: the answer that the clock gave.
    """

    name: str
    expected: Verdict
    comparison: Comparison

    @property
    def passed(self) -> bool:
        """Whether the clock found the truth; being unsure is not finding it."""
        return self.comparison.verdict is self.expected


def self_test(
    device: torch.device | str, *, rounds: int = 1500, seed: int = 0, on_round: Callable[[], None] | None = None
) -> list[SelfTestResult]:
    """Compare two identical functions, and one that does ten percent more work, on the real clock.

    Args:
        device: whose clock is tested.
        rounds: samples per function. The default takes about ten seconds, so that a neighbour who keeps a core busy
            for a second or two spoils fewer than half of them.
        seed: of the order and of the data.
        on_round: called after each round, for progress.

    Returns:
        Two results: identical work (no difference), and ten percent more work (slower).
    """
    device = torch.device(device)
    generator = torch.Generator(device).manual_seed(seed)
    inputs = [torch.randn(ELEMENTS[device.type], device=device, generator=generator) for _ in range(SETS)]
    outputs = [torch.empty_like(tensor) for tensor in inputs]
    subjects = [
        _repeated_sigmoid(name, operations, inputs, outputs)
        for name, operations in (("baseline", 10), ("identical work", 10), ("ten percent more work", 11))
    ]
    timings = measure(subjects, device, rounds=rounds, seed=seed, on_round=on_round)
    expected = {"identical work": Verdict.SAME, "ten percent more work": Verdict.SLOWER}
    baseline = timings["baseline"].samples
    return [
        SelfTestResult(name, verdict, compare_paired(baseline, timings[name].samples))
        for name, verdict in expected.items()
    ]


def _repeated_sigmoid(name: str, operations: int, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> Subject:
    """A subject that takes the sigmoid of a tensor `operations` times.

    All subjects use the very same memory: where a buffer happens to lie can change the time by two percent, and two
    functions that differ in it are not identical.
    """

    def run(index: int) -> None:
        for _ in range(operations):
            torch.sigmoid(inputs[index], out=outputs[index])

    return Subject(name, run, len(inputs), inputs[0].nbytes + outputs[0].nbytes)
