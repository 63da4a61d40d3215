"""Memory of one call of any function."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from kernel_pytorch.harness import memory
from kernel_pytorch.harness.environment import describe_environment
from kernel_pytorch.harness.profiling.profile import peak_memory
from kernel_pytorch.harness.profiling.records import PeakMemory
from kernel_pytorch.harness.quick.comparison import name_of
from kernel_pytorch.harness.quick.inputs import Arguments
from kernel_pytorch.harness.quick.records import Measured
from kernel_pytorch.harness.report import size
from kernel_pytorch.harness.tables import PrintableTable, table
from kernel_pytorch.harness.tensors import leaves


class MemoryProfile(Measured):
    """Memory that one call needs beside its arguments, in bytes.

    Attributes:
        name: of the function.
        forward_peak: most that was allocated at any time in a forward without gradients, results included.
        training_peak: the same over a forward and its backward, gradients included; None where nothing is
            differentiable.
        saved_for_backward: kept by the graph between the two, without arguments and results.
        memory: the peak of the forward and its backward, or of the forward alone, arguments included.
    """

    name: str
    forward_peak: int
    training_peak: int | None = None
    saved_for_backward: int | None = None
    memory: PeakMemory

    def table(self) -> PrintableTable:
        """One row; both `print` and rich show it."""
        figures = (self.forward_peak, self.training_peak, self.saved_for_backward)
        row = ["nothing to train" if value is None else size(value) for value in figures]
        return table(self.heading(self.name), ("peak, forward", "peak, training", "saved for backward"), [row])

    def plot(self, path: Path | str) -> Path:
        """Draw nothing, with a DeprecationWarning: the timeline was cut."""
        replaced = "profile_module(..., trace=...) writes allocations, torch.cuda.memory._dump_snapshot for memory_viz"
        warnings.warn(f"profile_memory(...).plot() draws no timeline: {replaced}", DeprecationWarning, stacklevel=2)
        return Path(path)


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
    arguments = Arguments(args, kwargs)
    if not arguments.tensors:
        raise ValueError(f"{name_of(function)}: no argument is a tensor; give the tensors that it works on")
    own, device = arguments.leaves, arguments.device
    parameters = list(function.parameters()) if isinstance(function, torch.nn.Module) else []

    def call(*given: Any) -> tuple[Tensor, ...]:
        return tuple(each for each in tree_leaves(arguments.bind(function, given)()) if isinstance(each, Tensor))

    def forward() -> object:
        return call(*own)

    with torch.enable_grad():
        if any(output.requires_grad for output in call(*leaves(own))):
            figures = memory.profile_memory(call, *own, parameters=parameters)._asdict()
            at_peak = peak_memory(memory.training_step(call, own, parameters), device)
        else:
            figures, at_peak = {"forward_peak": memory.peak(forward, device)}, peak_memory(forward, device)
    device_name = describe_environment(device).device_name
    return MemoryProfile(name=name_of(function), device=device_name, inputs=arguments.labels, memory=at_peak, **figures)
