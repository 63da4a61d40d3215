"""Size of the pool of inputs with which no call finds its inputs in the cache."""

from __future__ import annotations

import os
from pathlib import Path

import torch

MOST_SETS = 256
"""Filling a larger pool of small tensors takes too long. Such a pool fits in the cache, which its size shows."""

FEWEST_SETS = {"cpu": 2, "cuda": 8}
"""The addresses of buffers decide how they share the channels of a GPU's memory: on an H200 a copy over two sets of
117 MB took 12 % longer than over four and more; over eight it was within 1 % of the copy over 64."""

ASSUMED_CPU_CACHE_BYTES = 32 * 2**20
"""Last-level cache of a processor whose cache is unknown."""

SYSFS_CPU = Path("/sys/devices/system/cpu")

_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def sets_needed(bytes_per_set: int, device: torch.device | str, *, memory_limit_bytes: int | None = None) -> int:
    """How many input sets a `Subject` needs so that its calls see cold inputs.

    Args:
        bytes_per_set: bytes that one call touches: inputs and outputs.
        device: where they lie.
        memory_limit_bytes: the pool stays below this, if two sets do, or one that is larger than the cache by itself.

    Returns:
        Enough sets for the pool to exceed `cold_pool_bytes`, at least `FEWEST_SETS` and at most `MOST_SETS`.
    """
    if bytes_per_set < 1:
        raise ValueError(f"bytes_per_set is {bytes_per_set}; allowed is 1 or more")
    cold = cold_pool_bytes(device)
    sets = cold // bytes_per_set + 1
    sets = min(max(sets, FEWEST_SETS[torch.device(device).type]), MOST_SETS)
    if memory_limit_bytes is not None:
        sets = min(sets, memory_limit_bytes // bytes_per_set)
    return max(sets, 1 if bytes_per_set > cold else 2)


def cold_pool_bytes(device: torch.device | str) -> int:
    """The size in bytes above which a pool leaves nothing useful in the cache between two uses of a set.

    Four times the L2 cache of a GPU, whose replacement is not least-recently-used; twice the last-level cache of a
    processor.
    """
    device = torch.device(device)
    factor = 4 if device.type == "cuda" else 2
    return factor * (last_level_cache_bytes(device) or ASSUMED_CPU_CACHE_BYTES)


def last_level_cache_bytes(device: torch.device | str) -> int | None:
    """Bytes of the L2 cache of a GPU, or of all last-level caches that this process may use; None if unknown."""
    device = torch.device(device)
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    if device.type == "cpu":
        return _cpu_cache_bytes(SYSFS_CPU)
    raise ValueError(f"device is {device}; the clock knows cpu and cuda")


def _cpu_cache_bytes(root: Path) -> int | None:
    """Sum of the distinct last-level caches: a large processor has one for every few cores."""
    sizes: dict[tuple[int, str], int] = {}
    for cpu in sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]:
        for cache in (root / f"cpu{cpu}" / "cache").glob("index*"):
            try:
                level = int((cache / "level").read_text())
                size = (cache / "size").read_text().strip()
                sharers = (cache / "shared_cpu_list").read_text().strip()
                kind = (cache / "type").read_text().strip()
                amount = int(size.rstrip("KMG")) * _UNITS.get(size[-1:], 1)
            except (OSError, ValueError):
                continue
            if kind != "Instruction":
                sizes[level, sharers] = amount
    last = max((level for level, _ in sizes), default=0)
    return sum(amount for (level, _), amount in sizes.items() if level == last) or None
