"""A tiny model of every family that the decoder computes, with what is special about it switched on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

COMMON: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": None,
}  # fmt: skip
SIZES = {**COMMON, "head_dim": 16}
MIXED = ["full_attention", "sliding_attention", "sliding_attention"]
ROPE = {"rope_theta": 10000.0, "rope_type": "default"}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SIZES),
    "llama_biased_tied": ("Llama", {**SIZES, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama3_rope": ("Llama", {**SIZES, "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64}}),
    "llama_yarn": ("Llama", {**SIZES, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}}),
    "mistral": ("Mistral", {**SIZES, "sliding_window": 8}),
    "mistral_full": ("Mistral", {**SIZES, "sliding_window": None}),
    "qwen2": ("Qwen2", COMMON),
    "qwen2_mixed": ("Qwen2", {
        **COMMON, "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3", SIZES),
    "gemma": ("Gemma", {**SIZES, "num_key_value_heads": 1}),
    "gemma2": ("Gemma2", {
        **SIZES, "num_hidden_layers": 3, "layer_types": MIXED, "sliding_window": 4, "query_pre_attn_scalar": 12,
        "attn_logit_softcapping": 0.5, "final_logit_softcapping": 1.5, "tie_word_embeddings": False,
        "attn_implementation": "eager"}),  # transformers before 5.24 chooses one that leaves the cap of scores out
    "gemma3": ("Gemma3", {
        **SIZES, "num_hidden_layers": 3, "layer_types": MIXED, "sliding_window": 4, "query_pre_attn_scalar": 12,
        "tie_word_embeddings": False,
        "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
                            "sliding_attention": ROPE}}),
    "phi3": ("Phi3", {**COMMON, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}, "sliding_window": 9}),
    "olmo2": ("Olmo2", COMMON),
    "smollm3": ("SmolLM3", {**COMMON, "num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}),
}  # fmt: skip


def prompt(lengths: list[int], vocabulary: int = 96, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens of rows of these lengths, padded at the left with 0, and their mask."""
    generator, width = torch.Generator().manual_seed(seed), max(lengths)
    ids = torch.randint(1, vocabulary, (len(lengths), width), generator=generator)
    mask = torch.stack([torch.arange(width) >= width - length for length in lengths]).long()
    return ids * mask, mask


def stock(
    model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None, new: int = 30, **options: Any
) -> torch.Tensor:
    """Greedy tokens of transformers, unless options say otherwise."""
    return model.generate(ids, attention_mask=mask, max_new_tokens=new, **{"do_sample": False, **options})


def make(family: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Any:
    """A model with random weights, large enough that its parts matter, in evaluation."""
    name, sizes = FAMILIES[family]
    text = "Text" if name == "Gemma3" else ""
    config = getattr(transformers, f"{name}{text}Config")(**{**sizes, **changes})
    torch.manual_seed(seed)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.2 if "embed" in path or "lm_head" in path else 0.3)
            elif "bias" in path:
                parameter.normal_(0.0, 0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model.to(dtype)


class Recorder:
    """A streamer that keeps what it gets."""

    def __init__(self):
        self.got = []

    def put(self, value):
        self.got.append(value.tolist())

    def end(self):
        self.got.append("end")
