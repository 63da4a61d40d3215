"""Models of transformers with fused layers: checkpointing, cross-attention, patches beside."""

import copy

import pytest
import torch

from kernel_pytorch.qkv_fusion import LinearGroup, fuse, fusion_report, patch, unfuse, unpatch

MODELS = {
    "BART": ("BartForConditionalGeneration", "BartConfig"),
    "SegFormer": ("SegformerForImageClassification", "SegformerConfig"),
    "BERT decoder": ("BertLMHeadModel", "BertConfig"),
}


def cross(name):
    """A small model with cross-attention, its inputs, and how many groups can be one product."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    ids, heads = torch.randint(3, 64, (2, 7)), {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    layers = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    options, inputs, count = {
        "BART": (
            {"d_model": 32, **heads, **layers, "vocab_size": 64, "max_position_embeddings": 32, "dropout": 0.0},
            {"input_ids": ids, "decoder_input_ids": ids[:, :5]}, 2,
        ),
        "SegFormer": (
            {"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [16, 32],
             "patch_sizes": [7, 3], "strides": [4, 2], "num_attention_heads": [2, 4], "mlp_ratios": [2, 2],
             "drop_path_rate": 0.0, "classifier_dropout_prob": 0.0, **none},
            {"pixel_values": torch.randn(2, 3, 32, 32)}, 1,
        ),
        "BERT decoder": (
            {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
             "vocab_size": 64, "is_decoder": True, "add_cross_attention": True, **none},
            {"input_ids": ids, "encoder_hidden_states": torch.randn(2, 5, 32)}, 2,
        ),
    }[name]  # fmt: skip
    model_class, config_class = MODELS[name]
    return getattr(transformers, model_class)(getattr(transformers, config_class)(**options)), inputs, count


@pytest.mark.parametrize("use_reentrant", [None, False, True])
@pytest.mark.parametrize("name", MODELS)
def test_checkpointed_models_with_cross_attention_have_the_gradients_of_stock(name, use_reentrant):
    stock, inputs, count = cross(name)
    fused = fuse(copy.deepcopy(stock))
    assert sum(isinstance(each, LinearGroup) for each in fused.modules()) == count
    found = []
    for each in (stock.train(), fused.train()):
        if use_reentrant is not None and each.supports_gradient_checkpointing:
            enable = getattr(each, "activation_checkpointing_enable", None) or each.gradient_checkpointing_enable
            enable({"use_reentrant": use_reentrant})
            each.get_input_embeddings().requires_grad_() if name != "SegFormer" else None
        each(**inputs).logits.square().mean().backward()
        for parameter in each.parameters():
            parameter.data = parameter.grad  # so that names and rows are those of stock
        found.append(unfuse(each).state_dict())
    assert found[0].keys() == found[1].keys()
    for key, gradient in found[0].items():
        torch.testing.assert_close(found[1][key], gradient, rtol=1e-4, atol=1e-6, msg=key)


def test_a_model_of_transformers_that_is_fused_and_patched(monkeypatch):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, vocab_size=64
    )
    torch.manual_seed(0)
    stock = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(64, (2, 9))
    for steps in ((fuse, patch), (patch, fuse)):
        ours = copy.deepcopy(stock)
        [step(ours) for step in steps]
        assert len(patch(ours).replaced) == 1
        assert len(fusion_report(ours).replaced) == 2
        torch.testing.assert_close(ours(ids).logits, stock(ids).logits)
        unpatch(unfuse(ours))
        assert torch.equal(ours(ids).logits, stock(ids).logits)
