"""The activations, defined, with their derivatives. Plain PyTorch that TorchScript and TorchInductor compile.

- gelu: Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016, https://arxiv.org/abs/1606.08415; `x * Phi(x)`.
- gelu_tanh: its approximation by tanh, section 2 there: GPT-2's `gelu_new`, PyTorch's `approximate="tanh"`.
- quick_gelu: its approximation by a sigmoid, `x * sigmoid(1.702 x)`, section 2 there: OpenAI's CLIP.
- silu: `x * sigmoid(x)`, section 4 there; also called swish.
- relu_squared: So et al., "Primer", 2021, https://arxiv.org/abs/2109.08668.
- relu, tanh, sigmoid, and identity.

At zero the derivative of relu is 0, at NaN it is 1, as PyTorch has it.
"""

import torch
from torch import Tensor

ACTIVATIONS: tuple[str, ...] = (
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
FLOPS: dict[str, tuple[int, int]] = {
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


def activate(x: Tensor, activation: str) -> Tensor:
    """The activation, element by element, in the dtype of `x`: callers widen 16-bit floats first.

    Args:
        x: any shape, float32 or float64.
        activation: one of `ACTIVATIONS`.
    """
    if activation == "gelu":
        return 0.5 * x * (1.0 + torch.erf(x * 0.7071067811865476))
    if activation == "gelu_tanh":
        return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    if activation == "silu":
        return x * torch.sigmoid(x)
    if activation == "relu":
        return torch.relu(x)
    if activation == "relu_squared":
        return torch.relu(x).square()
    if activation == "quick_gelu":
        return x * torch.sigmoid(1.702 * x)
    if activation == "tanh":
        return torch.tanh(x)
    if activation == "sigmoid":
        return torch.sigmoid(x)
    assert activation == "identity", activation
    return x


def derivative(x: Tensor, activation: str) -> Tensor:
    """The derivative of `activate` at `x`, differentiable itself.

    Args:
        x: any shape, float32 or float64.
        activation: one of `ACTIVATIONS`.
    """
    if activation == "gelu":
        density = 0.3989422804014327 * torch.exp(-0.5 * x * x)
        return 0.5 * (1.0 + torch.erf(x * 0.7071067811865476)) + x * density
    if activation == "gelu_tanh":
        t = torch.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x))
        return 0.5 * (1.0 + t) + 0.5 * x * (1.0 - t * t) * (0.7978845608028654 * (1.0 + 0.134145 * x * x))
    if activation == "silu":
        s = torch.sigmoid(x)
        return s + x * s * (1.0 - s)
    if activation == "relu":
        return (~(x <= 0)).to(x.dtype)
    if activation == "relu_squared":
        return 2.0 * torch.relu(x)
    if activation == "quick_gelu":
        s = torch.sigmoid(1.702 * x)
        return s + 1.702 * x * s * (1.0 - s)
    if activation == "tanh":
        return 1.0 - torch.tanh(x).square()
    if activation == "sigmoid":
        s = torch.sigmoid(x)
        return s * (1.0 - s)
    assert activation == "identity", activation
    return torch.ones_like(x)
