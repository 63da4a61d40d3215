"""`LinearAct`, `MLP` and `GatedMLP`: the feed-forward layers of transformers."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kernel_pytorch.fused_ln_act._core.stock import check_plain
from kernel_pytorch.fused_ln_act.activations import module_of, name_of
from kernel_pytorch.fused_ln_act.arguments import check_activation, check_dropout, names_of
from kernel_pytorch.fused_ln_act.levels import LADDER

from .functional import gated_mlp, linear_act

# Activation classes of Hugging Face's transformers, by class name: transformers need not be installed.
TRANSFORMERS = {
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "QuickGELUActivation": "quick_gelu",
    "ReLUSquaredActivation": "relu_squared",
}
FUNCTIONS = {F.silu: "silu", F.relu: "relu", torch.tanh: "tanh", torch.sigmoid: "sigmoid"}


class LinearAct(torch.nn.Linear):
    """A linear layer and an activation in one: `activation(x @ weight.T + bias)`.

    In the place of `torch.nn.Sequential(Linear, GELU)`; the parameters are those of the Linear.

    `activation` is as in `linear_act`.

    Args:
        in_features: K.
        out_features: N.
        bias: whether there is one.
        device: of the parameters.
        dtype: of the parameters.
        save_preactivation: as in `linear_act`; an attribute that may be changed later.
        level: as in `linear_act`; an attribute that may be changed later.
    """

    level: str | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        activation: str,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        save_preactivation: bool = True,
        level: str | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        check_activation(activation)
        LADDER.check(level)
        self.activation, self.save_preactivation, self.level = activation, save_preactivation, level

    @classmethod
    def from_torch(cls, module: torch.nn.Module, *, level: str | None = None) -> LinearAct:
        """A drop-in that shares the parameters of `torch.nn.Sequential(Linear, activation)`, or of a Linear alone.

        Raises:
            TypeError: `module` is something else, has hooks, or its activation is none of `linear_act`'s.
        """
        parts = list(module) if isinstance(module, torch.nn.Sequential) else [module]
        activation = activation_of(parts[1]) if len(parts) == 2 else "identity" if len(parts) == 1 else None
        if activation is None or type(parts[0]) is not torch.nn.Linear:
            raise TypeError(
                f"module: given {names_of(parts)}; it must be torch.nn.Sequential of Linear and one of {_KNOWN}"
            )
        check_plain([module, *parts])
        return _share(parts[0], activation, level).train(module.training)

    def to_torch(self) -> torch.nn.Sequential:
        """`torch.nn.Sequential(Linear, activation)` that shares these parameters: the way back.

        Raises:
            TypeError: PyTorch has no module of that activation.
        """
        return torch.nn.Sequential(_stock_linear(self), module_of(self.activation)).train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        """`(..., N)` of x `(..., K)`; dtypes and errors as of `linear_act`."""
        return linear_act(
            x, self.weight, self.bias, self.activation, save_preactivation=self.save_preactivation, level=self.level
        )

    def extra_repr(self) -> str:
        """As the stock module, with the activation and the other options that were given."""
        again = "" if self.save_preactivation else ", save_preactivation=False"
        return f"{super().extra_repr()}, activation={self.activation!r}{again}" + _shown(self.level)


class MLP(torch.nn.Module):
    """The feed-forward of a transformer: Linear, activation, dropout, Linear.

    `fc1` is a `LinearAct`, `fc2` one without an activation; between them PyTorch's own dropout.

    `activation` is as in `linear_act`.

    Args:
        in_features: of x.
        hidden_features: between the two.
        out_features: of the result; None for `in_features`.
        bias: whether both have one.
        p: probability that an element between the two is dropped while the module is training.
        device: of the parameters.
        dtype: of the parameters.
        level: as in `linear_act`; an attribute that may be changed later, of `fc1` and `fc2`.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        activation: str = "gelu",
        out_features: int | None = None,
        bias: bool = True,
        p: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        level: str | None = None,
    ) -> None:
        super().__init__()
        last = in_features if out_features is None else out_features
        self.fc1 = LinearAct(in_features, hidden_features, activation, bias, device, dtype, level=level)
        check_dropout(p, None, self.fc1.weight, "p")
        self.dropout = torch.nn.Dropout(p)
        self.fc2 = LinearAct(hidden_features, last, "identity", bias, device, dtype, level=level)

    @property
    def level(self) -> str | None:
        """Level of `fc1`; assigning it sets the level of both layers."""
        return self.fc1.level

    @level.setter
    def level(self, level: str | None) -> None:
        LADDER.check(level)
        self.fc1.level = self.fc2.level = level

    @classmethod
    def from_torch(cls, module: torch.nn.Module, *, level: str | None = None) -> MLP:
        """A drop-in that shares the parameters of `torch.nn.Sequential(Linear, activation[, Dropout], Linear)`.

        Raises:
            TypeError: `module` is something else, has hooks, or its activation is none of `linear_act`'s.
            ValueError: its Dropout drops everything.
        """
        parts = list(module) if isinstance(module, torch.nn.Sequential) else [module]
        kinds = [type(part) for part in parts]
        dropout = parts[2] if len(parts) == 4 and kinds[2] is torch.nn.Dropout else None
        activation = activation_of(parts[1]) if len(parts) == (3 if dropout is None else 4) else None
        if activation is None or kinds[0] is not torch.nn.Linear or kinds[-1] is not torch.nn.Linear:
            raise TypeError(
                f"module: given {names_of(parts)}; it must be torch.nn.Sequential of Linear, one of {_KNOWN}, at most "
                "a Dropout, and Linear"
            )
        if parts[0].out_features != parts[-1].in_features:
            raise TypeError(f"module: {parts[-1]} cannot take what {parts[0]} gives")
        check_plain([module, *parts])
        ours = cls(1, 1, activation, p=0.0 if dropout is None else dropout.p, device="meta", level=level)
        ours.fc1 = _share(parts[0], activation, level)
        ours.fc2 = _share(parts[-1], "identity", level)
        return ours.train(module.training)

    def to_torch(self) -> torch.nn.Sequential:
        """`torch.nn.Sequential(Linear, activation, Dropout, Linear)` that shares these parameters: the way back.

        Raises:
            TypeError: PyTorch has no module of that activation.
        """
        activation = module_of(self.fc1.activation)
        parts = (_stock_linear(self.fc1), activation, torch.nn.Dropout(self.dropout.p), _stock_linear(self.fc2))
        return torch.nn.Sequential(*parts).train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        """`(..., out_features)` of x `(..., in_features)`; dtypes and errors as of `linear_act`."""
        return self.fc2(self.dropout(self.fc1(x)))


class GatedMLP(torch.nn.Module):
    """The gated feed-forward of Llama, Mistral, Qwen and others: `down(activation(gate(x)) * up(x))`, without biases.

    One parameter, `gate_up_proj.weight`, holds the rows of the gate and then those of up. A state_dict that holds
    `gate_proj.weight` and `up_proj.weight` is loaded as well.

    `activation` is as in `gated_mlp`.

    Args:
        in_features: K.
        hidden_features: I.
        out_features: of the result; None for `in_features`.
        device: of the parameters.
        dtype: of the parameters.
        recompute: as in `gated_mlp`; an attribute that may be changed later.
        level: as in `gated_mlp`; an attribute that may be changed later.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        activation: str = "silu",
        out_features: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recompute: bool = False,
        level: str | None = None,
    ) -> None:
        super().__init__()
        check_activation(activation)
        LADDER.check(level)
        last = in_features if out_features is None else out_features
        self.gate_up_proj = torch.nn.Linear(in_features, 2 * hidden_features, False, device, dtype)
        self.down_proj = torch.nn.Linear(hidden_features, last, False, device, dtype)
        self.activation, self.recompute, self.level = activation, recompute, level
        self._taken_over: list[torch.nn.Module] = []
        self.register_load_state_dict_pre_hook(_pack)

    @classmethod
    def from_torch(
        cls, module: torch.nn.Module, *, activation: str | None = None, level: str | None = None
    ) -> GatedMLP:
        """Take over a module that has `gate_proj`, `up_proj` and `down_proj`: LlamaMLP, MistralMLP, Qwen3MLP.

        The weights of gate and up are copied once, into one parameter. Those of `module` become views of it, so nothing
        is held twice and what is learned here is learned there; `down_proj` is shared. The packed weight is
        a new parameter: an optimizer that was made before does not know it, so make it afterwards.
        Taken over again, `module` gives the same parameter.

        `level` is as in `gated_mlp`.

        Args:
            module: with three `torch.nn.Linear` of these names, without biases.
            activation: as in `gated_mlp`; None to read it off `module.act_fn`.

        Raises:
            TypeError: `module` is something else, has hooks, its activation is none of `gated_mlp`'s, or another layer
                has the weight of gate or up too.
        """
        layers: list[Any] = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
        if not all(type(layer) is torch.nn.Linear and layer.bias is None for layer in layers):
            raise TypeError(
                f"module: given {type(module).__name__} with {names_of(layers)}; it must have gate_proj, up_proj and "
                "down_proj, each a torch.nn.Linear, no subclass, without a bias"
            )
        check_plain(module.modules())
        gate, up, down = layers
        alike = all(getattr(gate.weight, a) == getattr(up.weight, a) for a in ("shape", "dtype", "requires_grad"))
        alike &= gate.weight is not up.weight
        if not alike or down.in_features != gate.out_features:
            raise TypeError(
                f"module: gate_proj {gate}, up_proj {up} and down_proj {down} do not fit, or only one of the first two "
                "is trained; gate and up must be alike, and down as wide as they are high"
            )
        found = activation or activation_of(getattr(module, "act_fn", None))
        if found is None:
            given = getattr(module, "act_fn", None)
            raise TypeError(f"module: its act_fn is {given}, which has no name here; give activation")
        if _are_shared(gate, up):
            raise TypeError(
                "module: another layer has the weight of its gate_proj or up_proj too; in one parameter they would no "
                "longer be tied"
            )
        ours = cls(1, 1, found, device="meta", level=level)
        # Empty for now: the parameters come from the module.
        ours.gate_up_proj.weight, ours.down_proj = _packed(module, gate, up), down
        ours.gate_up_proj.in_features, ours.gate_up_proj.out_features = gate.in_features, 2 * gate.out_features
        ours._taken_over = [module]
        ours._share_halves()
        return ours.train(module.training)

    def to_torch(self) -> torch.nn.Module:
        """The module that was taken over, with the weights as they are now: the way back.

        Raises:
            TypeError: none was.
        """
        if not self._taken_over:
            raise TypeError("there is no module to go back to: this one was not made by GatedMLP.from_torch")
        self._share_halves()
        return self._taken_over[0].train(self.training)

    def forward(self, x: Tensor) -> Tensor:
        """`(..., out_features)` of x `(..., in_features)`; dtypes and errors as of `gated_mlp`."""
        weights = self.gate_up_proj.weight, self.down_proj.weight
        return gated_mlp(x, *weights, self.activation, recompute=self.recompute, level=self.level)

    def extra_repr(self) -> str:
        """The activation and the other options that were given."""
        return f"activation={self.activation!r}{', recompute=True' if self.recompute else ''}" + _shown(self.level)

    def _share_halves(self) -> None:
        """Let the module that was taken over see these very weights, wherever they are by now."""
        stock: Any = self._taken_over[0]
        packed = self.gate_up_proj.weight
        stock.gate_proj.weight.data, stock.up_proj.weight.data = packed.detach().chunk(2)
        for layer in (stock.gate_proj, stock.up_proj):
            layer.weight.requires_grad_(packed.requires_grad)
        stock.down_proj = self.down_proj


# By module that was taken over, the parameter that its weights are halves of.
_PACKED: weakref.WeakKeyDictionary[torch.nn.Module, torch.nn.Parameter] = weakref.WeakKeyDictionary()


def _packed(module: torch.nn.Module, gate: torch.nn.Linear, up: torch.nn.Linear) -> torch.nn.Parameter:
    """One parameter with both weights; that of an earlier drop-in where they are its halves still."""
    weights = [gate.weight.detach(), up.weight.detach()]
    packed = _PACKED.get(module)
    if packed is None or not all(map(_is_same_view, weights, packed.detach().chunk(2))):
        packed = _PACKED[module] = torch.nn.Parameter(torch.cat(weights))
    return packed.requires_grad_(gate.weight.requires_grad)


def _is_same_view(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors show the same elements of the same memory; halves may have changed places, or been pruned."""
    layouts = [(t.shape, t.stride(), t.storage_offset(), t.dtype) for t in (one, other)]
    return torch._C._is_alias_of(one, other) and layouts[0] == layouts[1]


def _are_shared(*layers: torch.nn.Linear) -> bool:
    """Whether modules beside these have one of their weights."""
    own = [id(layer._parameters) for layer in layers]
    holders = gc.get_referrers(*(layer.weight for layer in layers))
    others = [holder for holder in holders if type(holder) is dict and id(holder) not in own]
    # Only dictionaries in which a module keeps its parameters count.
    kept = [r.get("_parameters") for r in gc.get_referrers(*others) if type(r) is dict] if others else []
    return any(parameters is holder for parameters in kept for holder in others)


def activation_of(function: Any) -> str | None:
    """The name of what `act_fn` of a module computes, or None if it is none of ours."""
    if isinstance(function, torch.nn.Module):
        return name_of(function) or TRANSFORMERS.get(type(function).__name__)
    return FUNCTIONS.get(function)


def _pack(module: torch.nn.Module, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
    """Read a state_dict in which gate and up are apart."""
    together = f"{prefix}gate_up_proj.weight"
    apart = [f"{prefix}{name}.weight" for name in ("gate_proj", "up_proj")]
    if together in state_dict and any(name in state_dict for name in apart):
        error_messages: list[str] = others[-1]
        error_messages.append(f"{together} is there, and so is {' or '.join(apart)}; only one of both may be.")
    elif all(name in state_dict for name in apart):
        state_dict[together] = torch.cat([state_dict.pop(name) for name in apart])


def _share(source: torch.nn.Linear, activation: str, level: str | None) -> LinearAct:
    ours = LinearAct(1, 1, activation, device="meta", level=level)
    ours.in_features, ours.out_features = source.in_features, source.out_features
    ours.weight, ours.bias = source.weight, source.bias
    return ours.train(source.training)


def _stock_linear(source: torch.nn.Linear) -> torch.nn.Linear:
    stock = torch.nn.Linear(1, 1, device="meta")
    stock.in_features, stock.out_features = source.in_features, source.out_features
    stock.weight, stock.bias = source.weight, source.bias
    return stock


_KNOWN = "GELU, SiLU, ReLU, Tanh, Sigmoid, Identity (or one of transformers' like them)"


def _shown(level: str | None) -> str:
    return "" if level is None else f", level={level!r}"
