"""Counts in models of transformers, from small configurations with random weights."""

import collections

import pytest
import torch

from kernel_pytorch.compile_recipes import optimize
from kernel_pytorch.compile_recipes.finders import find
from kernel_pytorch.compile_recipes.recorder import record

transformers = pytest.importorskip("transformers")
WIDTH = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
WORDS = {"vocab_size": 1000}
LLAMA = WIDTH | WORDS | {"num_key_value_heads": 2, "head_dim": 16}
IMAGE = {"image_size": 32, "patch_size": 8}
EXPECTED = {
    # One norm before each half of a layer and one at the end; two of queries and keys in each layer of Qwen3.
    "Llama": ("LlamaForCausalLM", LLAMA, {"rms_norm": 5, "residual_norm": 4, "shared_linear": 4, "attention": 2,
              "gated_mlp": 2, "rotary": 4, "loss": 1}),
    "Qwen3": ("Qwen3ForCausalLM", LLAMA, {"rms_norm": 9, "residual_norm": 4, "shared_linear": 4, "attention": 2,
              "gated_mlp": 2, "rotary": 4, "loss": 1}),
    "Gemma2": ("Gemma2ForCausalLM", LLAMA, {"rms_norm": 9, "shared_linear": 4, "attention": 2, "gated_mlp": 2,
               "rotary": 4, "loss": 1}),
    "GPT2": ("GPT2LMHeadModel", {"n_embd": 64, "n_layer": 2, "n_head": 4} | WORDS,
             {"residual_norm": 4, "attention": 2, "activation": 2, "loss": 1}),
    "Bert": ("BertForMaskedLM", WIDTH | WORDS, {"residual_norm": 4, "shared_linear": 2, "attention": 2, "bias_act": 3,
             "loss": 1}),
    "ViT": ("ViTModel", WIDTH | IMAGE, {"residual_norm": 4, "shared_linear": 2, "attention": 2, "bias_act": 3}),
    "T5": ("T5ForConditionalGeneration", {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_layers": 2, "num_heads": 4,
           "decoder_start_token_id": 0, "pad_token_id": 0} | WORDS,
           {"rms_norm": 12, "attention": 6, "loss": 1}),
}  # fmt: skip


def model_and_inputs(name):
    cls, config, _ = EXPECTED[name]
    torch.manual_seed(0)
    model = getattr(transformers, cls)
    config = model.config_class(**config, attn_implementation="eager")
    model = model(config).eval()
    if name == "ViT":
        return model, {"pixel_values": torch.randn(2, 3, 32, 32)}
    ids = torch.randint(1, 1000, (2, 16))
    return model, {"input_ids": ids, "labels": ids} | ({} if name == "Bert" else {"use_cache": False})


@pytest.mark.parametrize("name", EXPECTED)
def test_every_pattern_of_a_model_is_found(name):
    model, kwargs = model_and_inputs(name)
    graph = record(model, (), kwargs)
    with torch.no_grad():
        counts = collections.Counter(f.kind for f in find(graph))
    expected = EXPECTED[name][2]
    assert {kind: counts[kind] for kind in expected} == expected
    assert graph.rerun < 6 * len(graph.nodes)  # a bound on the cost that no busy machine moves


def test_the_capped_attention_of_gemma_2_is_not_taken_for_plain_attention():
    """Its keys are small here, so that no score of the recorded run comes near the cap."""
    model, kwargs = model_and_inputs("Gemma2")
    found = [f.what for f in find(record(model, (), kwargs)) if f.kind == "attention"]
    assert found
    assert all("not proven" in what for what in found)


@pytest.mark.parametrize("name", ["Llama", "Bert"])
def test_flags_of_attention_stay_under_compile_and_come_back(name, monkeypatch):
    """With torch before 2.13, where transformers makes a mask of every flag that Dynamo traces."""
    pytest.importorskip("kernel_pytorch.flash_attn_triton")
    monkeypatch.setattr("transformers.masking_utils.is_torchdynamo_exporting", lambda: True)
    cls, config, _ = EXPECTED[name]
    cls = getattr(transformers, cls)
    one = cls.config_class(**{**config, "num_hidden_layers": 1})  # each trace of a layer takes a second
    model, ids = cls(one).eval(), torch.arange(1, 9)[None]

    def masks():
        found = []

        def look(graph, example_inputs):
            found.extend(n.kwargs.get("attn_mask") for n in graph.graph.nodes if "dot_product" in str(n.target))
            return graph

        torch._dynamo.reset()
        torch.compile(model, backend=look)(ids)
        return [mask is not None for mask in found]

    assert masks() == [True]
    result = optimize(model, ids, apply=["causal flag"], rounds=0)
    assert "causal flag" in result.applied
    assert masks() == [False]
    result.revert()
    assert masks() == [True]
