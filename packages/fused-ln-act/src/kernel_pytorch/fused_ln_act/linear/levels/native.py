"""PyTorch's best operators: `F.linear`, by cuBLAS with the bias in its epilogue, then the activation.

cuBLAS also has epilogues with relu and the approximate gelu, but PyTorch's operator for them has no gradient and no
public name, so they are not a level. Each kernel rounds its result to the dtype of x; the definition rounds once.
Autograd decides what is saved for the backward; the last argument has no effect.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from kernel_pytorch.fused_ln_act.norm.levels.native import activate


def linear_act(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_preactivation: bool) -> Tensor:
    """`linear_act` of `reference.py`: two kernels."""
    bias = None if bias is None else bias.to(x.dtype)
    # Under autocast the product has another dtype.
    return activate(F.linear(x, weight.to(x.dtype), bias), activation).to(x.dtype)


def gated_mlp(x: Tensor, w_gate_up: Tensor, w_down: Tensor, activation: str, recompute: bool) -> Tensor:
    """`gated_mlp` of `reference.py`: one product for gate and up, then activation, product and the second product."""
    gate, up = F.linear(x, w_gate_up.to(x.dtype)).chunk(2, -1)
    return F.linear(activate(gate, activation) * up, w_down.to(x.dtype)).to(x.dtype)
