"""The activations in PyTorch, with their derivatives: what gradients of gradients are made of.

The kernels have their own (`csrc/include/kernel_pytorch/{cpu/activations.h,cuda/activations.cuh}`). Papers are named in
the package fused-ln-act, which defines them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

ACTIVATIONS = (
    "gelu",
    "gelu_tanh",
    "silu",
    "relu",
    "relu_squared",
    "quick_gelu",
    "tanh",
    "sigmoid",
    "identity",
)

# Operations of an activation and of its derivative; a transcendental function counts as one.
FLOPS = {
    "gelu": (5, 9),
    "gelu_tanh": (9, 13),
    "silu": (4, 7),
    "relu": (1, 1),
    "relu_squared": (2, 2),
    "quick_gelu": (5, 8),
    "tanh": (1, 3),
    "sigmoid": (3, 5),
    "identity": (0, 0),
}

QUICK = 1.702
ROOT = math.sqrt(2.0 / math.pi)
CUBIC = 0.044715


def activate(z: Tensor, activation: str, alpha: float = 1.0) -> tuple[Tensor, Tensor]:
    """An activation and its derivative, both differentiable, in the dtype of `z`.

    Args:
        z: any shape, float32 or float64.
        activation: one of `ACTIVATIONS`.
        alpha: the slope of the sigmoid of "silu", and nothing to the others.
    """
    if activation in ("silu", "quick_gelu"):
        alpha = alpha if activation == "silu" else QUICK
        s = torch.sigmoid(alpha * z)
        return z * s, s + alpha * z * s * (1.0 - s)
    if activation == "gelu":
        distribution = 0.5 * (1.0 + torch.erf(z * math.sqrt(0.5)))
        return z * distribution, distribution + z * torch.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)
    if activation == "gelu_tanh":
        t = torch.tanh(ROOT * (z + CUBIC * z * z * z))
        slope = 0.5 * (1.0 + t) + 0.5 * z * (1.0 - t * t) * (ROOT * (1.0 + 3.0 * CUBIC * z * z))
        return 0.5 * z * (1.0 + t), slope
    if activation == "relu":
        return torch.relu(z), (~(z <= 0)).to(z.dtype)  # of NaN one, as in PyTorch
    if activation == "relu_squared":
        return torch.relu(z).square(), 2.0 * torch.relu(z)
    if activation == "tanh":
        t = torch.tanh(z)
        return t, 1.0 - t * t
    if activation == "sigmoid":
        s = torch.sigmoid(z)
        return s, s * (1.0 - s)
    assert activation == "identity", activation
    return z, torch.ones_like(z)
