"""`flash_attention` in one kernel; its gradient is computed of the scores, by PyTorch.

Dao et al., "FlashAttention", 2022, https://arxiv.org/abs/2205.14135; "FlashAttention-2", 2023,
https://arxiv.org/abs/2307.08691.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernel_pytorch.cuda_ops._core.operator import declare
from kernel_pytorch.cuda_ops._core.sharding import Shardings
from kernel_pytorch.cuda_ops.arguments import check_tensor
from kernel_pytorch.cuda_ops.operators import call

LOWEST = -1e30
"""Of a score that is masked: as good as -inf, and a row of them still has a softmax."""

RUN = 64
"""Products of a score that are added before what came of them is, as in the twin: rounding does not grow with depth."""


def _fake(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1], dtype=torch.promote_types(q.dtype, torch.float32))


def _gradient(do: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, of scores that are computed again, in PyTorch that autograd can follow.

    As in FlashAttention-2, section 3.1, but for one block, and by a softmax of its own: `exp(scores - lse)` of large
    scores would depend on how either was rounded. Query heads that read the same keys are rows of one matrix.

    Args:
        do: gradient of the output.
        q: as of `flash_attention`.
        k: as of `flash_attention`.
        v: as of `flash_attention`.
        scale: as of `flash_attention`.
        causal: as of `flash_attention`.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    batch, heads, queries, depth = q.shape
    together = batch, k.shape[1], heads // k.shape[1] * queries, depth
    rows, drows = q.to(wide).reshape(together), do.to(wide).reshape(together)
    keys, values = k.to(wide), v.to(wide)
    scores = _products(rows, keys) * scale
    if causal:
        sees = torch.ones(queries, k.shape[2], dtype=torch.bool, device=q.device).tril(k.shape[2] - queries)
        sees = sees.repeat(heads // k.shape[1], 1)
        p = torch.softmax(scores.masked_fill(~sees, LOWEST), -1) * sees
    else:
        p = torch.softmax(scores, -1)
    dp = torch.matmul(drows, values.transpose(-1, -2))
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
    dq = torch.matmul(ds, keys).reshape(q.shape)
    dk = torch.matmul(ds.transpose(-1, -2), rows)
    dv = torch.matmul(p.transpose(-1, -2), drows)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _products(rows: Tensor, keys: Tensor) -> Tensor:
    """Of every row of `(..., R, D)` with every key of `(..., T, D)`."""
    runs = zip(rows.split(RUN, -1), keys.split(RUN, -1), strict=True)
    first, *others = (torch.matmul(a, b.transpose(-1, -2)) for a, b in runs)
    return sum(others, first)


def _flops(q: Any, k: Any, *arguments: Any, **keywords: Any) -> int:
    """Two products of `(S, D)` with `(D, T)`, causal or not, as PyTorch counts its own attention."""
    return 4 * torch.Size(q).numel() * k[2]


def _sharding(placements: Any, q: Any, k: Any, v: Any, *scalars: Any) -> Shardings:
    """Sequences and heads are independent; of heads each device needs whole groups."""
    yield [placements.Replicate()] * 2, [placements.Replicate()] * 3
    for dimension in (0, 1):
        shard = placements.Shard(dimension)
        yield [shard, shard], [shard] * 3


run_flash_attention = declare(
    "flash_attention(Tensor q, Tensor k, Tensor v, float scale, bool causal) -> (Tensor o, Tensor lse)",
    fake=_fake,
    gradient=_gradient,
    flops=_flops,
    sharding=_sharding,
)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, causal: bool = False) -> Tensor:
    """Attend, without the matrix of scores in memory in the forward; differentiable any number of times.

    The backward computes the scores again and holds them: `(B, H, S, T)` in float32. For training long sequences use
    `torch.nn.functional.scaled_dot_product_attention` or FlashAttention itself.

    Args:
        q: `(B, H, S, D)`, float16, bfloat16 or float32, on a CPU float64 too; D up to 256 on CUDA.
        k: `(B, K, T, D)`, K divides H; dtype and device of q.
        v: `(B, K, T, D)`; dtype and device of q.
        scale: of the scores; `D ** -0.5` for None.
        causal: whether query i sees keys up to i + T - S alone. One that sees none has output zero.

    Returns:
        `(B, H, S, D)` in the dtype of q.

    Raises:
        RuntimeError: the arguments do not fit, or the kernel could not be launched; the message names them.
        TypeError: an argument is not of its kind, or the scale a bool, which was meant for `causal`.
        ValueError: the scale is not finite.
    """
    if isinstance(scale, bool):
        raise TypeError(f"flash_attention: scale: given {scale}; it is a number or None, and `causal` goes by name")
    if scale is None:
        check_tensor("flash_attention", "q", q)
        scale = max(q.shape[-1] if q.dim() else 1, 1) ** -0.5
    return call("flash_attention", run_flash_attention, q, k, v, scale, causal)[0]
