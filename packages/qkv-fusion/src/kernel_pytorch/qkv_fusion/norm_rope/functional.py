"""The public function: arguments by keyword, checked before any kernel starts."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kernel_pytorch.qkv_fusion._core.arguments import (
    check_device,
    check_eps,
    check_number,
    check_tensor,
    shape_of,
)
from kernel_pytorch.qkv_fusion._core.operation import Operation
from kernel_pytorch.qkv_fusion.arguments import (
    check_angles,
    check_heads,
    check_position_values,
    check_positive,
    check_projection,
)
from kernel_pytorch.qkv_fusion.levels import LADDER


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    eps: float = 1e-6,
    interleaved: bool = False,
    offset: float = 0.0,
    position_ids: Tensor | None = None,
    level: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Normalise every head of queries and keys by its root mean square, then rotate it by the angles of its token.

    One pass over memory. Differentiable in q, k and both weights, any number of times except at level "compile" (once).
    Computed in float32 (float64 for float64) and rounded once; models that round in between are a little less accurate.

    `cos`, `sin` and `interleaved` are as in `rotary_embedding`.

    Args:
        q: `(..., S, H, D)`, float16, bfloat16, float32 or float64, any strides.
        k: `(..., S, K, D)`, in the dtype and on the device of q.
        q_weight: `(D,)`, shared by the heads; any of these dtypes.
        k_weight: as q_weight.
        eps: added to the mean square; not negative.
        offset: added to the weights: 1.0 for models that store weights around zero (Gemma 3).
        position_ids: as in `rotary_embedding`, but that every level indexes the tables, "triton" too.
        level: None for the default of this device, or "reference", "native", "compile", "triton",
            "cuda".

    Returns:
        q and k so treated, in their dtype.

    Raises:
        TypeError: a tensor is of no allowed dtype, or k of another than q.
        ValueError: shapes, devices, positions, eps, offset or level do not fit; the message names the argument.
        RuntimeError: the level asked for cannot run on this device or dtype; the message says why.

    Levels "triton" and "cuda" save the inputs and one float32 per head for the backward.

    Source: Henry et al., "Query-Key Normalization for Transformers", 2020, https://arxiv.org/abs/2010.04245, with the
    root mean square instead of the L2 norm as in Qwen3, https://arxiv.org/abs/2505.09388.
    """
    check_position_values(position_ids, cos)
    given = q, k, q_weight, k_weight, cos, sin, position_ids, eps, interleaved, offset
    return QK_NORM_ROPE(*given, level)


def qk_layer_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    eps: float = 1e-6,
    interleaved: bool = False,
    offset: float = 0.0,
    position_ids: Tensor | None = None,
    level: str | None = None,
) -> tuple[Tensor, Tensor]:
    """`qk_norm_rope` with LayerNorm without bias instead of RMSNorm: the mean of a head is subtracted first.

    `TypeError` and `RuntimeError` are raised as by `qk_norm_rope`.

    Args:
        q: as in `qk_norm_rope`, like all that follow but eps and level.
        k: `(..., S, K, D)`.
        q_weight: `(D,)`.
        k_weight: `(D,)`.
        cos: of the tokens.
        sin: of the tokens.
        eps: added to the variance; not negative.
        interleaved: of the rotation.
        offset: added to the weights.
        position_ids: of the tokens.
        level: None for the default of this device, or "reference", "native", "compile".

    Returns:
        q and k so treated, in their dtype.

    Raises:
        ValueError: as in `qk_norm_rope`; "triton" and "cuda" do not exist for it.

    Source: Dehghani et al., "Scaling Vision Transformers to 22 Billion Parameters", 2023,
    https://arxiv.org/abs/2302.05442.
    """
    check_position_values(position_ids, cos)
    given = q, k, q_weight, k_weight, cos, sin, position_ids, eps, interleaved, offset
    return QK_LAYER_NORM_ROPE(*given, level)


def _check(*given: Any) -> None:
    q, k, q_weight, k_weight, cos, sin, position_ids, eps, interleaved, offset = given
    check_heads(q, k)
    check_angles(cos, sin, position_ids, interleaved, q, q.shape[:-2], q.shape[-1])
    check_head_weights(q_weight, k_weight, q, q.shape[-1])
    check_eps(eps)
    check_number("offset", offset)


def check_projected(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None,
    columns: int,
    num_heads: int,
    num_kv_heads: int,
    eps: float,
    interleaved: bool,
    offset: float,
    kv_heads_name: str = "num_kv_heads",
) -> None:
    """Check what a projection followed by norm and rotation takes, except x, the weights of the norm, and positions.

    Args:
        x: checked by the caller.
        columns: size of a head.
        num_kv_heads: as given, or from the cache.
        kv_heads_name: what messages call num_kv_heads.

    Raises:
        TypeError: an argument is of another type or dtype; the message names it.
        ValueError: a shape, device or number does not fit; the message names the argument.
    """
    check_positive(num_heads=num_heads, num_kv_heads=num_kv_heads)
    rows = (num_heads + 2 * num_kv_heads) * columns
    check_projection(x, weight, bias, rows, f"(num_heads + 2 * {kv_heads_name}) * D")
    check_angles(cos, sin, position_ids, interleaved, x, x.shape[:-1], columns)
    check_eps(eps)
    check_number("offset", offset)


def head_size(x: Tensor, q_weight: Tensor, k_weight: Tensor) -> int:
    """The size of a head, read from the weights of the norm.

    Raises:
        TypeError: x or a weight is no tensor of an allowed dtype; the message names it.
        ValueError: a weight is not `(D,)`, or on another device than x; the message names it.
    """
    check_tensor("x", x)
    columns = q_weight.shape[0] if isinstance(q_weight, Tensor) and q_weight.dim() == 1 else 1
    check_head_weights(q_weight, k_weight, x, columns)
    return columns


def check_head_weights(q_weight: Tensor, k_weight: Tensor, like: Tensor, columns: int) -> None:
    """Raise TypeError or ValueError, naming the argument, unless these are `(columns,)`, on the device of `like`."""
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        check_tensor(name, weight)
        if weight.shape != (columns,):
            raise ValueError(
                f"{name}: shape is {shape_of(weight)}; it must be (D,) = ({columns},), shared by the heads"
            )
        check_device(name, weight, like, "q")


QK_NORM_ROPE = Operation(LADDER, "qk_norm_rope", _check)
QK_LAYER_NORM_ROPE = Operation(LADDER, "qk_layer_norm_rope", _check)
