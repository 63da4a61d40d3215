"""Linear layers with what follows them, defined.

    linear_act:  y = activation(x @ weight.T + bias)
    gated_mlp:   h = activation(x @ w_gate.T) * (x @ w_up.T)        y = h @ w_down.T

`activation` is one of `activations.py`; a gated MLP with "silu" is the SwiGLU feed-forward of Shazeer, "GLU Variants
Improve Transformer", 2020, https://arxiv.org/abs/2002.05202, with "gelu" GEGLU, with "relu" ReGLU.

Run in float64 this file is the oracle that every other level is held against. In a lower precision everything is
computed in float32 and y is rounded once to the dtype of x. A gated MLP rounds h to the dtype of x as well, since it
is an operand of the second product. Whether the pre-activation is saved or computed again decides about memory and
time alone. Plain PyTorch, no decorators: TorchScript and TorchInductor compile these very functions.
"""

from typing import Optional

import torch
from torch import Tensor

from kernel_pytorch.fused_ln_act.rules.activations import activate


def linear_act(x: Tensor, weight: Tensor, bias: Optional[Tensor], activation: str, save_preactivation: bool) -> Tensor:
    """A linear layer and an activation.

    Args:
        x: `(..., K)`, any float dtype.
        weight: `(N, K)`, as `torch.nn.Linear` has it.
        bias: `(N,)` or None.
        activation: one of `ACTIVATIONS`.
        save_preactivation: nothing here: autograd saves what it needs.

    Returns:
        `(..., N)` in the dtype of x.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    z = torch.matmul(x.to(wide), weight.to(wide).t())
    if bias is not None:
        z = z + bias.to(wide)
    return activate(z, activation).to(x.dtype)


def gated_mlp(x: Tensor, w_gate_up: Tensor, w_down: Tensor, activation: str, recompute: bool) -> Tensor:
    """The gated feed-forward of a transformer.

    Args:
        x: `(..., K)`, any float dtype.
        w_gate_up: `(2I, K)`: the rows of the gate, then those of up.
        w_down: `(N, I)`.
        activation: one of `ACTIVATIONS`.
        recompute: nothing here: autograd saves what it needs.

    Returns:
        `(..., N)` in the dtype of x.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    gate, up = torch.matmul(x.to(wide), w_gate_up.to(wide).t()).chunk(2, -1)
    h = (activate(gate, activation) * up).to(x.dtype)
    return torch.matmul(h.to(wide), w_down.to(wide).t()).to(x.dtype)
