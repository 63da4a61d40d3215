"""Small configurations of Hugging Face's architectures: two layers, random weights, no dropout, a batch with labels."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

WORDS, TOKENS = 99, 10
WIDTHS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT = {"vocab_size": WORDS, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = {**WIDTHS, **TEXT, "num_key_value_heads": 2, "head_dim": 8, "use_cache": False}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
ENCODER = {**WIDTHS, **TEXT}
IMAGE = {**WIDTHS, "image_size": 16, "patch_size": 4}
DISTIL = {"dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "use_cache": False}
BOTH = {
    **TEXT,
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "decoder_start_token_id": 2,
    "use_cache": False,
}  # fmt: skip
DROPOUTS = ("attention_probs_dropout_prob", "encoder_layerdrop", "decoder_layerdrop", "layerdrop", "drop_path_rate")
"""Options that drop something and do not have "dropout" or "pdrop" in their names."""


@dataclass(frozen=True)
class Architecture:
    """A class of transformers in small.

    Attributes:
        name: as in reports and in replaced.json.
        model: name of the model's class.
        options: of the configuration.
        config: name of the configuration's class; "" for the one that the model names.
        batch: makes what goes into the model, but for the labels of texts.
    """

    name: str
    model: str
    options: dict[str, Any]
    config: str = ""
    batch: Callable[[], dict[str, torch.Tensor]] = field(default=lambda: texts())

    def build(self, **more: Any) -> Any:
        """The model in training mode, float32, the same weights each time."""
        kind = getattr(transformers, self.model)
        config = (getattr(transformers, self.config) if self.config else kind.config_class)(**self.options, **more)
        for part in (config, *(getattr(config, name) for name in config.sub_configs)):
            for name in vars(part):
                drops = "dropout" in name or name.endswith("pdrop") or name in DROPOUTS
                if drops and getattr(part, name) is not None:
                    setattr(part, name, type(getattr(part, name))(0))
        torch.manual_seed(0)
        model = kind(config)
        with torch.no_grad():
            for parameter in model.parameters():  # no gain is 1, no bias is 0: neither may be forgotten
                if parameter.dim() < 2:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
        return model.train()

    def inputs(self) -> dict[str, torch.Tensor]:
        """A batch, the same each time."""
        torch.manual_seed(1)
        return self.batch()

    def takes(self, name: str) -> bool:
        """Whether the model's forward has an argument of that name."""
        return name in inspect.signature(getattr(transformers, self.model).forward).parameters


def words(tokens: int = TOKENS) -> torch.Tensor:
    """Two sequences."""
    return torch.randint(3, WORDS, (2, tokens))


def texts() -> dict[str, torch.Tensor]:
    """Sequences, of which the second is shorter, and labels of which some do not count."""
    ids, mask = words(), torch.ones(2, TOKENS, dtype=torch.long)
    mask[1, -3:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def pairs() -> dict[str, torch.Tensor]:
    """Texts, and others that they become."""
    return {**texts(), "labels": words(7)}


def crossing() -> dict[str, torch.Tensor]:
    """Texts, and the hidden states of an encoder that they look at."""
    return {**texts(), "encoder_hidden_states": torch.randn(2, 6, 32)}


def images(labels: tuple[int, ...] = (2,), size: int = 16) -> dict[str, torch.Tensor]:
    """Two images with classes, or a class for each pixel."""
    return {"pixel_values": torch.randn(2, 3, size, size), "labels": torch.randint(0, 2, labels)}


def images_with_texts() -> dict[str, Any]:
    """For contrastive losses."""
    return {"pixel_values": torch.randn(2, 3, 16, 16), "input_ids": words(), "return_loss": True}


def waves() -> dict[str, torch.Tensor]:
    """Sound, and what was said."""
    return {"input_values": torch.randn(2, 400), "labels": torch.randint(1, 20, (2, 3))}


def spectra(channels: int, frames: int, *, channels_first: bool) -> dict[str, torch.Tensor]:
    """Sound as frequencies, and what was said."""
    features = torch.randn(2, channels, frames)
    return {"input_features": features if channels_first else features.mT.contiguous(), "labels": words(7)}


def _causal(name: str, *, model: str = "", config: str = "", **options: Any) -> Architecture:
    return Architecture(name, f"{model or name}ForCausalLM", {**DECODER, **options}, config)


def _masked(name: str, **options: Any) -> Architecture:
    return Architecture(name, f"{name}ForMaskedLM", {**ENCODER, **options})


def _seq2seq(name: str, **options: Any) -> Architecture:
    return Architecture(name, f"{name}ForConditionalGeneration", {**BOTH, **options}, batch=pairs)


DECODERS = (
    _causal("Llama"),
    _causal("Mistral"),
    _causal("Mixtral", num_local_experts=4),
    _causal("Qwen2"),
    _causal("Qwen3"),
    _causal("Qwen3Moe", **EXPERTS),
    _causal("Gemma"),
    _causal("Gemma2", query_pre_attn_scalar=8, sliding_window=4),
    _causal("Gemma3", config="Gemma3TextConfig", sliding_window=4),
    _causal(
        "Gemma3n", config="Gemma3nTextConfig", num_hidden_layers=4, num_kv_shared_layers=2, sliding_window=4,
        laurel_rank=4, altup_num_inputs=2, hidden_size_per_layer_input=8, vocab_size_per_layer_input=WORDS,
        activation_sparsity_pattern=[0.0] * 4, intermediate_size=[64] * 4,
        layer_types=["sliding_attention", "full_attention"] * 2,
    ),
    _causal("Phi"),
    _causal("Phi3"),
    _causal("Olmo"),
    _causal("Olmo2"),
    _causal("GPTNeoX"),
    Architecture("GPT2", "GPT2LMHeadModel", {**TEXT, **GPT}),
    Architecture("GPTJ", "GPTJForCausalLM", {**TEXT, **GPT, "rotary_dim": 4}),
    Architecture("Falcon", "FalconForCausalLM", {**WIDTHS, **TEXT, "use_cache": False}),
    _causal("Granite"),
    _causal("SmolLM3", no_rope_layers=[1, 0]),
    _causal("Starcoder2"),
    _causal("Cohere"),
    _causal(
        "DeepseekV3", q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
        n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=16,
        first_k_dense_replace=1, num_key_value_heads=4,
    ),
    _causal("SeedOss"),
    _causal("Llama4", config="Llama4TextConfig", num_local_experts=2, intermediate_size_mlp=64),
    _causal("OPT", ffn_dim=64, word_embed_proj_dim=32),
    _causal("Bloom", n_head=4, n_layer=2),
    _causal("Mpt", d_model=32, n_heads=4, n_layers=2, max_seq_len=64, expansion_ratio=2),
    _causal("StableLm"),
)  # fmt: skip
ENCODERS = (
    _masked("Bert"),
    _masked("Roberta"),
    _masked("DistilBert", **DISTIL),
    _masked("DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    _masked("Electra", embedding_size=32),
    _masked("Albert", embedding_size=16),
    _masked("ModernBert", sep_token_id=2, cls_token_id=1),
    _masked("XLMRoberta"),
    Architecture("ViT", "ViTForImageClassification", IMAGE, batch=images),
    Architecture("DeiT", "DeiTForImageClassification", IMAGE, batch=images),
    Architecture(
        "CLIP", "CLIPModel", {"text_config": ENCODER, "vision_config": IMAGE, "projection_dim": 16},
        batch=images_with_texts,
    ),
    Architecture("Siglip", "SiglipModel", {"text_config": ENCODER, "vision_config": IMAGE}, batch=images_with_texts),
    Architecture(
        "Segformer", "SegformerForSemanticSegmentation",
        {
            "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [16, 32],
            "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [2, 4], "mlp_ratios": [2, 2],
            "decoder_hidden_size": 16, "num_labels": 2,
        },
        batch=lambda: images((2, 32, 32), 32),
    ),
    Architecture(
        "Swin", "SwinForImageClassification",
        {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4], "window_size": 4},
        batch=lambda: images(size=32),
    ),
    Architecture(
        "Wav2Vec2", "Wav2Vec2ForCTC",
        {
            **WIDTHS, "vocab_size": 32, "conv_dim": [16, 16], "conv_stride": [5, 4], "conv_kernel": [10, 4],
            "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False,
            "ctc_loss_reduction": "mean",
        },
        batch=waves,
    ),
)  # fmt: skip
SEQ2SEQ = (
    _seq2seq("T5", d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0),
    _seq2seq("Bart", forced_eos_token_id=2),
    _seq2seq("MBart"),
    Architecture("Marian", "MarianMTModel", {**BOTH, "decoder_vocab_size": WORDS}, batch=pairs),
    _seq2seq("Pegasus"),
    _seq2seq("Blenderbot"),
    _seq2seq("M2M100"),
    _seq2seq("PLBart"),
    Architecture(
        "ProphetNet", "ProphetNetForConditionalGeneration",
        {
            **TEXT, "hidden_size": 32, "num_encoder_layers": 2, "num_decoder_layers": 2, "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64, "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4, "ngram": 2,
            "num_buckets": 8, "relative_max_distance": 16, "decoder_start_token_id": 2, "use_cache": False,
        },
        batch=pairs,
    ),
    Architecture(
        "Whisper", "WhisperForConditionalGeneration",
        {**BOTH, "num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 32},
        batch=lambda: spectra(8, 24, channels_first=True),
    ),
    Architecture(
        "Speech2Text", "Speech2TextForConditionalGeneration",
        {**BOTH, "input_feat_per_channel": 8, "conv_channels": 16, "max_source_positions": 64},
        batch=lambda: spectra(8, 24, channels_first=False),
    ),
    Architecture(
        "BertDecoder", "BertLMHeadModel", {**ENCODER, "is_decoder": True, "add_cross_attention": True}, batch=crossing
    ),
)  # fmt: skip
ARCHITECTURES = {each.name: each for each in (*DECODERS, *ENCODERS, *SEQ2SEQ)}
QUICK = {
    "Llama": "both", "Gemma2": "both", "Phi3": "patched", "GPTNeoX": "patched", "Mixtral": "both", "Bert": "both",
    "Segformer": "both", "Bart": "both",
}  # fmt: skip
"""Those of the ordinary suite, each a way in which models differ from Llama, and whether they can be fused too."""
