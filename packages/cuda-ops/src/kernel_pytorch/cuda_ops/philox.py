"""The dropout mask in PyTorch: what gradients of gradients are made of.

The kernels have their own (`csrc/include/kernel_pytorch/philox.h`, which says what the mask is); the definition is
`philox.py` of the package fused-ln-act.
"""

from __future__ import annotations

import torch
from torch import Tensor


def threshold(p: float) -> int:
    """What the upper 31 bits of a kept element's word are not below."""
    return min(int(p * 2147483648.0 + 0.5), 2147483647)


def _multiply(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Upper and lower 32 bits of the product of two 32-bit words, in int64 that never overflows."""
    low = (word & 0xFFFF) * factor
    high = (word >> 16) * factor + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def philox(seed: Tensor, counter: Tensor) -> Tensor:
    """Four random words for every counter, `(..., 4)`, int64 from 0 to 2^32 - 1; Philox-4x32-10.

    Args:
        seed: int64 `()`.
        counter: int64, not negative.
    """
    a, b = counter & 0xFFFFFFFF, (counter >> 32) & 0xFFFFFFFF
    c, d = torch.zeros_like(a), torch.zeros_like(a)
    key_a, key_b = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for _ in range(10):
        high_a, low_a = _multiply(a, 0xD2511F53)
        high_c, low_c = _multiply(c, 0xCD9E8D57)
        a, b, c, d = high_c ^ b ^ key_a, low_c, high_a ^ d ^ key_b, low_a
        key_a, key_b = (key_a + 0x9E3779B9) & 0xFFFFFFFF, (key_b + 0xBB67AE85) & 0xFFFFFFFF
    return torch.stack((a, b, c, d), -1)


def dropout(x: Tensor, seed: Tensor | None, p: float) -> Tensor:
    """`x / (1 - p)` where the element is kept, else 0; x itself where p is 0.

    Args:
        x: `(..., N)`, float32 or float64.
        seed: int64 `()`, on the device of x; None where p is 0.
        p: the probability of being dropped, from 0 to below 1.
    """
    if p == 0.0:
        return x
    assert seed is not None
    columns = x.shape[-1]
    quads = (columns + 3) // 4
    rows = x.numel() // columns
    counter = torch.arange(rows * quads, dtype=torch.int64, device=x.device)
    words = philox(seed, counter).reshape(rows, quads * 4)[:, :columns].reshape(x.shape)
    return torch.where((words >> 1) >= threshold(p), x * (1.0 / (1.0 - p)), torch.zeros_like(x))
