"""Memory of a call: the peak while it runs, and what it keeps until its backward."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernel_pytorch.harness.tensors import as_tuple, leaves, wanting


class MemoryUse(NamedTuple):
    """Bytes that one call needs in addition to its arguments.

    Attributes:
        forward_peak: most that was allocated at any time in a forward without gradients, outputs included.
        training_peak: the same over a forward and its backward, gradients included.
        saved_for_backward: bytes that the graph keeps between the two, without arguments and outputs.
    """

    forward_peak: int
    training_peak: int
    saved_for_backward: int


def profile_memory(function: Callable[..., Any], *arguments: Any, parameters: Sequence[Tensor] = ()) -> MemoryUse:
    """Measure the memory of one call of a function, after one call to warm up.

    Args:
        function: takes `arguments` by position, returns a tensor or a tuple of tensors.
        *arguments: tensors, all on one device, and plain values. Floating-point tensors receive gradients.
        parameters: tensors that the function uses without being given them, such as a module's; they receive gradients.
    """
    device = next(a.device for a in arguments if isinstance(a, Tensor))
    with torch.no_grad():
        forward = peak(lambda: function(*arguments), device)
    training = peak(training_step(function, arguments, parameters), device)
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    own = leaves(arguments)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        outputs = as_tuple(function(*own))
    for each in (*own, *parameters, *outputs):
        if isinstance(each, Tensor):
            saved.pop(each.untyped_storage().data_ptr(), None)
    return MemoryUse(forward, training, sum(saved.values()))


def training_step(
    function: Callable[..., Any], arguments: Sequence[Any], parameters: Sequence[Tensor] = ()
) -> Callable[[], None]:
    """Return a forward with its backward, whose incoming gradients are ones; arguments as in `profile_memory`."""
    own = leaves(arguments)
    wanted = wanting([*own, *parameters])

    def step() -> None:
        outputs = [o for o in as_tuple(function(*own)) if o.requires_grad]
        torch.autograd.grad(outputs, wanted, [torch.ones_like(o) for o in outputs], allow_unused=True)

    return step


def peak(call: Callable[[], object], device: torch.device) -> int:
    """Measure the peak of allocated bytes of a call, in its second run."""
    call()  # fill caches of compilers and libraries
    gc.collect()  # cycles of earlier calls would be released during this one and lower its peak
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
