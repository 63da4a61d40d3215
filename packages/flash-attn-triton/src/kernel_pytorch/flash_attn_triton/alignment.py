"""Inputs of PyTorch's attention at multiples of 16 bytes.

On a GPU PyTorch's attention does not check where memory begins. With a tensor that does not begin at 16 bytes, such as
a view of a flat buffer, cuDNN gives NaN, and the other backends stop with a misaligned address.

Dynamo cannot trace an address or a storage offset, so what it traces calls an operator, which decides as soon as
tensors with a storage offset pass through it. TorchInductor copies inputs of a graph that were aligned when it compiled
and are not when it runs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._core.call_kinds import has_plain_memory, has_transform
from .masks import always

BYTES = 16

_library = torch.library.Library("kernel_pytorch", "FRAGMENT")  # a registration lasts as long as its library
_library.define("flash_attention_aligned(Tensor(a) x, bool rows) -> Tensor(a)")
_library.define("flash_attention_copied(Tensor x) -> Tensor")


def aligned(x: Tensor, rows: bool = True) -> Tensor:
    """x, or a copy of it where it, or with `rows` one of its rows, does not begin at 16 bytes."""
    if torch.compiler.is_compiling():
        return torch.ops.kernel_pytorch.flash_attention_aligned(x, rows)
    return _aligned(x, rows)


def begins_aligned(x: Tensor) -> bool:
    """Whether the first element is 16-byte aligned; storage counts as aligned if the tensor has no plain memory."""
    if has_plain_memory(x):
        return x.data_ptr() % BYTES == 0
    return always(x.storage_offset() * x.element_size() % BYTES == 0)


def _aligned(x: Tensor, rows: bool) -> Tensor:
    if rows and not all(always(step * x.element_size() % BYTES == 0) for step in x.stride()[:-1]):
        x = x.contiguous()
    if begins_aligned(x):
        return x
    if has_plain_memory(x) or has_transform():
        return x.clone()
    # TorchInductor takes a clone with the strides of x for x.
    return torch.ops.kernel_pytorch.flash_attention_copied(x)


def _unchanged(ctx: Any, dy: Tensor) -> Tensor:
    return dy


_library.impl("flash_attention_aligned", _aligned, "CompositeImplicitAutograd")
_library.impl("flash_attention_copied", torch.clone, "CompositeExplicitAutograd")
torch.library.register_autograd("kernel_pytorch::flash_attention_copied", _unchanged, lib=_library)
