"""What this package can stand in for: `patch(model)` puts it there in place, `unpatch(model)` takes it off."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ._core import patching
from ._core.patching import Found, Patched
from .arguments import ACTIVATIONS
from .bias.functional import bias_act
from .gated.functional import geglu, reglu, swiglu
from .norm.functional import add_layer_norm, layer_norm

PACKAGE = "fused-ln-act"
GATED = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Names of the three layers of a gated feed-forward: Llama, Mistral, Qwen and Gemma; Meta's own Llama."""
AFTER = ("dense", "dropout", "LayerNorm")
"""Names of what stands behind a block in BERT: a layer, dropout, and the norm of the sum with the residual stream."""


def patch(model: torch.nn.Module) -> Patched:
    """Let the functions of this package compute parts of a model, in place.

    - Gated feed-forwards, `down(act(gate(x)) * up(x))`: the activation and the product are one `swiglu`, `geglu` or
      `reglu`. The three layers are called as before, so adapters in their places (LoRA) go on working.
    - `torch.nn.LayerNorm` over one dimension: `layer_norm`.
    - What stands behind a block in BERT and its kin, `norm(dropout(dense(x)) + residual)`: dropout, sum and norm are
      one `add_layer_norm`. Its dropout draws other elements than PyTorch's.
    - Activations written out as several operations (transformers' NewGELUActivation): one operation.

    A part is known by what its forward computes, tried on small inputs. Parameters, names and classes stay.

    Args:
        model: a model, or a part of one, before it is compiled.

    Returns:
        What was replaced, and why the rest was not.

    Raises:
        TypeError: `model` is no module, or is compiled or scripted.
    """
    return patching.patch(model, PACKAGE, [_gated, _after_block, _layer_norm, _activation])


def unpatch(model: torch.nn.Module) -> None:
    """Undo `patch`: every module has the forward of its class again."""
    patching.unpatch(model, PACKAGE)


def _gated(module: torch.nn.Module) -> Found | str | None:
    """A gated feed-forward, by its three layers."""
    names = next((names for names in GATED if all(module._modules.get(name) for name in names)), None)
    if names is None or not set(dict(module.named_children())) - set(names) <= {"act_fn", "act"}:
        return None
    gate, up, down = (torch.nn.Linear(*sizes, bias=False, dtype=torch.float64) for sizes in ((4, 6), (4, 6), (6, 4)))
    x = torch.randn(5, 4, dtype=torch.float64)
    given = _tried(patching.stand_in(module, dict(zip(names, (gate, up, down), strict=True))), x)
    for name, (product, keywords) in PRODUCTS.items():
        if patching.agree(down(product(gate(x), up(x), **keywords, level="reference")), given, 1e-5):
            return Found(_gated_forward(names, product, keywords), name)
    return "its activation is none of swiglu, geglu and reglu, or it computes something else"


PRODUCTS: dict[str, tuple[Callable[..., Tensor], dict[str, Any]]] = {
    "swiglu": (swiglu, {}),
    "geglu": (geglu, {}),
    "geglu, approximate 'tanh'": (geglu, {"approximate": "tanh"}),
    "reglu": (reglu, {}),
}


def _gated_forward(names: Any, product: Callable[..., Tensor], keywords: dict[str, Any]) -> patching.Forward:
    gate, up, down = names

    def forward(self: torch.nn.Module, x: Tensor) -> Any:
        layers = self._modules
        return layers[down](product(layers[gate](x), layers[up](x), **keywords))

    return forward


def _after_block(module: torch.nn.Module) -> Found | str | None:
    """A layer, dropout and the norm of the sum with the residual stream."""
    if set(dict(module.named_children())) != set(AFTER) or not isinstance(module.LayerNorm, torch.nn.LayerNorm):
        return None
    norm = module.LayerNorm
    if reason := _why_not_norm(norm):
        return reason
    weight, bias, x, residual = (torch.randn(n, dtype=torch.float64) for n in (6, 6, (5, 6), (5, 6)))
    tried = torch.nn.LayerNorm(6, norm.eps, dtype=torch.float64)
    tried.weight, tried.bias = torch.nn.Parameter(weight), torch.nn.Parameter(bias)
    probe = patching.stand_in(
        module, {"dense": torch.nn.Identity(), "dropout": torch.nn.Identity(), "LayerNorm": tried}
    )
    ours = add_layer_norm(x, residual, weight, bias, eps=norm.eps, level="reference")[0]
    if not patching.agree(ours, _tried(probe, x, residual), 1e-9):
        return "it computes something else than LayerNorm(dropout(dense(x)) + residual)"
    return Found(_after_block_forward, "add_layer_norm")


def _after_block_forward(self: Any, hidden_states: Tensor, input_tensor: Tensor) -> Tensor:
    norm, dropout = self.LayerNorm, self.dropout
    x = self.dense(hidden_states)
    if norm.weight.dtype != x.dtype or input_tensor.dtype != x.dtype or type(dropout) is not torch.nn.Dropout:
        return norm(dropout(x) + input_tensor)
    p = dropout.p if self.training else 0.0
    return add_layer_norm(x, input_tensor, norm.weight, norm.bias, eps=norm.eps, dropout_p=p)[0]


def _layer_norm(module: torch.nn.Module) -> Found | str | None:
    """PyTorch's own LayerNorm, of which it is known what it computes; not its subclasses."""
    if type(module) is not torch.nn.LayerNorm:
        return None
    return _why_not_norm(module) or Found(_layer_norm_forward, "layer_norm")


def _layer_norm_forward(self: Any, input: Tensor) -> Tensor:
    if self.weight.dtype != input.dtype:
        return torch.nn.LayerNorm.forward(self, input)
    return layer_norm(input, self.weight, self.bias, eps=self.eps)


def _why_not_norm(norm: torch.nn.LayerNorm) -> str | None:
    if norm.weight is None or len(norm.normalized_shape) != 1:
        return f"its norm must have a weight and one dimension; given is {norm}"
    return None


def _activation(module: torch.nn.Module) -> Found | str | None:
    """An activation that is written out as several operations."""
    if type(module).__module__.startswith("torch.nn") or list(module.children()) or list(module.parameters()):
        return None
    if not type(module).__name__.endswith(("GELU", "Activation", "SiLU", "Tanh")):
        return None
    x = torch.linspace(-6.0, 6.0, 49, dtype=torch.float64)
    with _Operations() as operations:
        given = _tried(patching.stand_in(module, {}), x)
    if operations.count <= 1:  # PyTorch's own kernel
        return None
    for name in ACTIVATIONS:
        if patching.agree(bias_act(x, None, name, level="reference"), given, 1e-9):
            return Found(_activation_forward(name), f"the activation {name!r}, as one operation")
    return "it is no activation that bias_act knows"


def _activation_forward(name: str) -> patching.Forward:
    def forward(self: torch.nn.Module, x: Tensor) -> Tensor:
        if name == "gelu_tanh":
            return F.gelu(x, approximate="tanh")  # PyTorch has it as one kernel: nothing is left to gain
        return bias_act(x, None, name)

    return forward


class _Operations(TorchDispatchMode):
    """Counts the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def _tried(module: torch.nn.Module, *inputs: Tensor) -> Any:
    """What a module gives, or None where it takes other inputs or looks at more than these."""
    try:
        return module(*inputs)
    except Exception:
        return None
