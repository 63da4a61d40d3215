"""Peak memory of a call, by purpose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kernel_pytorch.harness.memory import allocations
from kernel_pytorch.harness.profiling.records import PeakMemory

TOTAL = "allocated"
OTHER = "other"
CATEGORIES = {
    "PARAMETER": "parameters",
    "OPTIMIZER_STATE": "optimizer state",
    "INPUT": "inputs",
    "TEMPORARY": "temporaries",
    "ACTIVATION": "activations",
    "GRADIENT": "gradients",
    "AUTOGRAD_DETAIL": "autograd",
}
"""Names of the profiler's categories in tables."""


def peak_memory(call: Callable[[], object], device: torch.device) -> PeakMemory:
    """Run a call once and record every allocation on a device, split by purpose where the profiler knows it.

    The profiler tells parameters, gradients and activations apart by what happens to them in a backward. A call
    without a backward is not split, nor is one that the profiler cannot analyse; the note says so.

    Args:
        call: what to run; run it before, so that caches of libraries are not counted.
        device: the device whose memory is measured.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.synchronize(device)
    profiler = torch.profiler.profile(
        activities=activities, record_shapes=True, profile_memory=True, with_stack=True, acc_events=True
    )
    with profiler:
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    try:
        changes = list(_categorised(profiler, device))
        split = any(category == "gradients" for category, _ in changes)
        note = "" if split else "not split: the profiler saw no gradient"
    except Exception as error:  # torch does not promise to keep this part of the profiler
        changes, note = [], f"not split: the profiler failed on it ({type(error).__name__}: {error})"
    if note:
        changes = [(TOTAL, change) for change in allocations(profiler, device)]
    return _peak(changes, note)


def _categorised(profiler: Any, device: torch.device) -> Iterator[tuple[str, int]]:
    """Category and change in bytes, in the order of time, with tensors from before the call first."""
    found = profiler._memory_profile()
    categories = found._categories
    for _, action, (key, version), size in found.timeline:
        if key.device.type != device.type:
            continue
        now = _category(categories.get(key, version))
        if action.name in ("PREEXISTING", "CREATE"):
            yield now, size
        elif action.name == "DESTROY":
            yield now, -size
        else:  # INCREMENT_VERSION: written in place, which can make a gradient of a temporary
            yield now, -size
            yield _category(categories.get(key, version + 1)), size


def _category(category: Any) -> str:
    return OTHER if category is None else CATEGORIES.get(category.name, OTHER)


def _peak(changes: list[tuple[str, int]], note: str) -> PeakMemory:
    """The largest sum of the changes so far, and its parts."""
    now: Counter[str] = Counter()
    total = peak = 0
    at_peak: dict[str, int] = {}
    for category, change in changes:
        now[category] += change
        total += change
        if total > peak:
            peak, at_peak = total, {name: now[name] for name in (*CATEGORIES.values(), OTHER, TOTAL) if now[name]}
    return PeakMemory(peak=peak, at_peak=at_peak, note=note)
