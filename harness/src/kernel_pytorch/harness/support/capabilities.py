"""The rows of the support table: what each asks, and where it can be asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernel_pytorch.harness import availability
from kernel_pytorch.harness.checks import check_deterministic, check_rows_independent, check_second_derivatives
from kernel_pytorch.harness.support import compilers, modes
from kernel_pytorch.harness.support.subject import Subject
from kernel_pytorch.harness.technique import Operation


@dataclass(frozen=True)
class Capability:
    """One row.

    Attributes:
        name: of the row; `Implementation.unsupported` speaks of it by this name.
        check: raises whatever it raises if the implementation does not support it.
        elsewhere: `device -> None`, or the reason why only another machine can tell.
        own_processes: whether the check starts processes itself: for code that may end its process, or for a group.
        promise: whether a yes promises something of all calls: then the few that are tried may agree by luck, and a
            declared no stays one.
    """

    name: str
    check: Callable[[Subject], None]
    elsewhere: Callable[[torch.device], str | None] = lambda device: None
    own_processes: bool = False
    promise: bool = False


def without_compiler(device: torch.device) -> str | None:
    """The reason why what TorchInductor compiles cannot be compiled here: even a GPU's code is called from C++."""
    return None if availability._cpp_compiler() else "needs a C++ compiler: $CXX, g++ or clang++ on PATH"


def without_cuda(device: torch.device) -> str | None:
    """The reason why what needs a GPU cannot be asked here."""
    return None if device.type == "cuda" else "needs a CUDA device"


def without_a_device_each(device: torch.device) -> str | None:
    """The reason why two processes cannot have a device each."""
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        return "needs two GPUs, or none: two processes share a CPU, not a GPU"
    return None


def check_sharded(subject: Subject) -> None:
    """DTensors sharded by rows, and `fully_shard`: two processes compute what one does."""
    # Importing DTensor takes half a second, and only this row needs it.
    from kernel_pytorch.harness.support.sharded import check_sharded

    processes = subject.shared.processes
    assert processes is not None
    names = (subject.shared.technique.name, subject.operation.name, subject.implementation.name)
    processes.call(check_sharded, *names)


GPU_ROWS = 64
"""How many times as many rows a GPU gets: few rows give its atomic additions too little to do to change their order."""


def check_double_backward(subject: Subject) -> None:
    """`gradcheck` and `gradgradcheck` in float64, along random directions."""
    check_second_derivatives(*subject.bound(subject.arguments()), fast=True)


def check_determinism(subject: Subject) -> None:
    """The same call gives the same bits again, outputs and gradients."""
    function, arguments = subject.bound(subject.arguments(GPU_ROWS if subject.device.type == "cuda" else 1))
    check_deterministic(function, arguments, backward=subject.operation.differentiable)


def check_batch_invariance(subject: Subject) -> None:
    """A row alone, or in a smaller batch, has the bits that it has in the whole batch; so has its gradient."""
    data = [subject.has_rows(name) for name in subject.names]
    arguments = [
        a.detach().requires_grad_(a.is_floating_point() and subject.operation.differentiable)
        if isinstance(a, Tensor) and has_rows
        else a
        for has_rows, a in zip(data, subject.arguments(), strict=True)
    ]
    torch._dynamo.reset()
    check_rows_independent(subject.function, arguments, data=data)


CAPABILITIES = (
    Capability("fullgraph", compilers.check_fullgraph),
    Capability("dynamic shapes", compilers.check_dynamic_shapes, without_compiler),
    Capability("opcheck", modes.check_opcheck),
    Capability("export", compilers.check_export),
    Capability(compilers.AOTINDUCTOR, compilers.check_aotinductor, without_compiler, own_processes=True),
    Capability("autocast", modes.check_autocast),
    Capability("CUDA graphs", modes.check_cuda_graphs, without_cuda),
    Capability("selective checkpointing", modes.check_selective_checkpointing),
    Capability("FLOP counter", modes.check_flop_counter),
    Capability("double backward", check_double_backward),
    Capability("FSDP2/DTensor", check_sharded, without_a_device_each, own_processes=True),
    Capability("determinism", check_determinism, promise=True),
    Capability("batch invariance", check_batch_invariance, promise=True),
)


def capability(name: str) -> Capability:
    """The row of that name. Raises KeyError naming all of them."""
    for candidate in CAPABILITIES:
        if candidate.name == name:
            return candidate
    raise KeyError(f"the support table has no row {name!r}; it has {', '.join(c.name for c in CAPABILITIES)}")


def check_declaration(operation: Operation) -> None:
    """Raise KeyError if an implementation declares a row unsupported that does not exist."""
    for implementation in operation.implementations:
        for name in implementation.unsupported:
            capability(name.removesuffix(" on cpu").removesuffix(" on cuda"))
