"""The rotation that overwrites its arguments: apart from the other, no level of which consists of these kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from kernel_pytorch.qkv_fusion._core.arguments import check_flag
from kernel_pytorch.qkv_fusion._core.call_kinds import needs_grad
from kernel_pytorch.qkv_fusion.arguments import check_angles, check_apart, check_heads, check_position_values
from kernel_pytorch.qkv_fusion.levels import LADDER
from kernel_pytorch.qkv_fusion.overlap import check_no_overlap
from kernel_pytorch.qkv_fusion.rotary.operators import rotary_qk_


def rotary_embedding_(
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
    """`rotary_embedding` that overwrites q and k, for inference.

    Level "triton" reads and writes each head once, without allocating memory; the other levels compute out of place
    and copy. Arguments as for `rotary_embedding`. q and k must not share memory with each other: outside of
    torch.compile q and k that begin at the same address are an error; other overlap of the two is not checked.

    Returns:
        q and k themselves.

    Raises:
        TypeError: as `rotary_embedding`.
        ValueError: as `rotary_embedding`; also for k at the address of q, for q or k that overlaps itself, as an
            expanded tensor does (what torch.compile and torch.export trace is checked for expanded dimensions alone),
            and at level "triton" for q or k whose columns do not lie side by side.
        RuntimeError: as `rotary_embedding`; also where a gradient of q or k is wanted: call it under torch.no_grad().
    """
    check_heads(q, k)
    check_angles(cos, sin, position_ids, interleaved, q, q.shape[:-2], q.shape[-1])
    check_position_values(position_ids, cos)
    check_flag("inverse", inverse)
    check_apart(q, k)
    check_no_overlap("q", q)
    check_no_overlap("k", k)
    if needs_grad(q, k):
        raise RuntimeError("rotary_embedding_ has no gradient: call it under torch.no_grad(), or rotary_embedding")
    if LADDER.chosen("rotary_embedding", level, q, k, cos, sin) == "triton":
        rotary_qk_(q, k, cos, sin, position_ids, interleaved, inverse)
        return q, k
    run = LADDER.resolve("rotary_embedding", level, q, k, cos, sin)
    with torch.no_grad():
        for x, y in zip((q, k), run(q, k, cos, sin, position_ids, interleaved, inverse), strict=True):
            x.copy_(y)
    return q, k
