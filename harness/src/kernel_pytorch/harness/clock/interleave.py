"""Time several subjects in turns, so that disturbances of the machine affect all of them equally."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from kernel_pytorch.harness.clock.cuda import CudaSampler
from kernel_pytorch.harness.clock.sampling import Sampler, Subject, Timing


def sampler_for(subject: Subject, device: torch.device) -> Sampler:
    """The sampler for a device type. Raises ValueError naming the device if there is none."""
    samplers: dict[str, type[Sampler]] = {"cpu": Sampler, "cuda": CudaSampler}
    if device.type not in samplers:
        raise ValueError(f"device is {device}; the clock knows cpu and cuda")
    return samplers[device.type](subject, device)


def measure(
    subjects: Sequence[Subject],
    device: torch.device | str,
    *,
    rounds: int = 30,
    seed: int = 0,
    refresh: Callable[[], None] | None = None,
    make_sampler: Callable[[Subject, torch.device], Sampler] = sampler_for,
) -> dict[str, Timing]:
    """Time every subject once per round, in a new random order each round.

    Samples with the same index belong to the same round and can be paired. All subjects are timed on the same input
    sets: see `sampling`. If one subject is so short that only a CUDA graph can time it, all are captured where they
    can be, because times of different methods cannot be compared; `Timing.method` tells which one was used.

    Args:
        subjects: with distinct names and the same number of sets.
        device: where they run.
        rounds: samples per subject.
        seed: of the order.
        refresh: gives all sets new values; called before each sample, which then uses no set twice. In a CUDA graph,
            where nothing can be remembered from one replay to the next, samples are as long as without `refresh`.
        make_sampler: makes the sampler of a subject.

    Returns:
        One `Timing` per subject, by name, in the order of `subjects`.

    Raises:
        ValueError: no subjects, two of one name, differing `sets`, or no rounds.
    """
    _check(subjects, rounds)
    samplers = [make_sampler(subject, torch.device(device)) for subject in subjects]
    too_short = [sampler.warm_up() for sampler in samplers]
    for sampler in samplers:
        if refresh is not None:
            refresh()
        sampler.prepare(short=any(too_short))
        if refresh is not None and not sampler.method.startswith("CUDA graph"):
            sampler.calls_per_sample = min(sampler.calls_per_sample, sampler.subject.sets)
    stride = max(sampler.calls_per_sample for sampler in samplers)
    generator = np.random.default_rng(seed)
    samples: list[list[float]] = [[] for _ in samplers]
    spans: list[list[tuple[float, float]]] = [[] for _ in samplers]
    for round_number in range(rounds):
        start = round_number * stride % subjects[0].sets
        for index in generator.permutation(len(samplers)):
            if refresh is not None:
                refresh()
            begin = time.perf_counter()
            samples[index].append(samplers[index].sample(start))
            spans[index].append((begin, time.perf_counter()))
    return {
        sampler.subject.name: Timing(
            name=sampler.subject.name,
            samples=tuple(seconds),
            calls_per_sample=sampler.calls_per_sample,
            method=sampler.method,
            pool_bytes=sampler.subject.sets * sampler.subject.bytes_per_set,
            spans=tuple(when),
        )
        for sampler, seconds, when in zip(samplers, samples, spans, strict=True)
    }


def _check(subjects: Sequence[Subject], rounds: int) -> None:
    names = [subject.name for subject in subjects]
    if not names:
        raise ValueError("subjects is empty; give at least one")
    if len(set(names)) != len(names):
        raise ValueError(f"subjects share a name: {', '.join(names)}")
    if len({subject.sets for subject in subjects}) != 1:
        given = ", ".join(f"{subject.name}: {subject.sets}" for subject in subjects)
        raise ValueError(f"subjects differ in sets ({given}); they must be timed on the same inputs")
    if rounds < 1:
        raise ValueError(f"rounds is {rounds}; allowed is 1 or more")
