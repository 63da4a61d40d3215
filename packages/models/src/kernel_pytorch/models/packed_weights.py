"""Linear layers for float32 inference on a CPU, with weights in the layout of oneDNN and the activation fused.

The operator is the one that TorchInductor uses for frozen models of fixed sizes. It has no public name, so where it is
missing, `PackedWeights.linear` returns None and the caller uses PyTorch's `linear`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

ACTIVATIONS = {"none": ("none", ""), "gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh"), "relu": ("relu", "")}
"""Names of `kernel_pytorch.fused_ln_act`, and oneDNN's name and algorithm."""


class PackedWeights:
    """A cache of packed weights, made at first use, and again when a weight has changed (not through `weight.data`).

    A copy starts empty, since a packed weight has no storage to copy.
    """

    def __init__(self) -> None:
        self._kept: dict[nn.Linear, tuple[Any, Tensor]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedWeights, ()

    def linear(self, layer: nn.Linear, x: Tensor, activation: str = "none") -> Tensor | None:
        """Compute `activation(layer(x))` of x `(rows, layer.in_features)`, without gradients.

        Returns None where oneDNN cannot: with gradients, in another dtype than float32, on another device than a CPU,
        under torch.compile or autocast, for an activation that is not in `ACTIVATIONS`, or without the operator.
        """
        if activation not in ACTIVATIONS or not _can_pack(x, layer.weight):
            return None
        weight = layer.weight
        state = weight, weight.data_ptr(), weight._version  # holds the weight, so that its address is not reused
        kept, packed = self._kept.get(layer, ((None,), None))
        if packed is None or kept[0] is not weight or kept[1:] != state[1:]:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
            self._kept[layer] = state, packed
        name, algorithm = ACTIVATIONS[activation]
        found: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, layer.bias, name, [], algorithm)
        return found


def _can_pack(x: Tensor, weight: Tensor) -> bool:
    if torch.compiler.is_compiling():
        return False
    plain = x.dtype == weight.dtype == torch.float32 and x.device.type == weight.device.type == "cpu" and x.numel()
    quiet = not (torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"))
    known = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    return bool(plain) and quiet and known and torch.backends.mkldnn.enabled
