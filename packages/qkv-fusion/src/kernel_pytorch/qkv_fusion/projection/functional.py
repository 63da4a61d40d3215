"""The public functions: arguments by keyword, checked before any kernel starts."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kernel_pytorch.qkv_fusion._core.operation import Operation
from kernel_pytorch.qkv_fusion.arguments import check_position_values, check_positive, check_projection
from kernel_pytorch.qkv_fusion.levels import LADDER
from kernel_pytorch.qkv_fusion.norm_rope.functional import check_projected, head_size


def qkv_projection(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    head_dim: int,
    level: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Project to queries, keys and values as one matrix product: `(q | k | v) = x @ weight.T + bias`.

    Differentiable in x, weight and bias, any number of times except at level "compile" (once).

    Args:
        x: `(..., S, C)`, float16, bfloat16, float32 or float64.
        weight: `((H + 2K) * D, C)`, in the dtype of x: the rows of queries, then those of keys, then those of values.
        bias: `((H + 2K) * D,)` or None.
        num_heads: H.
        num_kv_heads: K; None for K = H.
        head_dim: D.
        level: None for the default of this device, or "reference", "native", "torchscript", "compile". Products are
            left to PyTorch.

    Returns:
        q `(..., S, H, D)`, k and v `(..., S, K, D)`: views of one product, which `rotary_embedding`, `qk_norm_rope`
        and attention read where they lie. `q.transpose(1, 2)` is what scaled_dot_product_attention takes.

    Raises:
        TypeError: a tensor is of no allowed dtype, or a number of heads no integer.
        ValueError: shapes, devices or level do not fit; the message names the argument.

    Source: Vaswani et al., 2017, https://arxiv.org/abs/1706.03762.
    """
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    given = x, weight, bias, num_heads, num_kv_heads, head_dim
    return QKV_PROJECTION(*given, level)


def qkv_norm_rope(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int | None = None,
    eps: float = 1e-6,
    interleaved: bool = False,
    offset: float = 0.0,
    position_ids: Tensor | None = None,
    level: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`qkv_projection`, then `qk_norm_rope` of its queries and keys: one product and one kernel.

    Differentiable in x, weight, bias and both weights of the norm, any number of times except at level "compile".

    `weight` and `bias` are as in `qkv_projection`; `eps`, `offset`, `position_ids` and `level` are as in
    `qk_norm_rope`; `interleaved` is as in `rotary_embedding`.

    Args:
        x: as in `qkv_projection`; D is the size of q_weight.
        q_weight: `(D,)`, as in `qk_norm_rope`.
        k_weight: `(D,)`, as in `qk_norm_rope`.
        cos: as in `rotary_embedding`, for the tokens of x.
        sin: as cos.
        num_heads: H.
        num_kv_heads: K; None for K = H.

    Returns:
        q `(..., S, H, D)` and k `(..., S, K, D)` normalised and rotated, and v `(..., S, K, D)`, a view of the product.

    Raises:
        TypeError: as in `qkv_projection` and `qk_norm_rope`.
        ValueError: as in `qkv_projection` and `qk_norm_rope`.
        RuntimeError: the level asked for cannot run on this device or dtype; the message says why.
    """
    num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
    check_position_values(position_ids, cos)
    given = x, weight, bias, q_weight, k_weight, cos, sin, position_ids
    heads = num_heads, num_kv_heads, eps, interleaved, offset
    return QKV_NORM_ROPE(*given, *heads, level)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    check_positive(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    rows = (num_heads + 2 * num_kv_heads) * head_dim
    check_projection(x, weight, bias, rows, "(num_heads + 2 * num_kv_heads) * head_dim")


def _check_norm_rope(
    x: Tensor, weight: Tensor, bias: Tensor | None, q_weight: Tensor, k_weight: Tensor, *others: Any
) -> None:
    cos, sin, position_ids, num_heads, num_kv_heads, *numbers = others
    heads = head_size(x, q_weight, k_weight), num_heads, num_kv_heads
    check_projected(x, weight, bias, cos, sin, position_ids, *heads, *numbers)


QKV_PROJECTION = Operation(LADDER, "qkv_projection", _check)
QKV_NORM_ROPE = Operation(LADDER, "qkv_norm_rope", _check_norm_rope)
