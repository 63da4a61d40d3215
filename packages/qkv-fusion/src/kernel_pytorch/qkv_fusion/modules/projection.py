"""`QKVProjection`: queries, keys and values of one product, under the parameter names of published models."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernel_pytorch.qkv_fusion._core.arguments import check_choice, check_tensor, shape_of
from kernel_pytorch.qkv_fusion.arguments import check_positive
from kernel_pytorch.qkv_fusion.levels import LADDER
from kernel_pytorch.qkv_fusion.projection.functional import qkv_projection

from .group import check_layers, packed, placed


class Naming(NamedTuple):
    """How a model names what projects: three layers, or what is packed already.

    Attributes:
        weights: names of the weights, of queries, keys and values or of all.
        biases: of the biases.
        transposed: whether the weight is `(in, out)`, as GPT-2's Conv1D has it.
    """

    weights: tuple[str, ...]
    biases: tuple[str, ...]
    transposed: bool = False


def _layers(*names: str, transposed: bool = False) -> Naming:
    return Naming(tuple(f"{n}.weight" for n in names), tuple(f"{n}.bias" for n in names), transposed)


NAMINGS = {
    "packed": Naming(("weight",), ("bias",)),
    "q_proj": _layers("q_proj", "k_proj", "v_proj"),  # Llama, Mistral, Qwen, Gemma
    "query": _layers("query", "key", "value"),  # BERT
    "Wqkv": _layers("Wqkv"),
    "qkv": _layers("qkv"),  # ViT of timm
    "c_attn": _layers("c_attn", transposed=True),  # GPT-2
    "in_proj": Naming(("in_proj_weight",), ("in_proj_bias",)),  # torch.nn.MultiheadAttention
}
REFUSED = {"query_key_value": "its rows go head by head, as those of GPT-NeoX, BLOOM and Falcon, and not by q, k and v"}


class QKVProjection(torch.nn.Module):
    """Queries, keys and values as one product: `qkv_projection` with parameters.

    Its parameters are `weight` `((H + 2K) * D, C)` and `bias`; its state_dict has the names and tensors of `naming`.

    Args:
        in_features: C.
        num_heads: H.
        num_kv_heads: K; None for K = H.
        head_dim: D; None for C / H.
        bias: whether there is one.
        naming: "packed" for weight and bias, or as models name them: "q_proj", "query", "Wqkv", "qkv", "c_attn",
            "in_proj".
        device: of the parameters.
        dtype: of the parameters.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        naming: str = "packed",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        level: str | None = None,
    ) -> None:
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_positive(in_features=in_features, num_heads=num_heads, num_kv_heads=num_kv_heads)
        if head_dim is not None:
            check_positive(head_dim=head_dim)
        elif in_features % num_heads:
            raise ValueError(f"head_dim: given None; {in_features} channels are not {num_heads} heads of one size")
        check_choice("naming", naming, NAMINGS)
        LADDER.check(level)
        self.in_features, self.num_heads, self.num_kv_heads = in_features, num_heads, num_kv_heads
        self.head_dim, self.naming, self.level = head_dim or in_features // num_heads, naming, level
        self.inside = ""  # what follows the names' own prefix in that of this module
        layer = torch.nn.Linear(in_features, sum(self.sizes), bias, device, dtype)
        self.weight, self.bias = layer.weight, layer.bias
        self._register_state_dict_hook(_unpack)
        self.register_load_state_dict_pre_hook(_pack)

    @property
    def sizes(self) -> list[int]:
        """Rows of queries, of keys and of values."""
        return [heads * self.head_dim for heads in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]

    @classmethod
    def from_attention(
        cls, module: torch.nn.Module, num_heads: int, num_kv_heads: int | None = None, head_dim: int | None = None
    ) -> QKVProjection:
        """What projects in an attention module of another library, with a copy of its parameters.

        Args:
            module: has `q_proj`, `k_proj`, `v_proj`; `query`, `key`, `value`; `Wqkv`; `qkv`; `c_attn`; or
                `in_proj_weight`.
            num_heads: H of that module.
            num_kv_heads: K of it; None for K = H.
            head_dim: D of it; None for C / H.

        Raises:
            TypeError: a layer is no plain torch.nn.Linear (of c_attn: no Conv1D).
            ValueError: there are none of these names, or the sizes do not fit.
        """
        naming = _naming_of(module)
        names = NAMINGS[naming]
        if len(names.weights) == 3:
            check_layers({w.removesuffix(".weight"): module.get_submodule(w[:-7]) for w in names.weights})  # type: ignore[misc]
        weights = [module.get_parameter(name) for name in names.weights]
        has_bias = _optional(module, names.biases[0]) is not None
        columns = weights[0].shape[0 if names.transposed else 1]
        made = cls(columns, num_heads, num_kv_heads, head_dim, has_bias, naming, "meta", weights[0].dtype)
        state = {name: module.get_parameter(name).detach() for name in names.weights}
        state |= {name: module.get_parameter(name).detach() for name in names.biases if has_bias}
        made.to_empty(device=weights[0].device).load_state_dict(state)
        return made.requires_grad_(weights[0].requires_grad).train(module.training)

    def to_attention(self, module: torch.nn.Module) -> torch.nn.Module:
        """Give the parameters back, bit for bit, to a module like that of `from_attention`; returns it."""
        with torch.no_grad():
            for name, value in self.state_dict().items():
                module.get_parameter(name).copy_(value)
        return module

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries `(..., S, H, D)`, keys and values `(..., S, K, D)` of x `(..., S, C)`: views of one product.

        Raises:
            TypeError: x is no tensor of an allowed dtype.
            ValueError: the last dimension of x is not in_features.
        """
        check_tensor("x", x)
        if x.shape[-1] != self.in_features:
            raise ValueError(f"x: shape is {shape_of(x)}; it must be (..., S, {self.in_features})")
        heads = {"num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads, "head_dim": self.head_dim}
        return qkv_projection(x, self.weight, self.bias, **heads, level=self.level)

    def extra_repr(self) -> str:
        """Sizes and naming."""
        heads = f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"
        return f"{self.in_features}, {heads}, bias={self.bias is not None}, naming={self.naming!r}"


def _naming_of(module: torch.nn.Module) -> str:
    """The naming of an attention module, or ValueError."""
    for name, reason in REFUSED.items():
        if hasattr(module, name):
            raise ValueError(f"module: {type(module).__name__} has {name}: {reason}")
    for naming, names in NAMINGS.items():
        if naming != "packed" and all(_optional(module, name) is not None for name in names.weights):
            return naming
    raise ValueError(
        f"module: {type(module).__name__} has none of {', '.join(n for n in NAMINGS if n != 'packed')}; it has"
        f" {', '.join(name for name, _ in module.named_parameters())}"
    )


def _optional(module: torch.nn.Module, name: str) -> Tensor | None:
    return dict(module.named_parameters()).get(name)


def _unpack(module: torch.nn.Module, state: dict[str, Any], prefix: str, local_metadata: dict[str, Any]) -> None:
    """Give the parameters the names of the naming."""
    assert isinstance(module, QKVProjection)
    names, home = NAMINGS[module.naming], prefix.removesuffix(module.inside)
    for own, theirs in (("weight", names.weights), ("bias", names.biases)):
        packed = state.pop(f"{prefix}{own}", None)
        if packed is None:
            continue
        parts = packed.split(module.sizes) if len(theirs) == 3 else [packed]
        for name, part in zip(theirs, parts, strict=True):
            state[f"{home}{name}"] = part.t() if names.transposed and own == "weight" else part


def _pack(module: torch.nn.Module, state: dict[str, Any], prefix: str, *found: Any) -> None:
    """Pack a loaded state_dict, for a projection outside of `FusedSelfAttention`."""
    assert isinstance(module, QKVProjection)
    if not module.inside:
        pack_projection(module, state, prefix, *found)


def pack_projection(
    module: QKVProjection, state: dict[str, Any], home: str, metadata: Any, strict: bool, missing: list[str],
    unexpected: list[str], errors: list[str],
) -> None:  # fmt: skip
    """Pack what a checkpoint has."""
    names = NAMINGS[module.naming]
    for own, theirs in (("weight", names.weights), ("bias", names.biases)):
        value = getattr(module, own)
        if value is None:
            continue
        turned = names.transposed and own == "weight"
        mine = value.detach().t() if turned else value.detach()
        parts = mine.split(module.sizes) if len(theirs) == 3 else [mine]
        found = packed(state, [f"{home}{name}" for name in theirs], parts, missing, errors)
        state[f"{home}{module.inside}{own}"] = placed(found.t() if turned else found, value.detach())
