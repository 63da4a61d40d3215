"""What this package can stand in for: `patch(model)` puts it there in place, `unpatch(model)` takes it off."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ._core import patching
from ._core.call_kinds import can_bypass_dispatcher, is_transformed, needs_grad
from ._core.patching import Found, Patched
from ._core.stock import is_untouched, why_not_replaceable
from .arguments import ACTIVATIONS
from .bias.functional import bias_act
from .gated import operators  # by name, as cloudpickle carries a module
from .gated.functional import geglu, reglu, swiglu
from .levels import LADDER
from .norm.functional import add_layer_norm, layer_norm

PACKAGE = "fused-ln-act"
GATED = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Names of the three layers of a gated feed-forward: Llama, Mistral, Qwen and Gemma; Meta's own Llama."""
ACTIVATIONS_OF = ("act_fn", "act")
"""Names of the activation of a gated feed-forward."""
PLAIN = (str, bool, int, float, FunctionType, BuiltinFunctionType)
"""Types of the attributes of an activation that each call checks again."""
FEED_FORWARD = re.compile("MLP|Mlp|FeedForward|FFN|GLU|Glu|GELU|Expert|MoE|Moe|DenseAct")
"""Pattern that matches class names of feed-forwards."""
ACT = re.compile(r"(^|_)act(ivation)?s?\d*(_|$)")
"""Pattern that matches names of attributes that are an activation."""
AFTER = ("dense", "dropout", "LayerNorm")
"""Names of the modules after a block in BERT: a layer, dropout, and the norm of the sum with the residual stream."""


def patch(model: torch.nn.Module, *, gpu_bound: bool = False) -> Patched:
    """Let the functions of this package compute parts of a model, in place.

    - Gated feed-forwards, `down(act(gate(x)) * up(x))`: the activation and the product are one `swiglu`, `geglu` or
      `reglu`. The three layers are called as before, so adapters in their places (LoRA) go on working. In training at
      level "triton" what a plain `down` without bias reads is not saved: the backward makes it once more.
    - Activations written out as several operations (transformers' NewGELUActivation): one operation.
    - With gpu_bound, `torch.nn.LayerNorm` over one dimension: `layer_norm`.
    - With gpu_bound, the end of a block in BERT and its kin, `norm(dropout(dense(x)) + residual)`: dropout, sum and
      norm are one `add_layer_norm`. Its dropout draws other elements than PyTorch's.

    A part is known by what its forward computes, tried on small inputs. Parameters, names and classes stay.

    Args:
        model: a model, or a part of one, before it is compiled.
        gpu_bound: whether norms are replaced too. PyTorch has a kernel for LayerNorm; ours take less time of the GPU
            and more of the host, so a model gets faster where the GPU is the limit, and slower elsewhere.

    Returns:
        What was replaced, and why the rest was not.

    Raises:
        TypeError: `model` is no module, or is compiled or scripted.
    """
    finders = [_gated, _after_block, _layer_norm, _activation, _look_alike]
    return patching.patch(model, PACKAGE, finders, gpu_bound=gpu_bound)


def unpatch(model: torch.nn.Module) -> None:
    """Undo `patch`: every module has the forward of its class again."""
    patching.unpatch(model, PACKAGE)


def _gated(module: torch.nn.Module) -> Found | str | None:
    """A gated feed-forward, by its three layers."""
    names = next((names for names in GATED if all(module._modules.get(name) for name in names)), None)
    if names is None or not set(dict(module.named_children())) - set(names) <= set(ACTIVATIONS_OF):
        return None
    if module._parameters or module._buffers:
        return "it has parameters or buffers of its own"
    gate, up, down = (torch.nn.Linear(*sizes, bias=False, dtype=torch.float64) for sizes in ((4, 6), (4, 6), (6, 4)))
    x = torch.randn(9, 4, dtype=torch.float64) * torch.tensor([1.0, 30.0, 1e4], dtype=torch.float64).repeat(3)[:, None]
    given = patching.tried(module, x, children=dict(zip(names, (gate, up, down), strict=True)))
    halves = gate.forward(x), up.forward(x)  # no call, which the hooks of all modules would see
    for name, (product, keywords) in PRODUCTS.items():
        if patching.agree(down.forward(product(*halves, **keywords, level="reference")), given, 1e-5):
            return Found(_gated_forward(module, names, name), name)
    return "its activation is none of swiglu, geglu and reglu, or it computes something else"


PRODUCTS: dict[str, tuple[Callable[..., Tensor], dict[str, Any]]] = {
    "swiglu": (swiglu, {}),
    "geglu": (geglu, {}),
    "geglu, approximate 'tanh'": (geglu, {"approximate": "tanh"}),
    "reglu": (reglu, {}),
}
ACTIVATION = {"swiglu": "silu", "geglu": "gelu", "geglu, approximate 'tanh'": "gelu_tanh", "reglu": "relu"}
"""The activation of each product, as the operators name it."""


def _gated_forward(module: torch.nn.Module, names: Sequence[str], found: str) -> patching.Forward:
    stock, (gate, up, down), (product, keywords) = patching.forward_of_class(module), names, PRODUCTS[found]
    name, activation = product.__name__, ACTIVATION[found]
    is_as_found = _activation_check(module)

    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if (
            len(args) != 1
            or kwargs
            or patching.is_compiled_inference()
            or LADDER.is_native(name, args[0])  # PyTorch's own operators: as the class has them
            or not is_as_found(self)
        ):
            return stock(self, *args, **kwargs)
        layers = self._modules
        layer, halves = layers[down], (layers[gate](args[0]), layers[up](args[0]))
        if _is_saving(name, layer, *halves):
            return operators.gated_linear(*halves, layer.weight, activation, 1.0, None, 0.0)
        return layer(product(*halves, **keywords))

    return forward


def _activation_check(module: torch.nn.Module) -> Callable[[torch.nn.Module], bool]:
    """Whether the activation of a module, which its product computes, is still what it was and has no hooks."""
    act = next((name for name in ACTIVATIONS_OF if name in module._modules), None)
    if act is None:  # it is a function, or written in the forward
        functions = [(name, value) for name, value in vars(module).items() if callable(value) and name != "forward"]
        return lambda self: all(self.__dict__.get(name) is value for name, value in functions)
    child = module._modules[act]
    kind, inner = type(child), bool(child._modules)
    no_matter = ("training", "inplace")
    state = [(n, value) for n, value in vars(child).items() if type(value) in PLAIN and n not in no_matter]

    def is_as_found(self: torch.nn.Module) -> bool:
        child = self._modules.get(act)
        if type(child) is not kind or not is_untouched(*(child.modules() if inner else (child,))):
            return False
        return not state or all(child.__dict__.get(name) == value for name, value in state)

    return is_as_found


def _is_saving(function: str, layer: torch.nn.Module, gate: Tensor, up: Tensor) -> bool:
    """Whether PyTorch would save what a plain layer reads, which Triton's kernel can make from gate and up."""
    return (
        not torch.compiler.is_compiling()  # which decides itself what it saves
        and type(layer) is torch.nn.Linear
        and layer.bias is None
        and needs_grad(layer.weight)
        and LADDER.is_default(function, "triton", gate)
        and gate.dtype == up.dtype == layer.weight.dtype
        and not patching.is_autocast(gate)
        and can_bypass_dispatcher(gate, up, layer.weight)
        and not is_transformed()
        and why_not_replaceable([layer]) is None
    )


def _after_block(module: torch.nn.Module) -> Found | str | None:
    """A layer, dropout and the norm of the sum with the residual stream."""
    if set(dict(module.named_children())) != set(AFTER) or type(module.LayerNorm) is not torch.nn.LayerNorm:
        return None
    norm = module.LayerNorm
    reason = _why_not_norm(norm) or why_not_replaceable([norm, module.dropout])
    if reason or module._parameters or module._buffers:
        return reason or "it has parameters or buffers of its own"
    weight, bias, x, residual = (torch.randn(n, dtype=torch.float64) for n in (6, 6, (5, 6), (5, 6)))
    tiny = torch.nn.LayerNorm(6, norm.eps, dtype=torch.float64)
    tiny.weight, tiny.bias = torch.nn.Parameter(weight), torch.nn.Parameter(bias)
    children = {"dense": torch.nn.Identity(), "dropout": torch.nn.Identity(), "LayerNorm": tiny}
    ours = add_layer_norm(x, residual, weight, bias, eps=norm.eps, level="reference")[0]
    if not patching.agree(ours, patching.tried(module, x, residual, children=children), 1e-9):
        return "it computes something else than LayerNorm(dropout(dense(x)) + residual)"
    return Found(_after_block_forward(module), "add_layer_norm", gpu_bound=True)


def _after_block_forward(module: torch.nn.Module) -> patching.Forward:
    stock = patching.forward_of_class(module)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        norm, dropout = self.LayerNorm, self.dropout
        kinds = type(norm) is torch.nn.LayerNorm and type(dropout) is torch.nn.Dropout and dropout.p < 1.0
        own = patching.is_compiled_inference() or len(args) != 2 or kwargs
        if own or not kinds or why_not_replaceable([norm, dropout]):
            return stock(self, *args, **kwargs)
        x, residual = self.dense(args[0]), args[1]
        if not norm.weight.dtype == residual.dtype == x.dtype or patching.is_autocast(x):
            return norm(dropout(x) + residual)
        if LADDER.is_native("add_layer_norm", x):
            return norm(dropout(x) + residual)
        p = dropout.p if dropout.training else 0.0
        return add_layer_norm(x, residual, norm.weight, norm.bias, eps=norm.eps, dropout_p=p)[0]

    return forward


def _layer_norm(module: torch.nn.Module) -> Found | str | None:
    """PyTorch's own LayerNorm, of which it is known what it computes; not its subclasses."""
    if type(module) is not torch.nn.LayerNorm:
        return None
    return _why_not_norm(module) or Found(_layer_norm_forward, "layer_norm", gpu_bound=True)


def _layer_norm_forward(self: Any, input: Tensor) -> Tensor:
    own = patching.is_compiled_inference() or self.weight.dtype != input.dtype or patching.is_autocast(input)
    if own or LADDER.is_native("layer_norm", input):
        return torch.nn.LayerNorm.forward(self, input)
    return layer_norm(input, self.weight, self.bias, eps=self.eps)


def _why_not_norm(norm: torch.nn.LayerNorm) -> str | None:
    if norm.weight is None or len(norm.normalized_shape) != 1:
        return f"its norm must have a weight and one dimension; given is {norm}"
    return None


def _activation(module: torch.nn.Module) -> Found | str | None:
    """An activation that is written out as several operations."""
    if type(module).__module__.startswith("torch.nn") or any((module._modules, module._parameters, module._buffers)):
        return None
    if not type(module).__name__.endswith(("GELU", "Activation", "SiLU", "Tanh")):
        return None
    x = torch.stack([torch.linspace(-size, size, 49, dtype=torch.float64) for size in (6.0, 50.0, 1e4)])
    with _Operations() as operations:
        given = patching.tried(module, x)
    if operations.count <= 3:  # PyTorch's own kernel, tried twice and compared
        return None
    for name in ACTIVATIONS:
        if patching.agree(bias_act(x, None, name, level="reference"), given, 1e-9):
            return Found(_activation_forward(module, name), f"the activation {name!r}, as one operation")
    return "it is no activation that bias_act knows"


def _activation_forward(module: torch.nn.Module, name: str) -> patching.Forward:
    stock = patching.forward_of_class(module)

    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or patching.is_compiled_inference() or patching.is_autocast(args[0]):
            return stock(self, *args, **kwargs)
        if name == "gelu_tanh":
            return F.gelu(args[0], approximate="tanh")  # PyTorch has it as one kernel: nothing is left to gain
        return bias_act(args[0], None, name)

    return forward


def _look_alike(module: torch.nn.Module) -> str | None:
    """Why a module that seems to compute what this package does, by its class's name or its parts, is left alone."""
    name = type(module).__name__
    if type(module).__module__.startswith("kernel_pytorch."):
        return None
    if isinstance(module, torch.nn.LayerNorm) or ("LayerNorm" in name and module._parameters):
        return (
            f"its class is {type(module).__module__}.{name}, which may compute something else than torch.nn.LayerNorm"
        )
    named = FEED_FORWARD.search(name)
    if named and any(p is not None and p.dim() == 3 for p in module._parameters.values()):
        return "it holds the weights of several experts in one tensor, which no function of this package takes"
    parts = {**vars(module), **module._modules}
    acts = any(ACT.search(part) and callable(value) for part, value in parts.items())
    if (named or acts) and any(_is_layer(child) for child in module.children()):
        return "its layers and its activation are not those of a gated feed-forward with the names " + " or ".join(
            ", ".join(names) for names in GATED
        )
    if {"dense", "LayerNorm"} <= module._modules.keys():
        return "its parts are not the dense, dropout and LayerNorm that stand behind a block in BERT"
    return None


def _is_layer(module: torch.nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 2 and not isinstance(module, torch.nn.Embedding)


class _Operations(TorchDispatchMode):
    """Counts the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))
