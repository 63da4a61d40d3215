"""Linear layers for inference on a CPU, with weights in the layout that oneDNN computes in.

PyTorch's own `linear` reads weights as they are stored, in float32 through MKL, and applies the activation in a pass of
its own. TorchInductor has a better operator, with the activation inside, but takes it for frozen models of fixed sizes
alone. It has no public name, so everything here gives way to `linear` where it is missing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

ACTIVATIONS = {"none": ("none", ""), "gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh"), "relu": ("relu", "")}
"""Of `kernel_pytorch.fused_ln_act`, as oneDNN names them."""


class PackedWeights:
    """The packed weights of some layers: made when they are needed first, and again when a weight has changed.

    Changes through `weight.data` are not seen: PyTorch does not count them.
    A copy starts empty, since a packed weight has no storage to copy.
    """

    def __init__(self) -> None:
        self._kept: dict[nn.Linear, tuple[Any, Tensor]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedWeights, ()

    def linear(self, layer: nn.Linear, x: Tensor, activation: str = "none") -> Tensor | None:
        """Compute `activation(layer(x))` without gradients.

        Args:
            layer: whose weights are packed.
            x: `(rows, layer.in_features)`.
            activation: "none", "gelu", "gelu_tanh" or "relu".

        Returns:
            `(rows, layer.out_features)`; None where oneDNN cannot compute it: with gradients, in another dtype than
            float32, on another device than a CPU, under torch.compile or autocast, for other activations.
        """
        if activation not in ACTIVATIONS or not _can_pack(x, layer.weight):
            return None
        weight = layer.weight
        state = weight, weight.data_ptr(), weight._version  # the weight too, so that its address is not given away
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
