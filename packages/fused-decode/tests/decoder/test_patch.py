"""`patch`: `generate` of transformers with the decoder's step, where its resolved arguments allow."""

import copy
import pickle

import pytest
import torch
import transformers
from tiny_models import Recorder, make, prompt, stock
from transformers import LogitsProcessorList, StoppingCriteriaList

from kernel_pytorch.fused_decode import Decoder, patch, replacements, report, unpatch


@pytest.fixture
def pair():
    """A model, and its patched copy."""
    model = make("gemma2")
    patched = copy.deepcopy(model)
    assert patch(patched).replaced == {"": "Decoder, in generate"}
    return model, patched


OURS = {
    "greedy": {},
    "end": {"eos_token_id": [3, 5, 7, 11, 13, 17, 19, 23, 29], "pad_token_id": 0},
    "static": {"cache_implementation": "static"},
    "values that do nothing": {"temperature": 1.0, "repetition_penalty": 1.0, "num_beams": 1, "use_cache": True},
    "max_length": {"max_length": 25, "max_new_tokens": None},
    "configuration": {"generation_config": transformers.GenerationConfig(max_new_tokens=12, do_sample=False)},
}


@pytest.mark.parametrize("name", OURS)
def test_calls_that_the_decoder_computes(pair, name):
    model, patched = pair
    ids, mask = prompt([4, 9])
    options = {"max_new_tokens": 30, "do_sample": False, **OURS[name]}
    if name == "configuration":
        options = OURS[name]
    given = patched.generate(ids, attention_mask=mask, **options)
    assert given.equal(model.generate(ids, attention_mask=mask, **options))
    assert (report(patched).decoded, report(patched).left.total()) == (1, 0)


class Nothing(transformers.LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores


class Never(transformers.StoppingCriteria):
    def __call__(self, input_ids, scores, **_):
        return torch.zeros(len(input_ids), dtype=torch.bool)


THEIRS = {
    "beams": ({"num_beams": 2}, "beam_search"),
    "penalty": ({"repetition_penalty": 1.5}, "RepetitionPenaltyLogitsProcessor"),
    "ngrams": ({"no_repeat_ngram_size": 2}, "NoRepeatNGram"),
    "min length": ({"min_new_tokens": 5, "eos_token_id": 3}, "MinNewTokens"),
    "bad words": ({"bad_words_ids": [[5]]}, "NoBadWords"),
    "suppressed": ({"suppress_tokens": [5]}, "SuppressTokens"),
    "time": ({"max_time": 100.0}, "MaxTimeCriteria"),
    "dictionary": ({"return_dict_in_generate": True}, "return_dict_in_generate is True"),
    "scores": ({"return_dict_in_generate": True, "output_scores": True}, "return_dict_in_generate is True"),
    "no cache": ({"use_cache": False}, "use_cache is False"),
    "prompt lookup": ({"prompt_lookup_num_tokens": 2, "rows": 1}, "assisted_generation"),
    "own processor": ({"logits_processor": LogitsProcessorList([Nothing()])}, "Nothing"),
    "own criterion": ({"stopping_criteria": StoppingCriteriaList([Never()])}, "Never"),
    "prefix": ({"prefix_allowed_tokens_fn": lambda *_: [*range(96)]}, "prefix_allowed_tokens_fn is given"),
    "embeddings": ({"inputs_embeds": True}, "inputs_embeds is given"),
    "chunks": ({"prefill_chunk_size": 4}, "prefill_chunk_size is 4"),
    "right padding": ({"attention_mask": torch.tensor([[1] * 9, [1] * 8 + [0]])}, "row 1 has zeros behind"),
    "own positions": ({"position_ids": torch.arange(9)[None] + 3}, "position_ids are others"),
    "too many rows": ({"rows": 17}, "17 rows"),
    "half a token": ({"max_new_tokens": 2.5}, "cannot be interpreted as an integer"),
}


@pytest.mark.parametrize("name", THEIRS)
@pytest.mark.filterwarnings("ignore")
def test_calls_that_are_left_to_transformers(pair, name):
    model, patched = pair
    options, reason = dict(THEIRS[name][0]), THEIRS[name][1]
    ids, mask = prompt([4, 9] if "rows" not in options else [9] * options.pop("rows"))
    options = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, **options}
    own = {"input_ids": ids}
    if "inputs_embeds" in options:
        own, options["inputs_embeds"] = {}, model.get_input_embeddings()(ids).detach()
    streamers = [Recorder(), Recorder()]
    for streamer in streamers if name in ("penalty", "own positions") else []:
        options["streamer"] = streamer
        (model if streamer is streamers[0] else patched).generate(**own, **options)
    assert streamers[0].got == streamers[1].got
    options.pop("streamer", None)
    expected, given = (each.generate(**own, **copy.deepcopy(options)) for each in (model, patched))
    if name in ("dictionary", "scores"):
        expected, given = expected.sequences, given.sequences
    assert given.equal(expected)
    assert report(patched).decoded == 0
    assert any(reason in each for each in report(patched).left), report(patched)


def test_the_same_refusals(pair):
    for model in pair:
        with pytest.raises(ValueError, match="not used by the model"):
            model.generate(prompt([3])[0], nonsense=3)
        with pytest.raises(RuntimeError, match="probability tensor contains"):
            model.generate(prompt([3])[0], max_new_tokens=2, do_sample=True, temperature=1e-40)


def test_streams_are_those_of_transformers(pair):
    ids, mask = prompt([4, 9])
    streamers = [Recorder(), Recorder()]
    for model, streamer in zip(pair, streamers, strict=True):
        stock(model, ids, mask, streamer=streamer)
    assert streamers[0].got == streamers[1].got
    assert report(pair[1]).decoded == 1


def test_draws(pair):
    _, patched = pair
    ids, mask = prompt([4, 9])
    options = {"do_sample": True, "top_k": 40, "top_p": 0.9, "temperature": 1.2, "num_return_sequences": 3}
    tokens = []
    for _ in range(2):
        torch.manual_seed(3)
        tokens.append(stock(patched, ids, mask, **options))
    assert tokens[0].shape == (6, 39)
    assert tokens[0].equal(tokens[1])
    assert len({tuple(row) for row in tokens[0].tolist()}) == 6
    greedy = stock(patched, ids, mask)
    assert stock(patched, ids, mask, do_sample=True, top_k=1).equal(greedy)
    stock(patched, ids, mask, do_sample=True, min_p=0.1)
    assert report(patched).decoded == 4
    assert "MinPLogitsWarper" in str(report(patched))


def test_the_decoder_grows(pair, monkeypatch):
    monkeypatch.setattr(replacements, "BLOCK", 16)
    model, patched = pair
    for lengths, new in (([5], 10), ([5, 3, 8], 8), ([5], 28), ([2, 2, 2], 30)):
        ids, mask = prompt(lengths)
        assert stock(patched, ids, mask, new).equal(stock(model, ids, mask, new))
    decoder = patched.__dict__[replacements.STATE].decoder
    assert (decoder.batch_size, decoder.max_length) == (3, 48)
    assert report(patched).decoded == 4


def test_models_that_change(pair):
    model, patched = pair
    ids, mask = prompt([4, 9])
    stock(patched, ids, mask)
    with torch.no_grad():
        for each in pair:
            each.model.layers[0].self_attn.k_proj.weight = torch.nn.Parameter(
                each.model.layers[0].self_attn.k_proj.weight * -1
            )
    assert stock(patched, ids, mask).equal(stock(model, ids, mask))
    assert report(patched).decoded == 2
    for each in pair:
        each.model.layers[0].mlp.register_forward_hook(lambda module, given, out: out * 2)
    assert stock(patched, ids, mask).equal(stock(model, ids, mask))
    assert [*report(patched).left] == ["Gemma2MLP has hooks, which a drop-in would not call"]


def test_recorded_outputs_leave_hooks_that_do_not_count(pair):
    model, patched = pair
    ids, mask = prompt([4, 9])
    for options in ({"output_hidden_states": True}, {"output_attentions": True}):
        given, expected = (each(ids, attention_mask=mask, **options) for each in (patched, model))
        name = next(iter(options)).removeprefix("output_")
        assert all(map(torch.equal, given[name], expected[name]))
    layer = patched.model.layers[0]
    assert layer._forward_hooks
    assert stock(patched, ids, mask).equal(stock(model, ids, mask))
    assert (report(patched).decoded, report(patched).left.total()) == (1, 0)
    own = layer.register_forward_hook(lambda *_: None)  # beside theirs
    stock(patched, ids, mask)
    own.remove()
    layer.forward = lambda *given, **options: type(layer).forward(layer, *given, **options)
    stock(patched, ids, mask)
    assert report(patched).left == {"Gemma2DecoderLayer has hooks, which a drop-in would not call": 2}


def test_copies_are_patched_and_pickles_are_not(pair):
    _model, patched = pair
    ids, mask = prompt([4, 9])
    expected = stock(patched, ids, mask)
    other = copy.deepcopy(patched)
    assert stock(other, ids, mask).equal(expected)
    assert report(other).decoded == 1
    assert other.__dict__[replacements.STATE].decoder.model is other
    loaded = pickle.loads(pickle.dumps(patched))
    assert stock(loaded, ids, mask).equal(expected)


def test_unpatch(pair):
    model, patched = pair
    ids, mask = prompt([4, 9])
    stock(patched, ids, mask)
    assert patch(patched).replaced == {"": "Decoder, in generate, patched before"}
    unpatch(patched)
    assert "generate" not in patched.__dict__
    assert replacements.STATE not in patched.__dict__
    assert all(p.untyped_storage().nbytes() == p.numel() * p.element_size() for p in patched.parameters())
    assert all(a.equal(b) for a, b in zip(model.state_dict().values(), patched.state_dict().values(), strict=True))
    for other in (patched, 3):
        with pytest.raises(ValueError, match="its own generate is not patched"):
            report(other)
    unpatch(patched)


def test_models_that_are_left_alone():
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module"):
        patch(3)
    assert patch(torch.nn.Sequential(torch.nn.Linear(2, 2))).replaced == {}
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32)
    model = transformers.GPT2LMHeadModel(config)
    done = patch(model)
    assert done.replaced == {}
    assert "GPT2LMHeadModel has no `model`" in done.left[""]
    assert "generate" not in model.__dict__
    inside = torch.nn.Sequential(make("llama"))
    assert patch(inside).replaced == {"0": "Decoder, in generate"}


def test_a_model_in_training_is_not_changed():
    model, other = make("llama").train(), make("llama").train()
    patch(model)
    ids, _ = prompt([6])
    before = [p.data_ptr() for p in model.parameters()]
    for each in (model, other):
        each(input_ids=ids, labels=ids).loss.backward()
    assert all(a.grad.equal(b.grad) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert stock(model, ids).equal(stock(other, ids))
    assert [p.data_ptr() for p in model.parameters()] == before
    assert [*report(model).left] == ["it is in training mode; call model.eval() first"]


def test_without_memory_for_the_decoder_transformers_generates(pair, monkeypatch):
    model, patched = pair
    ids, mask = prompt([4, 9])

    def full(*_, **__):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(replacements, "Decoder", full)
    assert stock(patched, ids, mask).equal(stock(model, ids, mask))
    assert dict(report(patched).left) == {"no memory": 1}


class Nested:
    """A streamer that generates itself."""

    def __init__(self, generate):
        self.generate, self.count = generate, 0

    def put(self, value):
        self.count += 1
        if self.count == 4:
            self.generate(torch.tensor([[7, 8]] * 3), max_new_tokens=2)

    def end(self):
        pass


def test_a_call_within_a_call(pair):
    model, patched = pair
    ids, mask = prompt([4])
    expected = stock(model, ids, mask)
    streamer = Nested(lambda ids, **options: patched.generate(ids, do_sample=False, **options))
    assert stock(patched, ids, mask, streamer=streamer).equal(expected)
    assert report(patched).decoded == 1
    assert any("within a call of the same Decoder" in reason for reason in report(patched).left)
    decoder = Decoder(model, 3, 64)
    with pytest.raises(ValueError, match="within a call of the same Decoder"):
        decoder.generate(ids, streamer=Nested(decoder.generate), max_new_tokens=9)
    assert decoder.generate(ids, max_new_tokens=30).equal(expected)


def test_classes_with_steps_of_their_own_are_left_alone():
    class Padded(type(make("llama"))):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits[..., 50:] = float("-inf")
            return out

    model = make("llama")
    model.__class__ = Padded
    patch(model)
    ids, mask = prompt([4])
    found = model.generate(ids, attention_mask=mask, max_new_tokens=30, do_sample=False)
    assert found[:, 4:].max() < 50
    assert any("has its own forward" in reason for reason in report(model).left)


def test_a_pickled_model_comes_back_unpatched():
    model, (ids, mask) = make("llama"), prompt([4])
    patch(model)
    model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False)
    other = pickle.loads(pickle.dumps(model))
    with pytest.raises(ValueError, match="not patched"):
        report(other)
    unpatch(other)
    assert list(patch(other).replaced) == [""]
    other.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False)
    assert report(other).decoded == 1
