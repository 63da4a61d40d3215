"""The dropout of `philox.py` for Triton kernels: a function of a tile in registers."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_pytorch.fused_ln_act._core.direct_calls import check_memory
from kernel_pytorch.fused_ln_act._core.philox import threshold

threshold_of = triton.constexpr_function(threshold)


@triton.jit
def load_seed(seed_ptr, DROPOUT_P: tl.constexpr):
    """Load the seed; without dropout it is 0 and unused."""
    seed = 0
    if DROPOUT_P > 0.0:
        seed = tl.load(seed_ptr)
    return seed


@triton.jit
def dropout(x, seed, row, column, columns, P: tl.constexpr):
    """`x / (1 - P)` where the element at (row, column) of a tensor with `columns` columns is kept, else 0.

    One Philox call yields the bits of four columns. The code calls it once per element, but a thread computes it once
    for four adjacent elements: the compiler sees that their counters are equal.

    seed: int64 scalar. row, column: integers that broadcast to the shape of x; row is int64 where offsets are.
    """
    counter = row * ((columns + 3) // 4) + column // 4
    a, b, c, d = tl.randint4x(seed, counter)
    place = column % 4
    word = tl.where(place < 2, tl.where(place == 0, a, b), tl.where(place == 2, c, d))
    THRESHOLD: tl.constexpr = threshold_of(P)
    SCALE: tl.constexpr = 1.0 / (1.0 - P)
    return tl.where((word >> 1).to(tl.int32) >= THRESHOLD, x * SCALE, 0.0)


def check_seed(seed: Tensor | None, dropout_p: float) -> None:
    """Raise ValueError unless the seed is what a kernel can read, or there is no dropout that needs it."""
    if dropout_p != 0.0 and (seed is None or seed.dtype != torch.int64 or seed.dim() != 0):
        raise ValueError(f"seed: given {seed}; with dropout_p {dropout_p} it must be an int64 tensor of shape ()")
    if seed is not None:
        check_memory("seed", seed)
