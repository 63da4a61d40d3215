"""PyTorch's own operators: its norms, `linear` and `scaled_dot_product_attention`, one kernel for each.

What that attention lacks, soft caps and sinks, is computed by the formula.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from . import reference


def normalized(
    x: Tensor, norm: str, norm_weight: Tensor, norm_bias: Tensor | None, norm_offset: float, eps: float
) -> Tensor:
    """The norm, rounded to the dtype of x, as the linear layer behind it takes it."""
    shape = (x.shape[-1],)
    if norm_offset != 0.0 or norm_weight.dtype != x.dtype or (norm == "rms" and norm_bias is not None):
        return reference.normalized(x, norm, norm_weight, norm_bias, norm_offset, eps).to(x.dtype)
    if norm == "rms":
        return F.rms_norm(x, shape, norm_weight, eps)
    return F.layer_norm(x, shape, norm_weight, norm_bias, eps)


def norm_linear(
    x: Tensor, weight: Tensor, norm_weight: Tensor, bias: Tensor | None, norm: str, norm_bias: Tensor | None,
    norm_offset: float, eps: float,
) -> Tensor:  # fmt: skip
    """`norm_linear` of `reference.py`."""
    return F.linear(normalized(x, norm, norm_weight, norm_bias, norm_offset, eps), weight, bias)


def norm_gated_linear(
    x: Tensor, weight: Tensor, norm_weight: Tensor, bias: Tensor | None, activation: str, norm: str,
    norm_bias: Tensor | None, norm_offset: float, eps: float,
) -> Tensor:  # fmt: skip
    """`norm_gated_linear` of `reference.py`."""
    gate, up = norm_linear(x, weight, norm_weight, bias, norm, norm_bias, norm_offset, eps).chunk(2, -1)
    return reference.activated(gate, activation) * up


def linear_residual(x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None) -> Tensor:
    """`linear_residual` of `reference.py`."""
    return F.linear(x, weight, bias) + residual


def rotary_cache_attention(
    qkv: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, cos: Tensor, sin: Tensor, num_heads: int,
    scale: float | None, window: int | None, softcap: float | None, q_norm: Tensor | None, k_norm: Tensor | None,
    norm_offset: float, eps: float, sinks: Tensor | None, block_table: Tensor | None,
) -> Tensor:  # fmt: skip
    """`rotary_cache_attention` of `reference.py`.

    PyTorch's attention reads masked keys too, so what is not seen is replaced by zeros: a copy of the cache.
    """
    q, keys, values, sees, active = reference.written(
        qkv, k_cache, v_cache, lengths, cos, sin, num_heads, window, q_norm, k_norm, norm_offset, eps, block_table
    )
    if softcap is not None or sinks is not None:
        factor = q.shape[-1] ** -0.5 if scale is None else scale
        return reference.attend(q, keys, values, sees, factor, softcap, sinks).flatten(1).to(qkv.dtype)
    keys, values = (cache.masked_fill(~sees[:, None, :, None], 0.0) for cache in (keys, values))
    # A row that sees nothing takes all slots, whose values are zeros: PyTorch gives NaN for it on some devices.
    mask = (sees | ~active[:, None])[:, None, None]
    o = F.scaled_dot_product_attention(q.to(qkv.dtype).unsqueeze(2), keys, values, mask, scale=scale, enable_gqa=True)
    return o.flatten(1).to(qkv.dtype)  # autocast computes in another
