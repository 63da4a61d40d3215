"""Memory of one call of any function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from kernel_pytorch.harness import memory
from kernel_pytorch.harness.environment import describe_environment
from kernel_pytorch.harness.profiling.profile import peak_memory
from kernel_pytorch.harness.quick.comparison import name_of
from kernel_pytorch.harness.quick.inputs import Arguments
from kernel_pytorch.harness.quick.records import MemoryProfile
from kernel_pytorch.harness.tensors import leaves


def profile_memory(function: Callable[..., Any], *args: Any, **kwargs: Any) -> MemoryProfile:
    """Measure the memory that one call of a function needs.

    Args:
        function: takes `args` and `kwargs`, returns tensors, also in lists, tuples and dictionaries.
        *args: tensors and plain values, also in lists, tuples and dictionaries. Floating-point tensors among them, and
            a module's own parameters, receive gradients.
        **kwargs: as `args`, by name.

    Raises:
        ValueError: no argument is a tensor, so the device is not known.
    """
    arguments = Arguments.of(args, kwargs)
    if not arguments.tensors:
        raise ValueError(f"{name_of(function)}: no argument is a tensor; give the tensors that it works on")
    parameters = list(function.parameters()) if isinstance(function, torch.nn.Module) else []

    def tensors(*leaves: Any) -> tuple[Tensor, ...]:
        return tuple(leaf for leaf in tree_leaves(arguments.call(function, leaves)) if isinstance(leaf, Tensor))

    forward = functools.partial(tensors, *arguments.leaves)
    with torch.enable_grad():
        trains = any(output.requires_grad for output in tensors(*leaves(arguments.leaves)))
        use = memory.profile_memory(tensors, *arguments.leaves, parameters=parameters) if trains else None
        step = memory.training_step(tensors, arguments.leaves, parameters) if trains else forward
        at_peak = peak_memory(step, arguments.device)
    without = {"training_peak": None, "saved_for_backward": None}
    return MemoryProfile(
        name=name_of(function),
        device=describe_environment(arguments.device).device_name,
        inputs=arguments.labels,
        memory=at_peak,
        **(asdict(use) if use else {"forward_peak": memory.peak(forward, arguments.device), **without}),
    )
