"""Every family against transformers: tokens in float32, logits against float64."""

import pytest
import tiny_models
import torch
from tiny_models import FAMILIES, make, prompt, stock

from kernel_pytorch.fused_decode import Decoder

WINDOWED = ("mistral", "qwen2_mixed", "gemma2", "gemma3", "phi3")


@pytest.mark.parametrize("family", FAMILIES)
def test_two_hundred_tokens_are_those_of_transformers(family):
    model = make(family)
    ids, mask = prompt([13, 8])
    expected = stock(model, ids, mask, 200)
    assert expected[0, 13:].unique().numel() >= 8, "the model repeats itself, and would hide errors"
    assert Decoder(model, 2, 213).generate(ids, mask, 200).equal(expected)


@pytest.mark.parametrize("family", ["llama", "gemma2", "olmo2"])
def test_rows_alone_are_rows_together(family):
    model, lengths = make(family), [1, 2, 7, 31]
    ids, mask = prompt(lengths)
    decoder, alone = Decoder(model, 4, 64), Decoder(model, 1, 64)
    together = decoder.generate(ids, mask, 33)
    assert together.equal(stock(model, ids, mask, 33))
    for row, length in enumerate(lengths):
        own = ids[row : row + 1, 31 - length :]
        for each in (decoder, alone):  # fewer rows than the decoder has, too
            assert each.generate(own, max_new_tokens=33)[0].equal(together[row, 31 - length :])


@pytest.mark.parametrize("family", WINDOWED)
@pytest.mark.parametrize("length", [3, 5, 17])
def test_windows_are_crossed(family, length):
    model = make(family)
    ids, mask = prompt([length, max(length - 3, 1)])
    assert Decoder(model, 2, 80).generate(ids, mask, 40).equal(stock(model, ids, mask, 40))


def test_windows_have_rings_no_longer_than_they_need():
    decoder = Decoder(make("gemma2"), 1, 400)
    assert [k.shape[2] for k, *_ in decoder._step.caches.layers] == [400, 16, 16]
    assert [k.shape[2] for k, *_ in Decoder(make("gemma2"), 1, 9)._step.caches.layers] == [9, 9, 9]


def logits_of(decoder, model, ids):
    """Logits of the step for each token but the first three, which are the prompt."""
    step, rows = decoder._step, []
    with torch.no_grad():
        decoder._prompt(ids[:, :3], [0])
        for position in range(3, ids.shape[1]):
            step.tokens.copy_(ids[:, position])
            step.caches.lengths.fill_(position)
            rows.append(step.logits()[0].double())
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_as_near_to_float64_as_those_of_transformers(family, dtype):
    model = make(family, dtype)
    ids, _ = prompt([24])
    with torch.no_grad():
        theirs = model(input_ids=ids).logits[0, 3:].double()
        exact = make(family, torch.float64)
        exact.load_state_dict({name: p.double() for name, p in model.state_dict().items()})
        truth = exact(input_ids=ids).logits[0, 3:]
    ours = logits_of(Decoder(model, 1, 24), model, ids)
    error, allowed = ((x - truth).norm() / truth.norm() for x in (ours, theirs))
    assert error <= 1.5 * allowed + 4 * torch.finfo(dtype).eps


def test_embeddings_are_scaled_as_in_transformers():
    model = make("gemma", torch.bfloat16)
    decoder = Decoder(model, 3, 16)
    tokens = torch.tensor([1, 5, 95])
    ours = decoder._step.ops.embed(tokens, decoder._step.plan.table, scale=decoder._step.plan.scale)
    assert ours.equal(model.model.embed_tokens(tokens))


@pytest.mark.parametrize("family", ["llama3_rope", "llama_yarn", "gemma3", "phi3"])
def test_angles_are_those_of_the_model(family):
    model = make(family)
    for layer, (_, _, cos, sin) in zip(Decoder(model, 1, 300)._step.plan.layers, _layers(model), strict=True):
        kinds = [layer.attention.rotary] if family == "gemma3" else []
        theirs = model.model.rotary_emb(torch.zeros(1), torch.arange(300)[None], *kinds)
        for ours, table in zip((cos, sin), theirs, strict=True):
            assert torch.cat([ours, ours], -1).equal(table[0])


def _layers(model):
    return Decoder(model, 1, 300)._step.caches.layers


def test_the_matrix_has_each_part():
    plans = {family: Decoder(make(family), 1, 16)._step.plan for family in tiny_models.FAMILIES}
    attentions = {family: [layer.attention for layer in plan.layers] for family, plan in plans.items()}
    assert plans["gemma2"].softcap == 1.5
    assert {a.softcap for a in attentions["gemma2"]} == {0.5}
    assert [a.window for a in attentions["gemma3"]] == [None, 4, 4]
    assert [a.window for a in attentions["qwen2_mixed"]] == [None, 5, 5]
    assert {a.window for a in attentions["mistral"]} == {8}
    assert {a.window for a in attentions["mistral_full"]} == {None}
    assert [a.rotary is None for a in attentions["smollm3"]] == [False, False, False, True]
    assert attentions["qwen3"][0].per_head
    assert not attentions["olmo2"][0].per_head
    assert plans["olmo2"].layers[0].attention_norm is None
    assert plans["gemma"].norm.offset == 1.0
    assert plans["llama_biased_tied"].head.weight is plans["llama_biased_tied"].table
    assert attentions["llama_biased_tied"][0].qkv.bias.shape == (128,)
