"""Memory of a call: the peak while it runs, and what it keeps until its backward."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class MemoryUse:
    """Bytes that one call needs beside its arguments.

    Attributes:
        forward_peak: most that was allocated at any time in a forward without gradients, outputs included.
        training_peak: the same over a forward and its backward, gradients included.
        saved_for_backward: what the graph keeps alive between the two, arguments and outputs left out.
    """

    forward_peak: int
    training_peak: int
    saved_for_backward: int


def profile_memory(function: Callable[..., Any], *arguments: Any, parameters: Sequence[Tensor] = ()) -> MemoryUse:
    """Measure what one call of a function needs, after one call to warm up.

    Args:
        function: takes `arguments` by position, returns a tensor or a tuple of tensors.
        *arguments: tensors, all on one device, and plain values. Floating-point tensors receive gradients.
        parameters: what the function uses without being given it, a module's parameters; they receive gradients too.
    """
    leaves = [_leaf(a) for a in arguments]
    device = next(a.device for a in arguments if isinstance(a, Tensor))

    def forward() -> None:
        with torch.no_grad():
            function(*arguments)

    training = training_step(function, arguments, parameters)
    return MemoryUse(peak(forward, device), peak(training, device), _saved(function, leaves, parameters))


def training_step(
    function: Callable[..., Any], arguments: Sequence[Any], parameters: Sequence[Tensor] = ()
) -> Callable[[], None]:
    """A forward and its backward, with ones coming in at every output; arguments as in `profile_memory`."""
    leaves = [_leaf(a) for a in arguments]
    wanted = [t for t in (*leaves, *parameters) if isinstance(t, Tensor) and t.requires_grad]

    def step() -> None:
        outputs = [o for o in _tensors(function(*leaves)) if o.requires_grad]
        torch.autograd.grad(outputs, wanted, [torch.ones_like(o) for o in outputs], allow_unused=True)

    return step


def peak(call: Callable[[], object], device: torch.device) -> int:
    """Most bytes that a call allocates at any time; it is called once before, and then measured."""
    call()  # caches of compilers and libraries are no part of a call
    gc.collect()  # what earlier calls left in cycles would be released during this one, and lower its peak
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True, acc_events=True) as profiler:
        call()
    return max(itertools.accumulate(allocations(profiler, device), initial=0))


def allocations(profiler: torch.profiler.profile, device: torch.device) -> list[int]:
    """Bytes of every allocation on a device that a finished profile recorded, in order; releases are negative."""
    assert profiler.profiler is not None
    kind = getattr(torch.autograd.DeviceType, device.type.upper())
    events = profiler.profiler.kineto_results.events()
    found = [event for event in events if event.name() == "[memory]" and event.device_type() == kind]
    return [event.nbytes() for event in sorted(found, key=lambda event: event.start_ns())]


def _saved(function: Callable[..., Any], leaves: Sequence[Any], parameters: Sequence[Tensor]) -> int:
    """Bytes of the distinct storages that autograd saves, without those of arguments, parameters and outputs."""
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        outputs = _tensors(function(*leaves))
    known = [t for t in (*leaves, *parameters, *outputs) if isinstance(t, Tensor)]
    for tensor in known:
        saved.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(saved.values())


def _leaf(argument: Any) -> Any:
    if isinstance(argument, Tensor) and argument.is_floating_point():
        return argument.detach().requires_grad_()
    return argument


def _tensors(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)
