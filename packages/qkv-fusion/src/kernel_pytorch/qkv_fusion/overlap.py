"""The check of tensors that are overwritten; apart from `arguments.py`, which kernels import."""

from __future__ import annotations

import torch
from torch import Tensor

from ._core.arguments import shape_of


def check_no_overlap(name: str, tensor: Tensor) -> None:
    """Raise ValueError, naming the argument, if elements of a tensor that is overwritten share memory.

    What torch.compile and torch.export trace is checked for repeated dimensions alone: other strides may be symbolic.
    """
    tracing = torch.compiler.is_compiling()
    if not tracing and tensor.is_contiguous():
        return
    repeated = any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if repeated or (not tracing and _overlaps(tensor)):
        raise ValueError(
            f"{name}: shape is {shape_of(tensor)} and stride {tensor.stride()}, so that elements share memory; it is"
            f" overwritten and must not overlap itself: give {name}.contiguous()"
        )


def _overlaps(tensor: Tensor) -> bool:
    """Whether two elements of a strided tensor are at the same place."""
    dimensions = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    end = 0  # the last place that the dimensions so far reach
    for stride, size in dimensions:
        if stride <= end:
            break
        end += stride * (size - 1)
    else:
        return False
    if tensor.numel() == 0:
        return False
    places = torch.zeros(1, dtype=torch.int64, device="cpu")
    for stride, size in dimensions:  # they interleave
        places = (places.unsqueeze(1) + stride * torch.arange(size, device="cpu")).flatten()
    return places.unique().numel() < places.numel()
