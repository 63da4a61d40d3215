"""One function on the clock, and what it needs in memory, from a line of Python."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from kernel_pytorch.harness import memory
from kernel_pytorch.harness.clock import median_interval
from kernel_pytorch.harness.environment import describe_environment
from kernel_pytorch.harness.machine import Machine
from kernel_pytorch.harness.profiling.peak_memory import peak_memory
from kernel_pytorch.harness.profiling.placement import local_machine
from kernel_pytorch.harness.quick.inputs import REPEATED, Arguments
from kernel_pytorch.harness.quick.records import Benchmark, MemoryProfile
from kernel_pytorch.harness.quick.timed import held_against, time_together
from kernel_pytorch.harness.results import IntervalRecord
from kernel_pytorch.harness.timing import ROUNDS


def quick_benchmark(
    function: Callable[..., Any], *args: Any, rounds: int = ROUNDS, machine: Machine | None = None, **kwargs: Any
) -> Benchmark:
    """Time one function, called without gradients.

    Each call finds its inputs outside the cache, and values in them that were never there before: they are copies of
    the given ones, scaled. To time a backward, write it into the function, under `torch.enable_grad()`.

    Args:
        function: takes `args` and `kwargs`. On CUDA, one that waits for the GPU is timed with its launch gaps.
        *args: tensors and plain values, also in lists, tuples and dictionaries.
        rounds: samples.
        machine: the limits that shares are of; measured now, once per process, if None.
        **kwargs: as `args`, by name (`rounds` and `machine` are taken).

    Raises:
        ValueError: `rounds` is below what an interval needs.
    """
    arguments = Arguments.of(args, kwargs)
    machine = machine or local_machine(str(arguments.device))
    name = name_of(function)
    timings, moved, pool = time_together({name: function}, arguments, rounds=rounds)
    timing = timings[name]
    seconds = median_interval(timing.samples)
    share, problem = held_against(timing, moved, machine.ceilings, arguments.dtype_name)
    return Benchmark(
        name=name,
        device=machine.environment.device_name,
        inputs=arguments.labels,
        seconds=IntervalRecord.of(seconds),
        samples=timing.samples,
        calls_per_sample=timing.calls_per_sample,
        method=timing.method,
        pool_bytes=timing.pool_bytes,
        bytes=moved,
        bytes_per_second=moved / seconds.median,
        share_of_copy=share,
        problem=problem,
        notes=() if pool.varies else (REPEATED,),
    )


def profile_memory(function: Callable[..., Any], *args: Any, **kwargs: Any) -> MemoryProfile:
    """Find out what one call of a function needs in memory, at most and over time.

    Args:
        function: takes `args` and `kwargs`, returns tensors, also in lists, tuples and dictionaries.
        *args: tensors and plain values, also in lists, tuples and dictionaries. Floating-point tensors among them, and
            a module's own parameters, receive gradients.
        **kwargs: as `args`, by name.

    Raises:
        ValueError: no argument is a tensor, so there is no device to look at.
    """
    arguments = Arguments.of(args, kwargs)
    if not arguments.tensors:
        raise ValueError(f"{name_of(function)}: no argument is a tensor; give the tensors that it works on")
    flat = arguments.flat(function)
    parameters = list(function.parameters()) if isinstance(function, torch.nn.Module) else []

    def tensors(*leaves: Any) -> tuple[Tensor, ...]:
        return tuple(leaf for leaf in tree_leaves(flat(*leaves)) if isinstance(leaf, Tensor))

    forward = functools.partial(tensors, *arguments.leaves)
    with torch.enable_grad():
        leaves = [leaf.detach().requires_grad_() if _is_float(leaf) else leaf for leaf in arguments.leaves]
        trains = any(output.requires_grad for output in tensors(*leaves))
        use = memory.profile_memory(tensors, *arguments.leaves, parameters=parameters) if trains else None
        step = memory.training_step(tensors, arguments.leaves, parameters) if trains else forward
        at_peak = peak_memory(step, arguments.device)
    return MemoryProfile(
        name=name_of(function),
        device=describe_environment(arguments.device).device_name,
        inputs=arguments.labels,
        forward_peak=use.forward_peak if use else memory.peak(forward, arguments.device),
        training_peak=use.training_peak if use else None,
        saved_for_backward=use.saved_for_backward if use else None,
        memory=at_peak,
    )


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def name_of(function: Callable[..., Any]) -> str:
    """What a function is called in tables."""
    return getattr(function, "__name__", type(function).__name__)
