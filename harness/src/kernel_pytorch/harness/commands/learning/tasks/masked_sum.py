"""Task masked-sum: sum rows of any length in a Triton kernel.

A block has a power-of-two length, a row need not. Elements past the end of a row belong to the next row or to no
tensor. Give the load a mask. Without a GPU, Triton's interpreter runs it. `kernel-pytorch learn --check masked_sum.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _sum_kernel(x_ptr, y_ptr, columns, BLOCK: tl.constexpr):
    """One program, one row. x: (rows, columns), contiguous. y: (rows,)."""
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * columns + column)
    tl.store(y_ptr + row, tl.sum(x, axis=0))


def row_sum(x: Tensor) -> Tensor:
    """The sum of each row of a contiguous float32 matrix, `(rows, columns)` to `(rows,)`."""
    rows, columns = x.shape
    y = torch.empty(rows, device=x.device)
    _sum_kernel[(rows,)](x, y, columns, BLOCK=triton.next_power_of_2(columns))
    return y
