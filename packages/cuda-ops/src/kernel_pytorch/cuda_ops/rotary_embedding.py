"""Rotary position embedding of one tensor, or of queries and keys at once, in one kernel each way.

    y1 = x1 * cos - x2 * sin,  y2 = x2 * cos + x1 * sin        for every pair (x1, x2) of a head

Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, https://arxiv.org/abs/2104.09864. The
gradient is the same kernel with the transposed matrix.
"""

from __future__ import annotations

from torch import Tensor

from ._core.operator import OperatorCall, declare
from ._qkv_fusion.rotary import ROTARY_EMBEDDING_RULES, ROTARY_QK_RULES
from .operators import call

# Both are linear, so each is its own derivative.
run_rotary_embedding: OperatorCall = declare(**ROTARY_EMBEDDING_RULES, backward=lambda *a: run_rotary_embedding(*a))
run_rotary_qk: OperatorCall = declare(**ROTARY_QK_RULES, backward=lambda *a: run_rotary_qk(*a))


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
    return call("rotary_embedding", run_rotary_embedding, x, cos, sin, interleaved, inverse)


def rotary_qk(
    q: Tensor | None,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    interleaved: bool = False,
    inverse: bool = False,
) -> tuple[Tensor, Tensor]:
    """Rotate every head of queries and keys by the angles of its token, in one launch; differentiable in q and k any
    number of times.

    Computed in float32 (float64 for float64) and rounded once. Views of a packed projection are read in place. Rows of
    the tables are looked up in the kernel: with position_ids there is no indexed copy of the tables.

    Args:
        q: `(..., S, H, D)`, float16, bfloat16 or float32, on a CPU float64 too; None to rotate k alone.
        k: `(..., S, K, D)`, in the dtype and on the device of q; None to rotate q alone.
        cos: `(S, R/2)`, or `(..., S, R/2)` with the leading dimensions of q; with position_ids `(P, R/2)`. R at most D,
            what is beyond R passes. Any of these dtypes, on the device of q. No gradient goes to it.
        sin: as cos.
        position_ids: `(S,)` or `(..., S)`, int64 or int32: the row of the tables for each token. A position outside of
            0 to P - 1 reads nothing and gives NaN in the columns that are rotated. None for tables by token.
        interleaved: pairs are columns 2i and 2i + 1 (GPT-J); else i and i + R/2 (Llama, GPT-NeoX).
        inverse: rotate back.

    Returns:
        q and k rotated, in their dtype, contiguous; an empty tensor in place of one that is None.

    Raises:
        RuntimeError: the arguments do not fit, or the kernel could not be launched; the message names them.
        TypeError: an argument is not of its kind.
    """
    return call("rotary_qk", run_rotary_qk, q, k, cos, sin, position_ids, interleaved, inverse)
