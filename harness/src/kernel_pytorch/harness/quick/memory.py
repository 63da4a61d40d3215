"""Memory of one call of any function."""

from __future__ import annotations

import functools
from collections.abc import Callable
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
