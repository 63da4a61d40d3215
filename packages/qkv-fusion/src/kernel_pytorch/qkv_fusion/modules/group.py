"""`LinearGroup`: linear layers that read the same tensor, computed as one product; each keeps its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from kernel_pytorch.qkv_fusion._core.arguments import check_tensor
from kernel_pytorch.qkv_fusion._core.call_kinds import has_transform
from kernel_pytorch.qkv_fusion._core.stock import why_not_replaceable


class LinearGroup(torch.nn.Module):
    """Any number of `torch.nn.Linear` over one input, computed as one matrix product.

    Its parameters are packed, `weight` `(sum of out_features, in_features)` and `bias`; its state_dict has the names
    and tensors of the layers, `<name>.weight` and `<name>.bias`, in both directions.

    Args:
        in_features: of all layers.
        out_features: of each layer, by its name.
        bias: whether they have one.
        device: of the parameters.
        dtype: of the parameters.
    """

    def __init__(
        self,
        in_features: int,
        out_features: Mapping[str, int],
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.names, self.sizes = in_features, list(out_features), list(out_features.values())
        self.starts = [sum(self.sizes[:i]) for i in range(len(self.sizes))]
        self.inside = ""  # what follows the names' own prefix in that of this module
        self.handle: RemovableHandle | None = None  # of what loads checkpoints, where layers of a model are fused
        layer = torch.nn.Linear(in_features, sum(self.sizes), bias, device, dtype)
        self.weight, self.bias = layer.weight, layer.bias
        self._register_state_dict_hook(_unpack)
        self.register_load_state_dict_pre_hook(_pack)

    @classmethod
    def from_linears(cls, layers: Mapping[str, torch.nn.Linear]) -> LinearGroup:
        """Build the group of these layers, which must match; it holds a packed copy of their parameters.

        Raises:
            TypeError: a layer is of another class than torch.nn.Linear, as adapters' are, has hooks, or its weight is
                computed.
            ValueError: layers differ in in_features, dtype, device, in having a bias, or in requires_grad, or share
                their parameters.
        """
        check_layers(layers)
        first = next(iter(layers.values()))
        sizes = {name: layer.out_features for name, layer in layers.items()}
        group = cls(first.in_features, sizes, first.bias is not None, "meta", first.weight.dtype)
        for name in ("weight", "bias") if first.bias is not None else ("weight",):
            parts = [getattr(layer, name) for layer in layers.values()]
            packed = torch.cat([part.detach() for part in parts])
            setattr(group, name, torch.nn.Parameter(packed, requires_grad=parts[0].requires_grad))
        return group.train(first.training)

    def to_linears(self) -> dict[str, torch.nn.Linear]:
        """Return the layers with separate, bit-identical parameters."""
        layers = {}
        for i, name in enumerate(self.names):
            weight, bias = self.part(i)
            layer = torch.nn.Linear(self.in_features, self.sizes[i], bias is not None, "meta", weight.dtype)
            layer.weight = torch.nn.Parameter(weight.detach().clone(), requires_grad=self.weight.requires_grad)
            if bias is not None:
                layer.bias = torch.nn.Parameter(bias.detach().clone(), requires_grad=self.bias.requires_grad)
            layers[name] = layer.train(self.training)
        return layers

    def part(self, index: int) -> tuple[Tensor, Tensor | None]:
        """Views of the weight and the bias of one layer."""
        start, size = self.starts[index], self.sizes[index]
        return self.weight.narrow(0, start, size), None if self.bias is None else self.bias.narrow(0, start, size)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """What each layer makes of x, `(..., in_features)`: views of one product, in the order of the names.

        Each may be changed in place.
        """
        check_tensor("x", x)
        if x.shape[-1] != self.in_features:
            raise ValueError(f"x: shape is {tuple(x.shape)}; its last dimension must be {self.in_features}")
        return tuple(self.outputs(x))

    def outputs(self, x: Tensor) -> Sequence[Tensor]:
        """`forward`, without its checks."""
        product = F.linear(x, self.weight, self.bias)
        # Autograd lets no output of `split` be changed in place. Only this function has the product, so it
        # may use `unsafe_split_with_sizes`, which has no rule for vmap.
        if torch.compiler.is_compiling() or has_transform():
            return [product.narrow(-1, self.starts[i], size) for i, size in enumerate(self.sizes)]
        return torch.unsafe_split_with_sizes(product, self.sizes, -1)

    def shared(self, x: Tensor) -> Sequence[Tensor]:
        """`outputs`, through the forward that a library put around this module's, as accelerate does.

        Raises:
            RuntimeError: the library took the weight away, and would look for it under a name that no state_dict has.
        """
        if self.__dict__.get("forward") is None:
            return self.outputs(x)
        if self.weight.is_meta and not x.is_meta:
            raise RuntimeError(
                f"{', '.join(self.names)}: their joint weight was offloaded to the meta device, and cannot be found "
                "again under its name; unfuse(model) before it is offloaded"
            )
        return self(x)

    def alone(self, index: int, x: Tensor) -> Tensor:
        """The output of one layer, from its rows of the weight."""
        if self.__dict__.get("forward") is None:
            return F.linear(x, *self.part(index))
        return self.shared(x)[index]

    def extra_repr(self) -> str:
        """Names and sizes."""
        sizes = ", ".join(f"{name}={size}" for name, size in zip(self.names, self.sizes, strict=True))
        return f"in_features={self.in_features}, {sizes}, bias={self.bias is not None}"


class Member(torch.nn.Module):
    """Replacement of one layer of a group. The first layer has the group as a submodule.

    Called alone it computes its own rows; `scope.py` shares one product among the layers of one call of the parent.
    """

    def __init__(self, group: LinearGroup, index: int) -> None:
        super().__init__()
        self.shared = (group,)  # a tuple, so that the group is a submodule of the first alone
        self.index, self.in_features, self.out_features = index, group.in_features, group.sizes[index]
        if index == 0:
            self.group = group
            group.inside = f"{group.names[0]}.group."
        self.train(group.training)

    @property
    def weight(self) -> Tensor:
        """The rows of this layer, a view."""
        return self.shared[0].part(self.index)[0]

    @property
    def bias(self) -> Tensor | None:
        """The bias of this layer, a view."""
        return self.shared[0].part(self.index)[1]

    def forward(self, x: Tensor) -> Tensor:
        """Compute the output of this layer for x, `(..., in_features)`, from its rows of the weight alone."""
        return self.shared[0].alone(self.index, x)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for kind, value in (("weight", self.weight), ("bias", self.bias)):
            if value is not None:
                destination[f"{prefix}{kind}"] = value if keep_vars else value.detach()

    def extra_repr(self) -> str:
        """As torch.nn.Linear."""
        return f"in_features={self.in_features}, out_features={self.out_features}, of a group"


def check_layers(layers: Mapping[str, torch.nn.Linear]) -> None:
    """Raise TypeError or ValueError, naming the layer, unless these can be one product; see `from_linears`."""
    for name, layer in layers.items():
        if type(layer) is not torch.nn.Linear:
            raise TypeError(
                f"{name}: it is {type(layer).__module__}.{type(layer).__name__}, which may compute more than "
                "torch.nn.Linear; merge adapters into their layers first"
            )
        if reason := why_not_replaceable([layer]):
            raise TypeError(f"{name}: {reason}")
        if type(layer.weight) is not torch.nn.Parameter:
            kind = type(layer.weight).__name__
            raise TypeError(f"{name}: its weight is a {kind}; fuse the model first, then shard or quantise it")
    if reason := why_not_alike(layers):
        raise ValueError(reason)


def why_not_alike(layers: Mapping[str, torch.nn.Linear]) -> str | None:
    """Why layers cannot be one product, naming the layer, or None if they can."""
    (first_name, first), *others = layers.items()
    for name, layer in others:
        for what in ("in_features", "bias is None", "weight.dtype", "weight.device", "requires_grad"):
            mine, theirs = _about(first, what), _about(layer, what)
            if mine != theirs:
                return f"{name}: {what} is {theirs}, and of {first_name} {mine}; both must be alike"
    parameters = [id(p) for layer in layers.values() for p in layer.parameters()]
    return f"{first_name}: it shares a parameter with another layer of the group" if _repeated(parameters) else None


def _about(layer: torch.nn.Linear, what: str) -> Any:
    if what == "requires_grad":
        return [p.requires_grad for p in layer.parameters()]
    return {
        "in_features": layer.in_features,
        "bias is None": layer.bias is None,
        "weight.dtype": layer.weight.dtype,
        "weight.device": layer.weight.device,
    }[what]


def _repeated(values: Sequence[int]) -> bool:
    return len(set(values)) != len(values)


def _unpack(group: torch.nn.Module, state: dict[str, Any], prefix: str, local_metadata: dict[str, Any]) -> None:
    """Rename packed tensors to the layers' names; in a fused model each layer saves its own tensors."""
    assert isinstance(group, LinearGroup)
    packed = {kind: state.pop(f"{prefix}{kind}", None) for kind in ("weight", "bias")}
    if group.inside:
        return
    parts = {kind: value.split(group.sizes) for kind, value in packed.items() if value is not None}
    for i, name in enumerate(group.names):
        for kind, values in parts.items():
            state[f"{prefix}{name}.{kind}"] = values[i]


def _pack(group: torch.nn.Module, state: dict[str, Any], prefix: str, *found: Any) -> None:
    """Pack a loaded state_dict, for a group outside of a fused model."""
    assert isinstance(group, LinearGroup)
    if not group.inside:
        _pack_group(group, state, prefix, *found)


def pack_members(parent: torch.nn.Module, state: dict[str, Any], prefix: str, *found: Any) -> None:
    """Pack a loaded state_dict, for groups with layers in `parent`: a module sees only names with its own prefix."""
    for child in parent.children():
        if isinstance(child, Member) and child.index == 0:
            _pack_group(child.group, state, prefix, *found)


def _pack_group(
    group: LinearGroup, state: dict[str, Any], home: str, metadata: Any, strict: bool, missing: list[str],
    unexpected: list[str], errors: list[str],
) -> None:  # fmt: skip
    """Pack what a checkpoint has."""
    for kind in ("weight", "bias") if group.bias is not None else ("weight",):
        names = [f"{home}{name}.{kind}" for name in group.names]
        own = getattr(group, kind).detach()
        found = packed(state, names, own.split(group.sizes), missing, errors)
        state[f"{home}{group.inside}{kind}"] = placed(found, own)


def packed(
    state: dict[str, Any], names: Sequence[str], own: Sequence[Tensor], missing: list[str], errors: list[str]
) -> Tensor:
    """Take tensors of these names out of a checkpoint, as one; `own` for those that are missing or do not fit."""
    parts = []
    for name, mine in zip(names, own, strict=True):
        part = state.pop(name, None)
        if part is None:
            missing.append(name)
        elif part.shape != mine.shape:
            errors.append(f"{name}: shape is {tuple(part.shape)}; it must be {tuple(mine.shape)}")
        parts.append(mine if part is None or part.shape != mine.shape else part)
    if len({hasattr(part, "placements") for part in parts}) > 1:  # DTensor and Tensor do not mix
        parts = [part.full_tensor() if hasattr(part, "full_tensor") else part for part in parts]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def placed(found: Tensor, own: Tensor) -> Tensor:
    """What a checkpoint has, sharded as the parameter is: PyTorch does that for names of parameters alone."""
    if not hasattr(own, "placements") or hasattr(found, "placements"):
        return found
    from torch.distributed.tensor import distribute_tensor

    # Every rank has the whole of it, so nothing is sent.
    return distribute_tensor(found.to(own.device), own.device_mesh, own.placements, src_data_rank=None)
