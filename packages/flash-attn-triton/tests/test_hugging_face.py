"""Gemma 2 of Hugging Face's transformers with `flash_attention` in the place of its own `eager` attention."""

import copy
import functools
import gc
import inspect
import pickle

import pytest
import torch

from kernel_pytorch.flash_attn_triton import hugging_face
from kernel_pytorch.flash_attn_triton.hugging_face import NAME
from kernel_pytorch.flash_attn_triton.replacements import patch, unpatch

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "max_position_embeddings": 128,
}  # fmt: skip
LAYERS = ["model.layers.0.self_attn", "model.layers.1.self_attn"]
WINDOW = 7  # of the first layer; sequences are longer


def gemma(attention="eager", **options):
    """Scores are large enough for the soft cap to matter."""
    torch.manual_seed(0)
    options = {"sliding_window": WINDOW, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 1, **options}
    config = transformers.Gemma2Config(**SIZES, **options)
    config._attn_implementation = attention
    model = transformers.Gemma2ForCausalLM(config)
    for name, weight in model.named_parameters():
        if "proj" in name:
            torch.nn.init.normal_(weight, std=0.3)
    return model.train()


def batch(padding=None):
    """Two sequences of 20; of the second one five are padding."""
    words = torch.randint(1, 61, (2, 20), generator=torch.Generator().manual_seed(1))
    seen = torch.ones_like(words)
    if padding is not None:
        seen[1, slice(0, 5) if padding == "left" else slice(15, 20)] = 0
    return {"input_ids": words, "attention_mask": seen}


def logits_and_gradients(model, inputs):
    """Of the words that are no padding."""
    logits = model(**inputs, use_cache=False).logits[inputs["attention_mask"].bool()]
    names, weights = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(logits.float().square().mean(), weights, allow_unused=True)
    return {"logits": logits.detach(), **dict(zip(names, gradients, strict=True))}


def patched(model, level=None, **planted):
    """With every call at a level, and arguments that are planted."""
    ours = copy.deepcopy(model)
    patch(ours)
    replaced = functools.partial(hugging_face.attention, level=level, **planted)

    def attention(*arguments, **keywords):
        return replaced(*arguments, **{**keywords, **planted})

    transformers.AttentionInterface.register(NAME, attention)
    return ours


def assert_same(ours, model, inputs, tolerance=1e-4):
    found, expected = logits_and_gradients(ours, inputs), logits_and_gradients(model, inputs)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance * value.abs().max(), msg=name)


@pytest.mark.parametrize("padding", [None, "left", "right"])
@pytest.mark.parametrize("level", [None, "reference", "triton"])
def test_logits_and_gradients_are_those_of_eager(level, padding):
    if level == "triton":
        pytest.importorskip("triton")
    model = gemma()
    assert_same(patched(model, level), model, batch(padding))


@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("planted", [{"softcap": None}, {"softcap": 2.2}, {"scaling": 1.1}])
def test_a_plant_is_found(planted, padding):
    model = gemma()
    with pytest.raises(AssertionError):
        assert_same(patched(model, "reference", **planted), model, batch(padding))


def test_without_the_window_another_result_is_found():
    model = gemma()
    with pytest.raises(AssertionError):
        assert_same(patched(model, "reference", sliding_window=None), model, batch())


def test_only_padding_and_caches_make_a_mask(monkeypatch):
    """Causal and the window are given as such: a matrix of all scores is what this is to avoid."""
    given = []
    ours = patched(gemma(), "reference")
    original = hugging_face.flash_attention_masked
    monkeypatch.setattr(hugging_face, "flash_attention_masked", lambda *a, **k: given.append(1) or original(*a, **k))
    ours(**batch(), use_cache=False)
    assert not given
    ours(**batch("left"), use_cache=False)
    assert len(given) == len(LAYERS)


def test_packed_sequences_do_not_see_each_other():
    """transformers finds them in the positions."""
    model, positions = gemma(), torch.cat((torch.arange(9), torch.arange(11))).expand(2, -1)
    words = batch()["input_ids"]
    ours = patched(model, "reference")
    found, expected = (each(input_ids=words, position_ids=positions, use_cache=False).logits for each in (ours, model))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("level", [None, "reference"])
@pytest.mark.parametrize("called", [{}, {"is_causal": False}])
@pytest.mark.parametrize("configured", [{}, {"use_bidirectional_attention": True}])
def test_which_way_it_looks_is_as_eager_has_it(configured, called, level):
    """transformers says it in the configuration, as PaliGemma 2 does, in the call, and by a module's `is_causal`."""
    model, words = gemma(**configured).eval(), batch()["input_ids"]
    model.model.layers[1].self_attn.is_causal = False
    ours = patched(model, level)
    found, expected = (each(input_ids=words, use_cache=False, **called).logits for each in (ours, model))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cache", ["static", "dynamic"])
@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("level", [None, "reference"])
def test_the_same_words_are_generated(level, padding, cache):
    model, inputs = gemma().eval(), batch(padding)
    options = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False, "cache_implementation": cache}
    options |= {"disable_compile": True}
    assert torch.equal(patched(model, level).generate(**inputs, **options), model.generate(**inputs, **options))


def test_where_triton_does_not_run_the_class_s_own_attention_computes(monkeypatch):
    model, inputs = gemma(), batch()
    monkeypatch.setattr(hugging_face.LADDER, "chosen", lambda *arguments, **keywords: "reference")
    monkeypatch.setattr(hugging_face, "flash_attention", None)
    ours = patched(model)
    expected = logits_and_gradients(model, inputs)
    for name, value in logits_and_gradients(ours, inputs).items():
        assert torch.equal(value, expected[name]), name


def test_weights_that_are_wanted_and_dropout_are_left_to_the_class(monkeypatch):
    monkeypatch.setattr(hugging_face.LADDER, "chosen", lambda *arguments, **keywords: "triton")
    monkeypatch.setattr(hugging_face, "flash_attention", None)
    attentions = patched(gemma().eval())(**batch(), use_cache=False, output_attentions=True).attentions
    assert [weights.shape for weights in attentions] == [(2, 4, 20, 20)] * 2
    room = transformers.StaticCache(config=gemma().config, max_cache_len=32)
    name = "cache" if "cache" in inspect.signature(type(gemma()).forward).parameters else "past_key_values"
    attentions = patched(gemma().eval())(**batch(), **{name: room}, output_attentions=True).attentions
    assert attentions[1].shape == (2, 4, 20, 32)
    assert not attentions[1][..., 20:].any()
    model, inputs = gemma(attention_dropout=0.5), batch()
    ours = patched(model)
    outputs = [torch.manual_seed(3) and each(**inputs, use_cache=False).logits for each in (ours, model)]
    assert torch.equal(*outputs)


def test_autocast():
    model, inputs = gemma(), batch()
    ours = patched(model, "reference")
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = (each(**inputs, use_cache=False).logits for each in (ours, model))
    torch.testing.assert_close(found, expected, rtol=0.1, atol=0.1 * expected.abs().max().item())


def test_compiled_as_one_graph():
    model, inputs = gemma().eval(), batch()
    ours = copy.deepcopy(model)
    patch(ours)
    found = torch.compile(ours, fullgraph=True, backend="aot_eager")(**inputs, use_cache=False).logits
    torch.testing.assert_close(found, model(**inputs, use_cache=False).logits, rtol=1e-4, atol=1e-4)


def test_there_and_back():
    model = gemma()
    expected = logits_and_gradients(model, batch())
    assert patch(model).replaced == dict.fromkeys(LAYERS, "flash_attention")
    assert model.config._attn_implementation == NAME
    assert patch(model).replaced == dict.fromkeys(LAYERS, "flash-attn-triton, patched before")
    assert patch(pickle.loads(pickle.dumps(model))).replaced.keys() == set(LAYERS)
    unpatch(model)
    assert model.config._attn_implementation == "eager"
    for name, value in logits_and_gradients(model, batch()).items():
        assert torch.equal(value, expected[name]), name


def test_what_is_left_alone():
    """What would become another function, and with the reason what may not be expected."""
    model = gemma()
    model.config._attn_implementation = "sdpa"  # which transformers allowed once, and took by itself
    report = patch(torch.nn.ModuleDict({"gemma": model}))
    assert not report.replaced
    assert list(report.left) == ["gemma"]
    assert "'sdpa' leaves out the soft cap" in report.left["gemma"]
    assert model.config._attn_implementation == "sdpa"
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, attn_implementation="eager"))
    for other in (llama, gemma(attn_logit_softcapping=None)):
        report = patch(other)
        assert not report.replaced
        assert all(path.endswith(".self_attn") and "its class is" in why for path, why in report.left.items())
        assert report.left
        assert other.config._attn_implementation == "eager"


@pytest.mark.parametrize("way", ["output_attentions", "a configuration of its own"])
def test_what_transformers_would_compute_otherwise(way):
    model = gemma()
    if way == "output_attentions":
        model.config.output_attentions = True
    else:
        attention = model.model.layers[0].self_attn
        attention.config = copy.deepcopy(attention.config)
    report = patch(model)
    assert not report.replaced
    assert way in report.left[""]
    assert model.config._attn_implementation == "eager"


def sdpa_models():
    """By name: a model of transformers whose attention is PyTorch's, its inputs, and whether a flag says its mask."""
    causal = {k: v for k, v in SIZES.items() if k != "head_dim"} | {"num_hidden_layers": 1}  # tracing takes seconds
    words = {"input_ids": batch()["input_ids"]}
    encoder = {k: v for k, v in causal.items() if k != "num_key_value_heads"}
    packed = torch.cat((torch.arange(9), torch.arange(11))).expand(2, -1)
    llama = transformers.LlamaForCausalLM, transformers.LlamaConfig(**causal)
    yield "llama", *llama, words, True
    yield "padding", *llama, batch("right"), False
    yield "packed", *llama, {**words, "position_ids": packed, "use_cache": False}, False
    mistral = transformers.MistralForCausalLM, transformers.MistralConfig
    yield "long window", mistral[0], mistral[1](**causal, sliding_window=64), words, True
    yield "short window", mistral[0], mistral[1](**causal, sliding_window=WINDOW), words, False
    yield "bert", transformers.BertModel, transformers.BertConfig(**encoder), words, True


@pytest.mark.parametrize("case", list(sdpa_models()), ids=lambda case: case[0])
def test_flags_stay_flags_under_compile(case, monkeypatch):
    """With torch before 2.14, which lets transformers think that everything that Dynamo traces is exported."""
    name, build, config, inputs, is_flag = case
    model = build(config).eval()
    expected = model(**inputs)[0]
    assert any("keeps its causal flag" in why for why in patch(model).left.values())
    monkeypatch.setattr("transformers.masking_utils.is_torchdynamo_exporting", lambda: True, raising=False)
    masks = []

    def look(graph, example_inputs):
        found = [node for node in graph.graph.nodes if "scaled_dot_product_attention" in str(node.target)]
        masks.extend(node.kwargs.get("attn_mask") for node in found)
        return graph

    other = build(copy.deepcopy(config)).eval()  # has a configuration of its own, which was not patched
    other.load_state_dict(model.state_dict())
    # Each is traced for a second or two: copies of one model stand for those of all.
    copies = (copy.deepcopy(model), pickle.loads(pickle.dumps(model))) if name == "llama" else ()
    assert all(each.config is not model.config for each in copies)
    for each, has_flags in (model, is_flag), (other, False), *((each, is_flag) for each in copies):
        torch._dynamo.reset()
        masks.clear()
        torch.testing.assert_close(torch.compile(each, backend=look)(**inputs)[0], expected)
        assert [mask is None for mask in masks] == [has_flags]
    for each in (model, *copies):
        unpatch(each)
        assert not hasattr(hugging_face.KEPT, hugging_face._mark(each.config))
        assert not hasattr(each, hugging_face.ATTRIBUTE)


def bert():
    encoder = {k: v for k, v in SIZES.items() if k not in ("head_dim", "num_key_value_heads")}
    return transformers.BertModel(transformers.BertConfig(**encoder)).eval()


@pytest.mark.parametrize("patches", [False, True])
def test_patching_other_models_compiles_nothing_again(patches):
    """And so does their end: Dynamo guards on what is said of one configuration."""
    model, words, compiled = bert(), batch()["input_ids"], []
    patch(bert())
    if patches:
        patch(model)
    torch._dynamo.reset()
    call = torch.compile(model, backend=lambda graph, inputs: compiled.append(1) or graph)
    call(words)
    others = [bert() for _ in range(3)]
    for other in others:
        patch(other)
        call(words)
    others.clear()
    gc.collect()
    call(words)
    assert len(compiled) == 1


def test_masks_of_the_users_own_stay(monkeypatch):
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

    calls = []
    monkeypatch.setitem(
        ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "sdpa", lambda **given: calls.append(1) or sdpa_mask(**given)
    )
    model = bert()
    patch(model)
    for each in (model, bert()):
        calls.clear()
        torch._dynamo.reset()
        torch.compile(each, backend="eager")(batch()["input_ids"])
        assert calls


@pytest.mark.parametrize("config", [torch.ones(2), {}, None])
def test_a_config_of_another_kind_is_left_alone(config):
    model = torch.nn.Linear(2, 2)
    model.config = config
    assert patch(model).left == {}
    unpatch(model)


def test_a_configuration_that_was_patched_builds_another_model():
    model = patched(gemma())
    assert type(model)(model.config).config._attn_implementation == NAME
