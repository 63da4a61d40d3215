"""Cached queries of GPU properties: calls make dozens of them, and PyTorch takes a microsecond to answer one."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor

# KiB that one program can have, by compute capability, and 99 elsewhere: CUDA C++ Programming Guide, technical
# specifications.
SHARED_MEMORY = {80: 163, 87: 163, 90: 227, 100: 227, 103: 227, 110: 227}
# The interpreter runs programs one after the other. Fewer would make chains of sums as long as no GPU has them.
INTERPRETER_PROGRAMS = 16


def compute_capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a GPU: `(9, 0)` is Hopper."""
    # Without an index it is the current device, which may change.
    known = not torch.compiler.is_compiling() and device.index is not None
    return _remembered(device) if known else _read(device)


def _read(device: torch.device) -> tuple[int, int]:
    properties = torch.cuda.get_device_properties(device)  # unlike get_device_capability, Dynamo folds this
    return properties.major, properties.minor


@functools.lru_cache
def _remembered(device: torch.device) -> tuple[int, int]:
    return _read(device)


@functools.lru_cache
def cache_size(device: torch.device) -> int:
    """Bytes of the L2 cache; without a GPU those of an H100."""
    if device.type != "cuda":
        return 50 * 2**20
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


@functools.lru_cache
def multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of a GPU."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def on_device(x: Tensor) -> contextlib.AbstractContextManager[Any]:
    """Make the device of `x` current: Triton launches on the current device."""
    if x.device.type != "cuda" or x.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)


@functools.lru_cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program can have on `device`, which is the current one."""
    import triton

    if triton.knobs.runtime.interpret:
        return 227 * 1024
    architecture = triton.runtime.driver.active.get_current_target().arch
    return SHARED_MEMORY.get(architecture, 99) * 1024


def program_count(device: torch.device, per_multiprocessor: int) -> int:
    """How many programs share the rows. It decides the order of the sum, so it depends on device and shape alone."""
    return INTERPRETER_PROGRAMS if device.type != "cuda" else per_multiprocessor * multiprocessors(device)
