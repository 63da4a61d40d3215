"""What is allocated while a call runs, moment by moment."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from kernel_pytorch.harness.profiling.records import MemoryTimeline

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
"""The profiler's categories, in the words of people."""


def memory_timeline(call: Callable[[], object], device: torch.device) -> MemoryTimeline:
    """Run a call once and record every allocation on a device, split by what it is for where the profiler can tell.

    The profiler tells parameters, gradients and activations apart by what happens to them in a backward. A call
    without one is not split, nor is one that the profiler does not understand; the note says so.

    Args:
        call: what to run; run it before, so that caches of libraries are no part of it.
        device: whose memory is looked at.
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
        note = (
            ""
            if any(category == "gradients" for _, category, _ in changes)
            else "not split: the profiler saw no gradient"
        )
    except Exception as error:  # a part of the profiler that torch does not promise to keep
        changes, note = [], f"not split: the profiler failed on it ({type(error).__name__}: {error})"
    if note:
        changes = [(time, TOTAL, change) for time, change in _allocations(profiler, device)]
    return _accumulate(changes, note)


def _categorised(profiler: Any, device: torch.device) -> Iterable[tuple[int, str, int]]:
    """Nanoseconds, category, change in bytes. Tensors that were there before have a time of -1."""
    found = profiler._memory_profile()
    categories = found._categories
    for time, action, (key, version), size in found.timeline:
        if key.device.type != device.type:
            continue
        now = _category(categories.get(key, version))
        if action.name in ("PREEXISTING", "CREATE"):
            yield time, now, size
        elif action.name == "DESTROY":
            yield time, now, -size
        else:  # INCREMENT_VERSION: written in place, which can make a gradient of a temporary
            yield time, now, -size
            yield time, _category(categories.get(key, version + 1)), size


def _category(category: Any) -> str:
    return OTHER if category is None else CATEGORIES.get(category.name, OTHER)


def _allocations(profiler: Any, device: torch.device) -> Iterable[tuple[int, int]]:
    """Nanoseconds and change in bytes."""
    stack = list(profiler.profiler.kineto_results.experimental_event_tree())
    found = []
    while stack:
        event = stack.pop()
        stack += event.children
        if event.tag.name == "Allocation" and event.extra_fields.device.type == device.type:
            found.append((event.start_time_ns, event.extra_fields.alloc_size))
    return sorted(found, key=lambda change: change[0])


def _accumulate(changes: list[tuple[int, str, int]], note: str) -> MemoryTimeline:
    """Sum up changes, in the order of their times; what was there before stands at the beginning."""
    order = [*CATEGORIES.values(), OTHER, TOTAL]
    names = sorted({category for _, category, _ in changes}, key=order.index)
    begin = min((time for time, _, _ in changes if time >= 0), default=0)
    now = dict.fromkeys(names, 0)
    seconds: list[float] = [0.0]
    series: dict[str, list[int]] = {name: [0] for name in names}
    for time, category, change in changes:
        now[category] += change
        if time >= 0:
            seconds.append((time - begin) * 1e-9)
        for name in names:
            if time >= 0:
                series[name].append(now[name])
            else:
                series[name][0] = now[name]
    peak = max((sum(column) for column in zip(*series.values(), strict=True)), default=0)
    return MemoryTimeline(
        seconds=tuple(seconds), bytes={name: tuple(values) for name, values in series.items()}, peak=peak, note=note
    )
