"""BERT and RoBERTa encoders of packed texts: `(tokens, hidden_size)` instead of `(batch, length, hidden_size)`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .loading import ACTIVATIONS, fill, joined, named, numbered
from .techniques import Names, TechniqueModule

ONEDNN = {"none": ("none", ""), "gelu": ("gelu", "none"), "gelu_tanh": ("gelu", "tanh"), "relu": ("relu", "")}
"""Names of `kernel_pytorch.fused_ln_act`, and oneDNN's name and algorithm."""

MODEL_TYPES = ("bert", "roberta", "xlm-roberta", "camembert")
UNUSED = ("pooler.", "embeddings.position_ids", "embeddings.token_type_ids", "cls.", "lm_head.")
"""Weights that a file may hold and hidden states do not depend on."""

LAYER = named(
    qkv=tuple(f"attention.self.{part}" for part in ("query", "key", "value")),
    out="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    up="intermediate.dense",
    down="output.dense",
    norm="output.LayerNorm",
)
EMBEDDINGS = {"words": "word", "positions": "position", "types": "token_type"}
OUTSIDE = named(("weight",), **{ours: f"embeddings.{theirs}_embeddings" for ours, theirs in EMBEDDINGS.items()})
OUTSIDE |= named(norm="embeddings.LayerNorm")


class Packed(NamedTuple):
    """Texts one after the other."""

    ids: Tensor  # (T,) int64, the tokens of all texts
    places: Tensor  # (T,) int64, the position of each token in its text, from 0 on
    cu_seqlens: Tensor  # (B + 1,) int32, where each text begins, and T
    longest: int  # tokens of the longest text
    runs: tuple[tuple[int, int], ...]  # (count, length) of consecutive texts of the same length; empty unless on a CPU

    @classmethod
    def of(cls, texts: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> Packed:
        """Pack the tokens of texts; on a CPU consecutive texts of the same length are computed together."""
        lengths = torch.tensor([len(text) for text in texts], dtype=torch.int32)
        starts = torch.cat((lengths.new_zeros(1), lengths.cumsum(0, dtype=torch.int32)))
        ids = torch.tensor([token for text in texts for token in text], dtype=torch.int64)
        places = torch.arange(len(ids)) - starts[:-1].long().repeat_interleave(lengths.long())
        runs: tuple[tuple[int, int], ...] = ()
        if torch.device(device).type == "cpu":
            values, counts = lengths.unique_consecutive(return_counts=True)
            runs = tuple((n, length) for n, length in zip(counts.tolist(), values.tolist(), strict=True) if length)
        longest = int(lengths.max()) if len(texts) else 0
        return cls(ids.to(device), places.to(device), starts.to(device), longest, runs)


@dataclass(frozen=True)
class BertConfig:
    """The entries of config.json that define the network; `offset` is the position of the first token."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    type_vocab_size: int
    layer_norm_eps: float
    activation: str
    offset: int

    @classmethod
    def read(cls, config: dict[str, Any]) -> BertConfig:
        """Read the content of config.json; ValueError if model type, activation, positions or a part are unknown."""
        if (kind := config.get("model_type")) not in MODEL_TYPES:
            raise ValueError(f"model_type: given {kind!r}; known are {', '.join(MODEL_TYPES)}")
        if (activation := config.get("hidden_act", "gelu")) not in ACTIVATIONS:
            raise ValueError(f"hidden_act: given {activation!r}; known are {', '.join(ACTIVATIONS)}")
        if (positions := config.get("position_embedding_type") or "absolute") != "absolute":
            raise ValueError(f"position_embedding_type: given {positions!r}; known is absolute")
        for part in ("is_decoder", "add_cross_attention"):
            if config.get(part):
                raise ValueError(f"{part}: given {config[part]!r}; only encoders are known")
        numbers = {name: config[name] for name in cls.__annotations__ if name not in ("activation", "offset")}
        offset = 0 if kind == "bert" else config["pad_token_id"] + 1
        return cls(**numbers, activation=ACTIVATIONS[activation], offset=offset)

    @property
    def longest(self) -> int:
        """The most tokens of a text: one per position."""
        return self.max_position_embeddings - self.offset


class PackedWeights:
    """Linear layers for float32 inference on a CPU: weights in the layout of oneDNN, and the activation fused.

    The operator is the one that TorchInductor uses for frozen models of fixed sizes. It has no public name, so where it
    is missing, `linear` returns None and the caller uses PyTorch's.

    Packed weights are made at first use, and again when a weight has changed (not through `weight.data`). A copy starts
    empty, since a packed weight has no storage to copy.
    """

    def __init__(self) -> None:
        self._kept: dict[nn.Linear, tuple[Any, Tensor]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedWeights, ()

    def linear(self, layer: nn.Linear, x: Tensor, activation: str = "none") -> Tensor | None:
        """Compute `activation(layer(x))` of x `(rows, layer.in_features)`, without gradients.

        Returns None where oneDNN cannot: with gradients, in another dtype than float32, on another device than a CPU,
        under torch.compile or autocast, for an activation that is not in `ONEDNN`, or without the operator.
        """
        weight, onednn = layer.weight, torch.backends.mkldnn
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return None
        plain = x.dtype == weight.dtype == torch.float32 and x.device.type == weight.device.type == "cpu" and x.numel()
        known = onednn.is_available() and onednn.enabled and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        if activation not in ONEDNN or not (plain and known):
            return None
        state = weight, weight.data_ptr(), weight._version  # holds the weight, so that its address is not reused
        kept, packed = self._kept.get(layer, ((None,), None))
        if packed is None or kept[0] is not weight or kept[1:] != state[1:]:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), None)
            self._kept[layer] = state, packed
        name, algorithm = ONEDNN[activation]
        found: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, layer.bias, name, [], algorithm)
        return found


class BertLayer(TechniqueModule):
    """Attention and feed-forward, each with its residual and LayerNorm after it; q, k and v are one product."""

    def __init__(self, config: BertConfig, techniques: Names = None, level: str | None = None) -> None:
        super().__init__(techniques, level)
        width, eps = config.hidden_size, config.layer_norm_eps
        self.num_heads, self.activation = config.num_attention_heads, config.activation
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, config.intermediate_size), nn.Linear(config.intermediate_size, width)
        self.attention_norm, self.norm = nn.LayerNorm(width, eps), nn.LayerNorm(width, eps)
        self._weights = PackedWeights()

    def forward(self, x: Tensor, packed: Packed) -> Tensor:
        """Map `(T, hidden_size)` to the same shape."""
        use, heads = self.techniques, self.num_heads
        joined = self._packed(self.qkv, x)
        if joined is None:
            q, k, v = use.qkv(x, self.qkv.weight, self.qkv.bias, heads, heads, x.shape[1] // heads)
        else:
            q, k, v = joined.unflatten(1, (3, heads, -1)).unbind(1)
        y = self._linear(self.out, self._attention(q, k, v, packed).flatten(1))
        x, _ = use.norm(self.attention_norm, x, y)
        y = self._linear(self.up, x, self.activation)
        return use.norm(self.norm, x, self._linear(self.down, y))[0]

    def _packed(self, layer: nn.Linear, x: Tensor, activation: str = "none") -> Tensor | None:
        """The layer with packed weights; None where `PackedWeights` cannot compute it, and at an explicit level."""
        if "fused-ln-act" not in self.techniques.names or self.techniques.level is not None:
            return None
        return self._weights.linear(layer, x, activation)

    def _linear(self, layer: nn.Linear, x: Tensor, activation: str = "none") -> Tensor:
        y = self._packed(layer, x, activation)
        if y is not None:
            return y
        return layer(x) if activation == "none" else self.techniques.linear_act(x, layer.weight, layer.bias, activation)

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, packed: Packed) -> Tensor:
        """Attention `(T, heads, head size)`; each token sees its own text."""
        if not packed.runs:
            return self.techniques.attention_packed(q, k, v, packed.cu_seqlens, packed.longest, causal=False)
        # Texts of one length are a dense batch without a mask; attention of all tokens to all would be quadratic.
        sizes = [count * length for count, length in packed.runs]
        outputs = []
        for (_, length), *part in zip(packed.runs, *(t.split(sizes) for t in (q, k, v)), strict=True):
            dense = (t.unflatten(0, (-1, length)) for t in part)
            outputs.append(self.techniques.attention(*dense, causal=False).flatten(0, 1))
        return torch.cat(outputs)


class BertEncoder(TechniqueModule):
    """Embeddings and layers, in evaluation: there is no dropout.

    It uses "flash-attn-triton", "fused-ln-act" and "qkv-fusion"; the other arguments are those of `TechniqueModule`.

    Source: Devlin et al., "BERT", 2019, https://arxiv.org/abs/1810.04805; Liu et al., "RoBERTa", 2019,
    https://arxiv.org/abs/1907.11692.
    """

    def __init__(self, config: BertConfig, techniques: Names = None, level: str | None = None) -> None:
        super().__init__(techniques, level)
        self.config, width = config, config.hidden_size
        self.words = nn.Embedding(config.vocab_size, width)
        self.positions = nn.Embedding(config.max_position_embeddings, width)
        self.types = nn.Embedding(config.type_vocab_size, width)
        self.norm = nn.LayerNorm(width, config.layer_norm_eps)
        self.layers = nn.ModuleList(BertLayer(config, techniques, level) for _ in range(config.num_hidden_layers))

    def forward(self, packed: Packed) -> Tensor:
        """Compute `last_hidden_state` of transformers without padding, `(T, hidden_size)`; all tokens have type 0.

        Raises:
            ValueError: a text is longer than `config.longest`.
        """
        if packed.longest > self.config.longest:
            raise ValueError(f"packed: a text has {packed.longest} tokens; there are {self.config.longest} positions")
        places = self.positions(packed.places + self.config.offset) + self.types.weight[0]
        x, _ = self.techniques.norm(self.norm, places, self.words(packed.ids))
        for layer in self.layers:
            x = layer(x, packed)
        return x

    def load_transformers(self, weights: dict[str, Tensor]) -> None:
        """Load the weights of a transformers file, by their names there, also of one with a head.

        Raises:
            ValueError: a weight is missing, left over or of another shape; the message names it.
        """
        left = {}
        for name, tensor in weights.items():
            name = name.removeprefix("bert.").removeprefix("roberta.")
            if not name.startswith(UNUSED):
                left[name.replace(".gamma", ".weight").replace(".beta", ".bias")] = tensor
        fill(self, joined(left, OUTSIDE | numbered("layers.", "encoder.layer.", LAYER, len(self.layers))))
