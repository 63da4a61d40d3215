"""The models: Hugging Face's classes at published widths, with few layers and random weights.

Few layers, so that eight variants of a model fit into one process beside their optimizers; the share of each kind of
layer is that of the whole model, but for the embedding and the head, which weigh more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from kernel_pytorch.harness.errors import UserError, named

SUFFIX = "-small"
"""Ends the names of models that a CPU can time."""
HEADS = {"causal": "AutoModelForCausalLM", "masked": "AutoModelForMaskedLM", "image": "AutoModelForImageClassification"}
"""By kind of model, the class of transformers that builds it."""


@dataclass(frozen=True)
class Shape:
    """The size of a batch of inputs."""

    batch: int  # sequences, or images
    tokens: int  # of a sequence; for images the pixels of a side


@dataclass(frozen=True)
class Model:
    """A model of the benchmark."""

    name: str  # as in `--model`: what transformers calls it, with `SUFFIX` where it is small
    title: str  # for tables
    training: Shape  # of a training step
    options: dict[str, Any]  # of the configuration, where they are not its defaults
    tiny: dict[str, Any]  # options that differ in `as_tiny`
    kind: str = "causal"  # a key of `HEADS`
    attention: str | None = None  # what the published model needs, where transformers chooses another; else None
    prompt: int = 1024  # tokens before those that are decoded
    layers: int | None = None  # of the published model, where `options` has fewer
    is_tiny: bool = False  # whether it is the version that a CPU runs in a second

    @property
    def family(self) -> str:
        """Name of the published model, of whatever size this one is."""
        return self.name.removesuffix(SUFFIX)

    def as_tiny(self) -> Model:
        """The version that a CPU runs in a second, for tests."""
        shape = Shape(2, 32 if self.kind == "image" else 64)
        return replace(self, options={**self.options, **self.tiny}, training=shape, prompt=32, is_tiny=True)

    def as_whole(self) -> Model:
        """The version with all layers of the published model; a tiny one stays as it is."""
        if self.is_tiny or self.layers is None:
            return self
        return replace(self, options={**self.options, "num_hidden_layers": self.layers})

    def build(self) -> Any:
        """The model, with weights drawn from the present seed, in float32 on the CPU."""
        transformers = import_transformers()
        config = transformers.AutoConfig.for_model(self.family, **self.options)
        given = {} if self.attention is None else {"attn_implementation": self.attention}
        return getattr(transformers, HEADS[self.kind]).from_config(config, **given)

    def inputs(self, shape: Shape, device: torch.device) -> dict[str, torch.Tensor]:
        """A batch of random tokens, or pixels, with labels."""
        generator = torch.Generator().manual_seed(1)
        if self.kind == "image":
            pixels = torch.randn(shape.batch, 3, shape.tokens, shape.tokens, generator=generator)
            labels = torch.randint(0, 2, (shape.batch,), generator=generator)
            return {"pixel_values": pixels.to(device), "labels": labels.to(device)}
        tokens = torch.randint(0, 1000 if shape.tokens > 64 else 100, (shape.batch, shape.tokens), generator=generator)
        labels = tokens
        if self.kind == "masked":  # 15 % of the tokens are hidden, as in BERT's training
            labels = tokens.where(torch.rand(tokens.shape, generator=generator) < 0.15, -100)
        return {"input_ids": tokens.to(device), "labels": labels.to(device)}


def import_transformers() -> Any:
    """The module. Raises UserError where it is not installed."""
    try:
        import transformers
    except ImportError:
        raise UserError(
            "models: Hugging Face's transformers is not installed; pip install 'kernel-pytorch-harness[models]'"
        ) from None
    return transformers


LAYERS = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
TINY_ENCODER = {**LAYERS, "vocab_size": 203}
TINY_DECODER = {**TINY_ENCODER, "num_key_value_heads": 2, "head_dim": 16}


def _decoder(
    name: str, title: str, shape: Shape, *, layers: int, attention: str | None = None, **options: Any
) -> Model:
    options |= {"num_hidden_layers": 8, "pad_token_id": 0, "attention_dropout": 0.0}
    return Model(name, title, shape, options, TINY_DECODER, attention=attention, layers=layers)


MODELS = (
    _decoder(
        "llama", "Llama, 3.2-1B widths, 8 layers", Shape(4, 2048), layers=16, hidden_size=2048,
        intermediate_size=8192, num_attention_heads=32, num_key_value_heads=8, head_dim=64, vocab_size=128256,
        rms_norm_eps=1e-5, tie_word_embeddings=True,
    ),
    _decoder(
        "qwen3", "Qwen3, 0.6B widths, 8 layers", Shape(4, 2048), layers=28, hidden_size=1024,
        intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8, head_dim=128, vocab_size=151936,
        rms_norm_eps=1e-6, tie_word_embeddings=True,
    ),
    # transformers before 5.24 chooses "sdpa" for it, which leaves out the soft cap of the scores.
    _decoder(
        "gemma2", "Gemma 2, 2B widths, 8 layers, capped scores", Shape(4, 1024), layers=26, attention="eager",
        hidden_size=2304, intermediate_size=9216, num_attention_heads=8, num_key_value_heads=4, head_dim=256,
        vocab_size=256000, query_pre_attn_scalar=256,
    ),
    Model("gpt2", "GPT-2 small", Shape(16, 1024), {}, {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 203}),
    Model("bert", "BERT-base, masked words", Shape(32, 512), {}, TINY_ENCODER, kind="masked"),
    Model("vit", "ViT-B/16", Shape(128, 224), {}, {**LAYERS, "image_size": 32, "patch_size": 8}, kind="image"),
)  # fmt: skip
"""In the order of their tables."""


def _small(name: str, title: str, shape: Shape, **options: int) -> Model:
    model = next(model for model in MODELS if model.name == name)
    options, title = {**model.options, **options}, f"{title}, small"
    return replace(model, name=name + SUFFIX, title=title, options=options, training=shape, layers=None)


_DECODER = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "head_dim": 64}
_ENCODER = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 6}
_TEXT = Shape(2, 256)
SMALL = (
    _small("llama", "Llama", _TEXT, intermediate_size=2048, num_key_value_heads=2, vocab_size=16032, **_DECODER),
    _small("qwen3", "Qwen3", _TEXT, intermediate_size=1536, num_key_value_heads=4, vocab_size=18992, **_DECODER),
    _small(
        "gemma2", "Gemma 2", _TEXT, intermediate_size=2048, num_key_value_heads=4, query_pre_attn_scalar=64,
        vocab_size=32000, **_DECODER,
    ),
    _small("gpt2", "GPT-2", Shape(4, 256), n_embd=384, n_layer=4, n_head=6, vocab_size=6283),
    _small("bert", "BERT", Shape(4, 256), vocab_size=3815, **_ENCODER),
    _small("vit", "ViT", Shape(4, 224), **_ENCODER),
)  # fmt: skip
"""A quarter to a half of the published widths, an eighth of the tokens, 4 layers: large enough for times on a CPU to
mean something, and small enough for all of them to take minutes."""


def find_model(name: str) -> Model:
    """The model of that name. Raises UserError naming those that exist."""
    return named("model", name, {model.name: model for model in (*MODELS, *SMALL)})
