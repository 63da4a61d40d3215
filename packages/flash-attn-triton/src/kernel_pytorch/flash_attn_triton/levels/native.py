"""What PyTorch itself offers: `torch.nn.functional.scaled_dot_product_attention`.

PyTorch chooses its backend (on a GPU cuDNN, FlashAttention-2, memory-efficient or the formula itself) by device, dtype
and mask; `torch.nn.attention.sdpa_kernel` restricts the choice. A window, and a causal mask over another number of keys
than of queries, become a matrix of bools `(Sq, Sk)`, which not every backend takes. Soft cap, ALiBi, sinks and the seed
of a dropout mask are not in PyTorch. Its gradients are wrong where the products of queries and keys alone make all
scores of a row larger than about 1e6: it keeps lse, in which the logarithm of the sum is lost then.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kernel_pytorch.flash_attn_triton._core.call_kinds import needs_grad
from kernel_pytorch.flash_attn_triton.alignment import aligned
from kernel_pytorch.flash_attn_triton.masks import always, cached, gathered, limits, packed, visible

NOT_SEEN = float("-inf")
LARGE = 1000.0
"""Score above which lse in float32 has fewer than four digits after the decimal point."""


class _PlainGradient(torch.autograd.Function):
    """The identity, whose incoming gradient becomes contiguous and aligned."""

    generate_vmap_rule = True

    @staticmethod
    def forward(y: Tensor) -> Tensor:
        """Hand y on."""
        return y.view_as(y)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep nothing."""

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        """Make dy contiguous and aligned, by a copy only where it is not."""
        return aligned(dy.contiguous())


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, window: tuple[int, int] | None, *features: Any
) -> Tensor:
    """`flash_attention` of `reference.py` without soft cap, ALiBi, sinks and dropout; same arguments and result."""
    return _on_device(q, k, v, None, scale, *limits(causal, window))


def flash_attention_masked(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, causal: bool, scale: float, window: tuple[int, int] | None,
    *features: Any,
) -> Tensor:  # fmt: skip
    """`flash_attention_masked` of `reference.py` without soft cap, sinks and dropout; same arguments and result."""
    return _on_device(q, k, v, mask, scale, *limits(causal, window))


def flash_attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    causal: bool, scale: float, window: tuple[int, int] | None, *features: Any,
) -> Tensor:  # fmt: skip
    """`flash_attention_varlen` of `reference.py` without soft cap, ALiBi and sinks; same arguments and result.

    All sequences are one, with a matrix of bools `(S, T)` that keeps them apart.
    """
    _, sees, _ = packed(cu_seqlens_q, cu_seqlens_k, q.shape[0], k.shape[0], causal, window)
    queries, keys, values = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    return _on_device(queries, keys, values, sees[None, None], scale, -1, -1).squeeze(0).transpose(0, 1)


def flash_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, block_table: Tensor | None, causal: bool,
    scale: float, window: tuple[int, int] | None, *features: Any,
) -> Tensor:  # fmt: skip
    """`flash_decode` of `reference.py` without soft cap, ALiBi and sinks; same arguments and result.

    PyTorch's attention reads masked keys too, so what is not valid is replaced by zeros: a copy of the cache.
    """
    if block_table is not None:
        k_cache, v_cache = gathered(k_cache, block_table), gathered(v_cache, block_table)
    _, sees, valid = cached(cache_seqlens, q.shape[2], k_cache.shape[2], causal, window)
    keys, values = torch.where(valid, k_cache, 0.0), torch.where(valid, v_cache, 0.0)
    return _on_device(q, keys, values, sees, scale, -1, -1)


def _is_on_gpu(q: Tensor) -> bool:
    return q.device.type == "cuda"


def _on_device(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, left: int, right: int) -> Tensor:
    if _is_on_gpu(q):
        if bias is not None and bias.dtype != torch.bool and _added(bias, q).dtype != q.dtype:
            y = _on_device(q.float(), k.float(), v.float(), bias, scale, left, right)  # no kernel takes two dtypes
            return y.to(q.dtype)
        if bias is not None and bias.dtype != torch.bool:
            bias = aligned(_added(bias, q), rows=False)
        # cuDNN's attention fails on other layouts, and takes the process with it.
        y = _attention(aligned(q), aligned(k), aligned(v), bias, scale, left, right)
        return _PlainGradient.apply(y)  # type: ignore[no-any-return]
    return _attention(q, k, v, bias, scale, left, right)


def _added(bias: Tensor, q: Tensor) -> Tensor:
    """The bias in a dtype that PyTorch's attention takes beside q, and in which it is no less exact."""
    return bias.to(q.dtype if bias.dtype == q.dtype or q.dtype.itemsize > 2 else torch.float32)


def _beside(mask: Tensor, sees: Tensor | None) -> Tensor:
    """A mask of bools or numbers to add, and one of bools beside it."""
    if sees is None:
        return mask
    return mask & sees if mask.dtype == torch.bool else mask.masked_fill(~sees, NOT_SEEN)


def _near_zero(bias: Tensor) -> Tensor:
    """The bias, of which rows have their maximum subtracted if it is large: weights are the same.

    PyTorch's backward makes weights of scores and lse. Beside a maximum of -1e9 the logarithm of the sum is lost, and
    gradients were multiplied by the number of keys. In 16 bits all rows as they are keep the most digits.
    """
    top = bias.detach().amax(-1, keepdim=True).nan_to_num(0.0, 0.0, 0.0)
    return bias - F.hardshrink(top, LARGE)


def _attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, left: int, right: int) -> Tensor:
    queries, keys = q.shape[2], k.shape[2]
    if keys == 0:  # zeros that still depend on all of them
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        s = torch.matmul(q, k.transpose(-1, -2))
        return torch.matmul(s if bias is None or bias.dtype == torch.bool else s + _added(bias, q), v).to(q.dtype)
    grouped = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}  # the comparison of symbolic sizes is no bool
    if always(queries == 1):
        right = -1  # it is the last one, and sees the last key
    # PyTorch's own causal mask lets the first query see the first key, not the last the last.
    causal = left < 0 and right == 0 and bias is None and always(queries == keys)
    limited = (left >= 0 or right >= 0) and not causal
    sees = visible(queries, keys, left, right, q.device) if limited else None
    if bias is not None and bias.dtype != torch.bool:
        bias = _near_zero(_added(bias, q)) if needs_grad(q, k, v, bias) else _added(bias, q)
    mask = sees if bias is None else _beside(bias, sees)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale, **grouped)
    if mask is None or (bias is None and always(queries <= keys)):
        return y.to(q.dtype)  # which autocast changes
    sees = mask if mask.dtype == torch.bool else mask != NOT_SEEN  # NaN is no mask
    return torch.where(sees.any(-1, keepdim=True), y, 0.0).to(q.dtype)
