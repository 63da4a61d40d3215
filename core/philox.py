"""The dropout mask, defined: Philox-4x32-10 of a seed and of the place of an element, in plain integer arithmetic.

A tensor, such as the weights `(B, H, Sq, Sk)` of attention, is seen as rows of its last dimension. Philox maps a 64-bit
key and a counter to four random words of 32 bits; the key is the seed, and counter `row * ceil(columns / 4) + column //
4` serves four neighbouring columns with a word each. An element is kept where the upper 31 bits of its word are at
least `round(p * 2**31)`. Nothing here rounds, so every level and every device draws the same mask, bit for bit; the
words are those of Triton's `tl.randint4x`.

Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011, https://doi.org/10.1145/2063384.2063405.
"""

import torch
from torch import Tensor


def threshold(p: float) -> int:
    """What the upper 31 bits of a kept element's word are not below."""
    return min(int(p * 2147483648.0 + 0.5), 2147483647)


def multiply(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Upper and lower 32 bits of the product of two 32-bit words, in int64 that never overflows."""
    low = (word & 0xFFFF) * factor
    high = (word >> 16) * factor + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def philox(seed: Tensor, counter: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four random words for every counter.

    Args:
        seed: int64, of a shape that broadcasts with `counter`.
        counter: int64, not negative.

    Returns:
        Four tensors of int64, each from 0 to 2**32 - 1.
    """
    a, b = counter & 0xFFFFFFFF, (counter >> 32) & 0xFFFFFFFF
    c, d = torch.zeros_like(a), torch.zeros_like(a)
    key_a, key_b = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    for _ in range(10):
        high_a, low_a = multiply(a, 0xD2511F53)
        high_c, low_c = multiply(c, 0xCD9E8D57)
        a, b, c, d = high_c ^ b ^ key_a, low_c, high_a ^ d ^ key_b, low_a
        if torch.jit.is_scripting():
            # A memory access that its GPU fuser cannot see through: it would write every round out inside the next one,
            # twice each, and take minutes over it.
            a, c = torch.stack((a, c)).unbind(0)
        key_a, key_b = (key_a + 0x9E3779B9) & 0xFFFFFFFF, (key_b + 0xBB67AE85) & 0xFFFFFFFF
    return a, b, c, d


def keep(x: Tensor, seed: Tensor, p: float) -> Tensor:
    """Which elements of `x` dropout keeps.

    Args:
        x: `(..., N)`; only its shape and device count.
        seed: int64 of shape `()`, on the device of x.
        p: the probability of being dropped, from 0 to below 1.

    Returns:
        bool, the shape of x.
    """
    columns = x.shape[-1]
    quads = (columns + 3) // 4
    rows = x.numel() // max(columns, 1)
    counter = torch.arange(rows * quads, dtype=torch.int64, device=x.device)
    words = torch.stack(philox(seed, counter), -1).reshape(rows, quads * 4)[:, :columns]
    return ((words >> 1) >= threshold(p)).reshape(x.shape)


def dropout(x: Tensor, seed: Tensor, p: float) -> Tensor:
    """`x / (1 - p)` where the element is kept, else 0.

    Args:
        x: `(..., N)`, float32 or float64.
    """
    return torch.where(keep(x, seed, p), x * (1.0 / (1.0 - p)), torch.zeros_like(x))
