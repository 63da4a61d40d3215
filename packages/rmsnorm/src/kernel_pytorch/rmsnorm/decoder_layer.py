"""The decoder layer of Llama and models like it, whose second norm reads a sum: `add_rms_norm` computes both.

    h = x + self_attn(input_layernorm(x)),  y = h + mlp(post_attention_layernorm(h))

The first norm reads a sum too, which the layer before it returns: that one stays apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._core import patching
from ._core.patching import Found
from ._core.stock import HOOKS
from .functional import Casting, add_rms_norm

FIRST, ATTENTION, SECOND, FEED = "input_layernorm", "self_attn", "post_attention_layernorm", "mlp"


class Formula(NamedTuple):
    """What a norm computes.

    Attributes:
        eps: the attribute in which its module keeps what is added to the mean square.
        offset: see `rms_norm`.
        casting: see `rms_norm`.
    """

    eps: str
    offset: float
    casting: Casting


class _Stub(torch.nn.Module):
    """Stands in for a child of the layer."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.function(hidden_states)


def is_layer(module: torch.nn.Module) -> bool:
    """Whether a module computes the formula above, whatever its children do."""
    if {name for name, child in module._modules.items() if child is not None} != {FIRST, ATTENTION, SECOND, FEED}:
        return False
    if module._parameters or module._buffers:
        return False
    children = {
        FIRST: _Stub(lambda x: 2.0 * x + 1.0), ATTENTION: _Stub(lambda x: (x.sin(), None)),
        SECOND: _Stub(lambda x: 3.0 * x - 1.0), FEED: _Stub(torch.cos),
    }  # fmt: skip
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    h = x + (2.0 * x + 1.0).sin()
    return patching.agree(h + (3.0 * h - 1.0).cos(), patching.tried(module, x, children=children), 1e-12)


def with_sum(
    module: torch.nn.Module, formula: Formula, package: str, is_of_its_class: Callable[[Tensor], bool]
) -> Found:
    """Let `add_rms_norm` compute the sum and the second norm of a layer.

    Args:
        module: the layer.
        formula: of its second norm.
        package: whose patch the norm has, too: if somebody replaced its forward since, it is called.
        is_of_its_class: whether the layer's own operators are the default for such a tensor.
    """
    stock, kind = patching.stock(module), type(module._modules[SECOND])

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        # TorchInductor fuses the sum with the norm, whichever computes that.
        if args or torch.compiler.is_compiling() or is_of_its_class(hidden_states):
            return stock(self, hidden_states, *args, **kwargs)
        first, attention, norm, feed = map(self._modules.__getitem__, (FIRST, ATTENTION, SECOND, FEED))
        if (
            type(norm) is not kind
            or any(map(norm.__dict__.get, HOOKS))
            or patching.owner_of(norm) != package
            or patching.is_autocast(hidden_states)
        ):
            return stock(self, hidden_states, *args, **kwargs)
        x = attention(hidden_states=first(hidden_states), **kwargs)[0]
        weight = norm.weight
        if x.dtype == hidden_states.dtype == weight.dtype and x.shape == hidden_states.shape:
            eps, offset, casting = formula
            y, h = add_rms_norm(x, hidden_states, weight, eps=getattr(norm, eps), offset=offset, casting=casting)
        else:
            h = hidden_states + x
            y = norm(h)
        return h + feed(y)

    return Found(forward, "add_rms_norm of its second norm")
