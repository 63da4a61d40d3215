"""Arithmetic of launches. What Triton offers for it unpacks constants of kernels: microseconds a call on the host."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .device import cache_size


def cdiv(dividend: int, divisor: int) -> int:
    """The quotient rounded up."""
    return -(-dividend // divisor)


def next_power_of_2(number: int) -> int:
    """The least power of two that is no less than `number`, which is at least 1."""
    return 1 << (number - 1).bit_length()


def warps(elements: int, each: int = 16) -> int:
    """16 elements a thread, if no other number is given: two 128-bit loads of a 16-bit dtype in flight."""
    return min(16, max(1, elements // (32 * each)))


def exceeds_int32(*tensors: Tensor) -> bool:
    """Whether an offset into one of these, or into a contiguous one of its shape, may pass 2^31 - 1.

    Masked lanes of the last block are included.
    """
    return any(_reach(tensor) >= 2**31 - 2**17 for tensor in tensors)


def _reach(tensor: Tensor) -> int:
    if tensor.is_contiguous():
        return tensor.numel()
    offsets = ((n - 1) * abs(stride) for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return max(sum(offsets), tensor.numel())


def bytes_of(*tensors: Tensor | None) -> int:
    """Bytes that reading or writing these tensors once moves."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def eviction_policy(x: Tensor, traffic: int) -> str:
    """Eviction policy of `x`, which is not reread soon, in a kernel that moves `traffic` bytes through the L2 cache.

    Where everything fits, x makes room for y, which the next kernel reads. Where nothing can stay, reads that are held
    longer get the last 2 to 4 % of the bandwidth (H200; NVIDIA does not say why).
    """
    return "evict_last" if traffic > cache_size(x.device) else "evict_first"


def reader(x: Tensor | None, make: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    """Return what gives a kernel the memory of `make(x)`: x itself if that is a view of it or x is None, else a copy.

    A kernel receives strides as separate arguments, so it needs only the first address of a view.
    """
    return _itself if x is None or make(x).data_ptr() == x.data_ptr() else make


_itself: Callable[[Any], Any] = functools.partial({}.get, None)  # a function in C that returns what it is given


def allocator(
    like: Tensor, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None, needed: bool = True
) -> Callable[[], Tensor]:
    """Return a function that allocates a new contiguous result in each call, like a given tensor by default.

    Args:
        like: gives the device, and the default shape and dtype.
        shape: replaces the default.
        dtype: replaces the default.
        needed: if false, results have the shape `(0,)`.
    """
    shape = (like.shape if shape is None else shape) if needed else (0,)
    nothing = torch.empty(0, dtype=dtype or like.dtype, device=like.device)  # holds no memory, so a plan may keep it
    return functools.partial(nothing.new_empty, shape)  # half the time of torch.empty


def unmade(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A contiguous tensor without memory: what a plan needs to know of a result."""
    return torch.empty(shape, dtype=dtype, device="meta")
