"""Blocks of published models, labelled by reading their sources, before a finder ran on them.

Each entry is a model of a library, from a small configuration with random weights and attention written out, and for
paths of its modules the patterns that the code there computes. What is not labelled in a block must not be found there.
"""

import torch

NORM, SUM = {"rms_norm"}, {"rms_norm", "residual_norm"}
ATTENTION, QKV, TURNED = {"attention"}, {"attention", "shared_linear"}, {"attention", "shared_linear", "rotary"}
GATED, AFTER_SUM, ACT, ACT_BY_HAND, LOSS = (
    {"gated_mlp", "shared_linear"},
    {"residual_norm"},
    {"bias_act"},
    {"activation"},
    {"loss"},
)
KINDS = {"rms_norm", "layer_norm", "residual_norm", "shared_linear", "attention", "gated_mlp", "bias_act", "activation",
         "rotary", "loss"}  # fmt: skip

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
WORDS = SIZES | {
    "vocab_size": 1000,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = WORDS | {"num_key_value_heads": 2}
HEADED = GROUPED | {"head_dim": 16}
IMAGE = SIZES | {"image_size": 32, "patch_size": 8}
BART = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "vocab_size": 1000, "max_position_embeddings": 64,
}  # fmt: skip


def llama_like(prefix="model.layers.1", **changes):
    found = {
        f"{prefix}.input_layernorm": SUM, f"{prefix}.self_attn": TURNED, f"{prefix}.post_attention_layernorm": SUM,
        f"{prefix}.mlp": GATED, "model.norm": SUM, "lm_head": LOSS,
    }  # fmt: skip
    return found | {f"{prefix}.{name}" if "." not in name else name: kinds for name, kinds in changes.items()}


def bert_like(prefix):
    layer = f"{prefix}.encoder.layer.1"
    return {
        f"{layer}.attention.self": QKV, f"{layer}.attention.output": AFTER_SUM, f"{layer}.intermediate": ACT,
        f"{layer}.output": AFTER_SUM,
    }  # fmt: skip


TRANSFORMERS = {
    "LlamaForCausalLM": (HEADED, llama_like()),
    "MistralForCausalLM": (HEADED, llama_like()),
    "Qwen2ForCausalLM": (GROUPED, llama_like()),
    "Qwen3ForCausalLM": (HEADED, llama_like(self_attn=TURNED | NORM)),
    "GraniteForCausalLM": (GROUPED, llama_like()),
    "GemmaForCausalLM": (HEADED, llama_like()),
    "Gemma2ForCausalLM": (HEADED, llama_like(post_attention_layernorm=NORM, pre_feedforward_layernorm=SUM,
                                            post_feedforward_layernorm=NORM)),
    "Olmo2ForCausalLM": (GROUPED, {
        "model.layers.1.self_attn": TURNED | NORM, "model.layers.1.post_attention_layernorm": NORM,
        "model.layers.1.mlp": GATED, "model.layers.1.post_feedforward_layernorm": NORM, "model.norm": SUM,
        "lm_head": LOSS,
    }),
    "Phi3ForCausalLM": (GROUPED, llama_like(self_attn={"attention", "rotary"}, mlp={"gated_mlp"})),
    "PhiForCausalLM": (WORDS | {"partial_rotary_factor": 0.5}, {
        "model.layers.1.self_attn": TURNED, "model.layers.1.mlp": ACT_BY_HAND, "lm_head": LOSS,
    }),
    "StableLmForCausalLM": (GROUPED | {"num_key_value_heads": 4, "partial_rotary_factor": 0.5}, {
        "model.layers.1.self_attn": TURNED, "model.layers.1.mlp": GATED,
        "model.layers.1.post_attention_layernorm": AFTER_SUM, "model.norm": AFTER_SUM,
    }),
    "CohereForCausalLM": (GROUPED, {
        "model.layers.1.input_layernorm": {"layer_norm", "residual_norm"}, "model.layers.1.self_attn": TURNED,
        "model.layers.1.mlp": {"gated_mlp"}, "lm_head": LOSS,
    }),
    "Starcoder2ForCausalLM": (GROUPED, {
        "model.layers.1.self_attn": TURNED, "model.layers.1.mlp": ACT,
        "model.layers.1.post_attention_layernorm": AFTER_SUM,
    }),
    "GPTNeoXForCausalLM": (WORDS, {
        "gpt_neox.layers.1.attention": {"attention", "rotary"}, "gpt_neox.layers.1.mlp": ACT, "lm_head": LOSS,
        "gpt_neox.final_layer_norm": AFTER_SUM,
    }),
    "GPT2LMHeadModel": ({"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 1000}, {
        "transformer.h.1.attn": ATTENTION, "transformer.h.1.ln_2": AFTER_SUM, "transformer.h.1.mlp": ACT_BY_HAND,
        "transformer.ln_f": AFTER_SUM, "lm_head": LOSS,
    }),
    "BloomForCausalLM": ({"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 1000}, {
        "transformer.h.1.self_attention": ATTENTION, "transformer.h.1.post_attention_layernorm": AFTER_SUM,
        "transformer.h.1.mlp": ACT_BY_HAND, "transformer.ln_f": AFTER_SUM,
    }),
    "OPTForCausalLM": (WORDS | {"ffn_dim": 128, "word_embed_proj_dim": 64}, {
        "model.decoder.layers.1.self_attn": QKV, "model.decoder.layers.1.activation_fn": ACT,
        "model.decoder.layers.1.final_layer_norm": AFTER_SUM, "model.decoder.final_layer_norm": AFTER_SUM,
    }),
    "BertForMaskedLM": (WORDS, bert_like("bert") | {"cls.predictions.transform": ACT, "cls.predictions.decoder": LOSS}),
    "RobertaForMaskedLM": (WORDS, bert_like("roberta")),
    "ElectraForMaskedLM": (WORDS | {"embedding_size": 64}, bert_like("electra")),
    "MPNetForMaskedLM": (WORDS, {
        "mpnet.encoder.layer.1.attention.attn": QKV, "mpnet.encoder.layer.1.attention.LayerNorm": AFTER_SUM,
        "mpnet.encoder.layer.1.intermediate": ACT, "mpnet.encoder.layer.1.output": AFTER_SUM,
    }),
    "DistilBertForMaskedLM": ({"dim": 64, "hidden_dim": 128, "n_layers": 2, "n_heads": 4, "vocab_size": 1000}, {
        "distilbert.transformer.layer.1.attention": QKV, "distilbert.transformer.layer.1.sa_layer_norm": AFTER_SUM,
        "distilbert.transformer.layer.1.ffn": ACT, "distilbert.transformer.layer.1.output_layer_norm": AFTER_SUM,
    }),
    "ModernBertForMaskedLM": (WORDS, {
        "model.layers.1.attn": {"attention", "rotary"}, "model.layers.1.mlp": {"gated_mlp"},
        "model.layers.1.mlp_norm": AFTER_SUM, "model.final_norm": AFTER_SUM,
    }),
    "T5ForConditionalGeneration": ({"d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 2, "num_heads": 4,
                                    "vocab_size": 1000, "decoder_start_token_id": 0, "pad_token_id": 0}, {
        "encoder.block.1.layer.0.SelfAttention": QKV, "encoder.block.1.layer.0.layer_norm": SUM,
        "encoder.block.1.layer.1.DenseReluDense": set(), "decoder.block.1.layer.1.layer_norm": SUM, "lm_head": LOSS,
    }),
    "BartForConditionalGeneration": (BART | {"decoder_start_token_id": 2}, {
        "model.encoder.layers.1.self_attn": QKV, "model.encoder.layers.1.self_attn_layer_norm": AFTER_SUM,
        "model.encoder.layers.1.final_layer_norm": AFTER_SUM, "model.decoder.layers.1.self_attn": QKV,
        "model.encoder.layers.1.activation_fn": ACT,
    }),
    "ViTModel": (IMAGE, {
        "layers.1.attention": QKV, "layers.1.mlp": ACT, "layers.1.layernorm_after": AFTER_SUM, "layernorm": AFTER_SUM,
    }),
    "CLIPVisionModel": (IMAGE, {
        "encoder.layers.1.self_attn": QKV, "encoder.layers.1.mlp": ACT_BY_HAND,
        "encoder.layers.1.layer_norm2": AFTER_SUM,
    }),
    "SiglipVisionModel": (IMAGE, {
        "encoder.layers.1.self_attn": QKV, "encoder.layers.1.mlp": ACT, "encoder.layers.1.layer_norm2": AFTER_SUM,
    }),
    "ConvNextModel": ({"num_stages": 2, "hidden_sizes": [16, 32], "depths": [1, 1], "image_size": 32}, {
        "encoder.stages.0.layers.0": ACT, "encoder.stages.1.layers.0": ACT,
    }),
}  # fmt: skip

MISSED = {}
"""What is labelled and not found, with the reason; by (model, path)."""


def build(library, name, config):
    """A model and its inputs by name."""
    torch.manual_seed(0)
    cls = getattr(library, name)
    model = cls(cls.config_class(**config, attn_implementation="eager")).eval()
    spread_parameters(model)
    if "image_size" in config:
        return model, {"pixel_values": torch.randn(2, 3, 32, 32)}
    ids = torch.randint(3, 1000, (2, 16))
    return model, {"input_ids": ids, "labels": ids}


def spread_parameters(model):
    """Draw all parameters: some are zeros or ones, with which too much holds by chance."""
    for p in model.parameters():
        torch.nn.init.normal_(p, 0.02 if p.dim() > 1 else 1.0, 0.1)
