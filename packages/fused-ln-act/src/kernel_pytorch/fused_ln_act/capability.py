"""Of which compute capability a GPU is. Calls ask for it by the dozen, and PyTorch takes a microsecond to answer."""

from __future__ import annotations

import functools

import torch


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
