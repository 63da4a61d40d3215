"""The public functions: arguments by keyword, checked before any kernel starts."""

from __future__ import annotations

from torch import Tensor

from kernel_pytorch.qkv_fusion._core.arguments import check_flag
from kernel_pytorch.qkv_fusion._core.operation import Operation
from kernel_pytorch.qkv_fusion.arguments import check_angles, check_heads, check_position_values
from kernel_pytorch.qkv_fusion.levels import LADDER


def rotary_embedding(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    position_ids: Tensor | None = None,
    inverse: bool = False,
    level: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate every head of queries and of keys by the angles of its token.

    `y1 = x1 * cos - x2 * sin, y2 = x2 * cos + x1 * sin` for every pair of columns; differentiable in q and k, any
    number of times except at level "compile" (once). A head's columns beyond R pass as they are (partial rotary).

    Args:
        q: `(..., S, H, D)`, float16, bfloat16, float32 or float64: tokens before heads, as projections give them. Any
            strides; a tensor `(B, H, S, D)` is handed in as `q.transpose(1, 2)`, which costs no copy.
        k: `(..., S, K, D)`, in the dtype and on the device of q; K may differ from H (grouped queries).
        cos: `(S, R/2)`, or `(..., S, R/2)` with the leading dimensions of q; any of these dtypes; one number a pair (of
            tables that hold every number twice, as those of transformers do, `cos[..., : R // 2]`). R at most D.
            With position_ids `(P, R/2)`. No gradient goes to it.
        sin: as cos.
        interleaved: pairs are columns 2i and 2i + 1 (GPT-J); else i and i + R/2 (Llama, GPT-NeoX).
        position_ids: `(S,)` or `(..., S)`, int64 or int32, from 0 to P - 1: the row of the tables for each token; None
            for tables that have a row a token. On a CPU in eager mode, another position is a ValueError. On a GPU,
            under torch.compile and other tracers and transforms, values are not checked: there a position outside of
            the tables gives NaN at levels "triton" and "cuda". The other levels index the tables: -P to -1 count from
            the end, as everywhere in PyTorch, and all others are PyTorch's error, on a GPU a failed assertion in a
            kernel.
        inverse: rotate back, by the opposite angles.
        level: None for the default of this device, or "reference", "native", "torchscript", "compile", "triton",
            "cuda".

    Returns:
        q and k rotated, `(..., S, H, D)` and `(..., S, K, D)`, in their dtype.

    Raises:
        TypeError: a tensor is of no allowed dtype, or k of another than q.
        ValueError: shapes, devices, positions or level do not fit; the message names the argument.
        RuntimeError: the level asked for cannot run on this device or dtype; the message says why.

    Source: Su et al., "RoFormer", 2021, https://arxiv.org/abs/2104.09864.
    """
    check_position_values(position_ids, cos)
    return ROTARY_EMBEDDING(q, k, cos, sin, position_ids, interleaved, inverse, level)


def _check(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor | None, interleaved: bool, inverse: bool
) -> None:
    check_heads(q, k)
    check_angles(cos, sin, position_ids, interleaved, q, q.shape[:-2], q.shape[-1])
    check_flag("inverse", inverse)


ROTARY_EMBEDDING = Operation(LADDER, "rotary_embedding", _check)
