"""A Llama of transformers, loaded: logits, gradients and texts are those of transformers' own model."""

import copy
import types

import pytest
import torch

from kernel_pytorch.models import LanguageModel

transformers = pytest.importorskip("transformers")

ROTATIONS = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}  # fmt: skip
NO_DEPARTURE = {"rtol": 1e-4, "atol": 1e-5}


def llama(rotation="llama3", **options):
    sizes = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6}
    sizes |= {"vocab_size": 97, "num_key_value_heads": 2, "max_position_embeddings": 256}
    # transformers completes the dict that it is given.
    config = transformers.LlamaConfig(**sizes | options, rope_parameters=dict(ROTATIONS[rotation]))
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def tokens(*shape):
    return torch.randint(97, shape, generator=torch.Generator().manual_seed(1))


def with_float64(stock):
    """The model without what transformers computes in float32 whatever the dtype: norms, and our frequencies."""
    for name, module in list(stock.named_modules()):
        if type(module).__name__ == "LlamaRMSNorm":
            norm = torch.nn.RMSNorm(module.weight.shape, eps=module.variance_epsilon)
            norm.weight = module.weight
            stock.set_submodule(name, norm)
    return stock.double()


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("techniques", [(), None])
def test_logits_far_beyond_the_original_context(rotation, techniques):
    stock, ids = llama(rotation), tokens(2, 200)
    ours = LanguageModel.from_llama(stock, techniques=techniques)
    torch.testing.assert_close(ours(ids), stock(ids).logits, **NO_DEPARTURE)


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("tied", [False, True])
def test_logits_and_gradients_in_float64(rotation, tied):
    stock, ids = with_float64(llama(rotation, tie_word_embeddings=tied)), tokens(2, 60)
    ours = LanguageModel.from_llama(stock)
    frequencies = stock.model.rotary_emb.inv_freq
    torch.testing.assert_close(ours.rotary.frequencies, frequencies.float(), rtol=1e-6, atol=0)
    stock.model.rotary_emb.inv_freq = ours.rotary.frequencies
    torch.testing.assert_close(ours(ids), stock(ids).logits, rtol=1e-9, atol=1e-9)
    loss = ours(ids[:, :-1], targets=ids[:, 1:])
    expected = stock(ids, labels=ids).loss
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0, check_dtype=False)  # theirs is of float32 logits
    loss.backward()
    expected.backward()
    torch.testing.assert_close(ours.embedding.weight.grad, stock.model.embed_tokens.weight.grad, rtol=1e-5, atol=1e-7)
    layer = stock.model.layers[1].self_attn
    theirs = torch.cat([projection.weight.grad for projection in (layer.q_proj, layer.k_proj, layer.v_proj)])
    torch.testing.assert_close(ours.blocks[1].attention.qkv.weight.grad, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("techniques", [(), None])
def test_greedy_texts_are_those_of_transformers(techniques):
    stock, ids = llama(), tokens(3, 20)
    ours = LanguageModel.from_llama(stock, techniques=techniques)
    mask = torch.ones_like(ids)
    how = {"attention_mask": mask, "max_new_tokens": 40, "do_sample": False}
    free = stock.generate(ids, **how, eos_token_id=None, pad_token_id=0)
    assert torch.equal(ours.generate(ids, 40, temperature=0.0), free)
    end = free[0, 30].item()
    stopped = stock.generate(ids, **how, eos_token_id=end, pad_token_id=end)
    found = ours.generate(ids, 40, temperature=0.0, eos=end)
    assert torch.equal(found[:, : stopped.shape[1]], stopped)


def test_names_of_version_4():
    for name, rotation in ROTATIONS.items():
        stock, ids = llama(name), tokens(1, 50)
        given = {k: v for k, v in stock.config.to_dict().items() if k not in ("rope_parameters", "rope_theta")}
        scaling = {k: v for k, v in rotation.items() if k != "rope_theta"}
        given["rope_theta"] = rotation["rope_theta"]
        for key in ("rope_type", "type"):  # both were in use
            kind = scaling.pop("rope_type", None) or scaling.pop("type")
            scaling[key] = kind
            given["rope_scaling"] = None if name == "default" else scaling
            for config in (given, types.SimpleNamespace(**given)):
                ours = LanguageModel.from_llama(config, stock.state_dict())
                torch.testing.assert_close(ours(ids), stock(ids).logits, **NO_DEPARTURE)


def test_biases_heads_of_another_size_and_another_activation():
    stock, ids = llama(attention_bias=True, head_dim=12, hidden_act="gelu_pytorch_tanh"), tokens(1, 9)
    torch.testing.assert_close(LanguageModel.from_llama(stock)(ids), stock(ids).logits, **NO_DEPARTURE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_dtype_is_that_of_the_tensors_and_nothing_is_shared(dtype):
    stock = llama().to(dtype)
    ours = LanguageModel.from_llama(stock)
    assert {p.dtype for p in ours.parameters()} == {dtype}
    assert ours.rotary.frequencies.dtype == torch.float32
    before = copy.deepcopy(ours.state_dict())
    with torch.no_grad():
        for parameter in stock.parameters():
            parameter.zero_()
    torch.testing.assert_close(ours.state_dict(), before)


def test_tied_checkpoints_with_and_without_a_head():
    stock, ids = llama(tie_word_embeddings=True), tokens(1, 9)
    state = dict(stock.state_dict())
    for head in (None, state["model.embed_tokens.weight"].clone()):
        state.pop("lm_head.weight", None)
        if head is not None:
            state["lm_head.weight"] = head
        ours = LanguageModel.from_llama(stock.config, state)
        torch.testing.assert_close(ours(ids), stock(ids).logits, **NO_DEPARTURE)
        assert ours.head is None
    state["lm_head.weight"] = head + 1e-3
    with pytest.raises(ValueError, match=r"it differs from model.embed_tokens.weight, which"):
        LanguageModel.from_llama(stock.config, state)


def test_missing_unknown_and_wrong_tensors_are_named():
    stock = llama()
    state = dict(stock.state_dict())
    del state["lm_head.weight"], state["model.layers.1.self_attn.k_proj.weight"]
    state["model.layers.2.mlp.up_proj.weight"] = torch.zeros(1)
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(1)  # old files have it
    with pytest.raises(ValueError) as raised:
        LanguageModel.from_llama(stock.config, state)
    assert str(raised.value) == (
        "state_dict: missing are lm_head.weight, model.layers.1.self_attn.k_proj.weight; "
        "unknown are model.layers.2.mlp.up_proj.weight"
    )
    state = dict(stock.state_dict()) | {"model.norm.weight": torch.zeros(47)}
    with pytest.raises(ValueError, match=r"(?s)state_dict:.*size mismatch for norm.weight.*47.*48"):
        LanguageModel.from_llama(stock.config, state)
    with pytest.raises(TypeError, match="state_dict: given None; with a configuration"):
        LanguageModel.from_llama(stock.config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type is 'yarn'; allowed are default, linear"),
        ({"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type is 'dynamic'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5; it must be 1.0"),
        ({"mlp_bias": True}, "mlp_bias is True; it must be False"),
        ({"hidden_act": "mish"}, "hidden_act is 'mish'; allowed are silu"),
        ({"model_type": "gemma"}, "model_type is 'gemma'; it must be 'llama'"),
    ],
)
def test_what_is_not_computed_here_is_refused_by_name(changes, message):
    stock = llama()
    with pytest.raises(ValueError, match=f"config: {message}"):
        LanguageModel.from_llama(stock.config.to_dict() | changes, stock.state_dict())


def test_what_is_no_model_of_transformers_is_refused():
    with pytest.raises(TypeError, match=r"source: given Linear; it must be a model of transformers"):
        LanguageModel.from_llama(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"source: given 'x'; it must be a model of transformers"):
        LanguageModel.from_llama("x")
