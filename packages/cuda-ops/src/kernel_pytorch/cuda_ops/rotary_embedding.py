"""Rotary position embedding in one kernel, and its gradient: the same kernel with the transposed matrix.

    y1 = x1 * cos - x2 * sin,  y2 = x2 * cos + x1 * sin        for every pair (x1, x2) of a head

Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, https://arxiv.org/abs/2104.09864.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ._core.operator import declare
from ._qkv_fusion.rotary import ROTARY_EMBEDDING
from .operators import call


def _itself(*arguments: Any) -> Tensor:
    """It is linear, so it is its own derivative."""
    y: Tensor = run_rotary_embedding(*arguments)
    return y


run_rotary_embedding = declare(**ROTARY_EMBEDDING, backward=_itself)


def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, inverse: bool = False) -> Tensor:
    """Rotate every head of `x` by the angles of its token, differentiable in x any number of times.

    Computed in float32 (float64 for float64) and rounded once. A view of a packed projection is read in place: heads
    and tokens may have any strides, as long as the columns of a head lie side by side.

    Args:
        x: `(..., S, H, D)`, float16, bfloat16 or float32, on a CPU float64 too.
        cos: `(S, R/2)`, or `(..., S, R/2)` with the leading dimensions of x; R at most D, what is beyond R passes. Any
            of these dtypes, on the device of x. No gradient goes to it.
        sin: as cos.
        interleaved: pairs are columns 2i and 2i + 1 (GPT-J); else i and i + R/2 (Llama, GPT-NeoX).
        inverse: rotate back.

    Returns:
        `(..., S, H, D)` in the dtype of x, contiguous.

    Raises:
        RuntimeError: the arguments do not fit, or the kernel could not be launched; the message names them.
        TypeError: an argument is not of its kind.
    """
    y: Tensor = call("rotary_embedding", run_rotary_embedding, x, cos, sin, interleaved, inverse)
    return y
