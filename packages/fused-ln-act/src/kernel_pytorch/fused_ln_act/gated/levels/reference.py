"""Gated linear units, defined.

    y = activation(gate) * (up + offset)

    swiglu:  activation(z) = z * sigmoid(alpha * z)
    geglu:   activation(z) = gelu(z), exactly or approximated by tanh
    reglu:   activation(z) = max(z, 0)

Shazeer, "GLU Variants Improve Transformer", 2020, https://arxiv.org/abs/2002.05202. There `gate` and `up` are two
products of the same x; here they come as two tensors, or packed: the first half of each row is gate, the second up.

With `limit` gate is clamped from above, and up from both sides, before anything else. With `alpha` 1.702, `limit` 7 and
`offset` 1 that is the swiglu of gpt-oss (https://github.com/openai/gpt-oss, gpt_oss/torch/model.py), which adds the one
to its linear half; what it packs in pairs goes in as `x[..., ::2]` and `x[..., 1::2]`.

Run in float64 this file is the oracle that every other level is held against. In a lower precision everything is
computed in float32 and rounded once, to the promoted dtype of gate and up. Plain PyTorch, no decorators: TorchScript
and TorchInductor compile these very functions.
"""

from typing import Optional, Tuple

import torch
from torch import Tensor

from kernel_pytorch.fused_ln_act.rules.activations import activate


def halves(gate: Tensor, up: Optional[Tensor]) -> Tuple[Tensor, Tensor]:
    """Gate and up, of a packed input its halves: views."""
    if up is not None:
        return gate, up
    columns = gate.shape[-1] // 2
    return gate[..., :columns], gate[..., columns:]


def widen_and_clamp(gate: Tensor, up: Tensor, limit: Optional[float]) -> Tuple[Tensor, Tensor]:
    """Both in float32 or wider, gate at most `limit`, up at most `limit` from zero."""
    wide = torch.promote_types(torch.promote_types(gate.dtype, up.dtype), torch.float32)
    gate, up = gate.to(wide), up.to(wide)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate, up


def swiglu(gate: Tensor, up: Optional[Tensor], alpha: float, limit: Optional[float], offset: float) -> Tensor:
    """Gate by SiLU.

    Args:
        gate: `(..., I)`, any float dtype; `(..., 2I)` where it is packed.
        up: `(..., I)`, any float dtype; None where gate is packed.
        alpha: the slope of the sigmoid.
        limit: of both halves, positive; None for none.
        offset: added to up.

    Returns:
        `(..., I)` in the promoted dtype of gate and up.
    """
    gate, up = halves(gate, up)
    dtype = torch.promote_types(gate.dtype, up.dtype)
    gate, up = widen_and_clamp(gate, up, limit)
    return (gate * torch.sigmoid(alpha * gate) * (up + offset)).to(dtype)


def geglu(gate: Tensor, up: Optional[Tensor], approximate: str, limit: Optional[float]) -> Tensor:
    """Gate by GELU.

    Args:
        approximate: "none" or "tanh".

    Returns:
        As `swiglu`.
    """
    gate, up = halves(gate, up)
    dtype = torch.promote_types(gate.dtype, up.dtype)
    gate, up = widen_and_clamp(gate, up, limit)
    return (activate(gate, "gelu" if approximate == "none" else "gelu_tanh") * up).to(dtype)


def reglu(gate: Tensor, up: Optional[Tensor], limit: Optional[float]) -> Tensor:
    """Gate by ReLU; arguments and result as of `swiglu`."""
    gate, up = halves(gate, up)
    dtype = torch.promote_types(gate.dtype, up.dtype)
    gate, up = widen_and_clamp(gate, up, limit)
    return (torch.relu(gate) * up).to(dtype)
