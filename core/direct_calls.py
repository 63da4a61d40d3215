"""Checks of operators that are called directly: such a call reaches a kernel without any other check."""

from __future__ import annotations

import torch
from torch import Size, Tensor

DTYPE_NAMES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
}
"""As operators take the dtype of a gradient, for which a schema has no type that every torch can name."""


def check_operands(**tensors: Tensor | None) -> None:
    """Check tensors for what kernels read: floats, of which the memory was not freed.

    Raises:
        TypeError: another dtype.
        ValueError: the storage is empty, as that of sharded parameters is between their uses.
    """
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise TypeError(f"{name}: dtype is {tensor.dtype}; allowed are float16, bfloat16, float32, float64")
        check_memory(name, tensor)


def check_memory(name: str, tensor: Tensor) -> None:
    """Raise ValueError, naming the argument, if its memory was freed."""
    if was_freed(tensor) and tensor.numel() > 0:
        shape = tuple(tensor.shape)
        raise ValueError(f"{name}: shape is {shape}, but its storage holds nothing; it was freed, and must be filled")


def was_freed(tensor: Tensor) -> bool:
    """Whether the storage has no memory: then an address is the offset alone."""
    return tensor.data_ptr() == tensor.storage_offset() * tensor.itemsize


def check_shapes(wanted: Size, **tensors: Tensor | None) -> None:
    """Raise ValueError, naming the argument, unless tensors have this shape."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != wanted:
            raise ValueError(f"{name}: shape is {tuple(tensor.shape)}; it must be {tuple(wanted)}")


def check_count(wanted: int, **tensors: Tensor) -> None:
    """Raise ValueError, naming the argument, unless tensors have so many elements."""
    for name, tensor in tensors.items():
        if tensor.numel() != wanted:
            raise ValueError(f"{name}: shape is {tuple(tensor.shape)}; it must have {wanted} elements")


def dtype_named(name: str, given: str) -> torch.dtype:
    """The dtype that an argument of this name names; ValueError unless it is one of `DTYPE_NAMES`."""
    for dtype, allowed in DTYPE_NAMES.items():
        if given == allowed:
            return dtype
    raise ValueError(f"{name}: given {given!r}; allowed are {', '.join(map(repr, DTYPE_NAMES.values()))}")
