"""The cache, sampling, and generation."""

import pytest
import torch

from kernel_pytorch.models import KeyValueCache, LanguageModel, sample

BOTH = pytest.mark.parametrize("techniques", [(), None])


def language_model(**options):
    torch.manual_seed(0)
    model = LanguageModel(50, 32, num_layers=2, num_heads=4, num_kv_heads=2, max_position=64, **options)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)  # so that logits differ
    return model.eval()


def tokens(*shape):
    return torch.randint(50, shape, generator=torch.Generator().manual_seed(1))


@BOTH
@pytest.mark.parametrize("parts", [[9], [1] * 9, [4, 1, 3, 1], [1, 8]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@torch.no_grad()
def test_parts_with_a_cache_give_the_logits_of_the_whole(techniques, parts, dtype):
    model = language_model(techniques=techniques).to(dtype)
    ids, cache = tokens(3, 9), model.new_cache(3, 9)
    found = torch.cat([model(part, cache=cache) for part in ids.split(parts, 1)], 1)
    torch.testing.assert_close(found, model(ids), rtol=1e-4, atol=1e-4 if dtype == torch.float32 else 1e-7)
    assert cache.filled == 9
    assert cache.lengths.tolist() == [9, 9, 9]
    with pytest.raises(ValueError, match="cache: it has room for 9 tokens; 10 are needed"):
        model(ids[:, :1], cache=cache)


@BOTH
def test_texts_of_different_lengths_continue_as_alone(techniques):
    model = language_model(techniques=techniques).double()
    ids, lengths = tokens(3, 7), [7, 1, 4]
    together = model.generate(ids, 3, lengths=torch.tensor(lengths), temperature=0.0)
    for row, text, length in zip(together, ids, lengths, strict=True):
        alone = model.generate(text[None, :length], 3, temperature=0.0)[0]
        assert row.tolist() == alone.tolist() + [0] * (7 - length)


@BOTH
def test_greedy_generation_takes_the_most_likely_token(techniques):
    model = language_model(techniques=techniques).double()
    ids = tokens(2, 3)
    found = model.generate(ids, 5, temperature=0.0)
    for _ in range(5):
        ids = torch.cat((ids, model(ids)[:, -1:].argmax(-1)), 1)
    assert torch.equal(found, ids)


def test_a_text_ends_at_eos_and_is_padded():
    model = language_model().double()
    ids = tokens(4, 3)
    free = model.generate(ids, 8, temperature=0.0)
    end, other = free[0, 5].item(), free[1, 4].item()
    stopped = model.generate(ids, 8, temperature=0.0, eos=[end, other])
    for row, wanted in zip(stopped.tolist(), free.tolist(), strict=True):
        cut = next((i for i in range(3, 11) if wanted[i] in (end, other)), 10)
        assert row == wanted[: cut + 1] + [end] * (10 - cut)
    only = model.generate(ids[:1], 8, temperature=0.0, eos=end)  # all have ended: no more steps
    assert only[0].tolist() == stopped[0].tolist()


def test_generation_is_repeatable_with_a_generator():
    model, ids = language_model(), tokens(2, 3)
    texts = [model.generate(ids, 8, top_k=20, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])


def test_the_cache_is_in_the_dtype_of_autocast():
    model, ids = language_model(), tokens(2, 3)
    with torch.autocast("cpu", torch.bfloat16):
        cache = model.new_cache(2)
        assert model.generate(ids, 4, temperature=0.0).shape == (2, 7)
    assert cache.keys[0].dtype == torch.bfloat16
    assert cache.keys[0].shape == (2, 2, 64, 8)
    assert model.double().new_cache(1, 5).values[1].dtype == torch.float64


def test_shorter_lengths_forget_what_is_behind():
    cache = KeyValueCache(1, 2, 1, 6, 4)
    cache.advance(5)
    cache.set_lengths(torch.tensor([5, 2]))
    assert cache.positions(1).tolist() == [[5], [2]]
    k = torch.ones(2, 1, 1, 4)
    keys, _, lengths = cache.layer(0, cache.positions(1)).append(k, k)
    assert keys.shape == (2, 1, 6, 4)
    assert keys[:, 0, :, 0].nonzero().tolist() == [[0, 5], [1, 2]]
    assert lengths.tolist() == [6, 3]


def probabilities(logits, **options):
    """How often each token is drawn, of 4000 draws."""
    generator = torch.Generator().manual_seed(0)
    drawn = sample(logits.expand(4000, -1), generator=generator, **options)
    return drawn.bincount(minlength=len(logits)) / 4000


def test_sampling_draws_by_probability():
    likely = torch.tensor([0.5, 0.3, 0.15, 0.05])
    logits = likely.log() + 3.0
    close = {"atol": 0.03, "rtol": 0.0}
    torch.testing.assert_close(probabilities(logits), likely, **close)
    torch.testing.assert_close(probabilities(logits, temperature=0.5), likely**2 / (likely**2).sum(), **close)
    torch.testing.assert_close(probabilities(logits, top_k=2), torch.tensor([0.625, 0.375, 0, 0]), **close)
    torch.testing.assert_close(probabilities(logits, top_k=9), likely, **close)
    for top_p, kept in ((0.01, 1), (0.49, 1), (0.7, 2), (0.81, 3), (1.0, 4)):
        wanted = torch.where(torch.arange(4) < kept, likely, 0.0)
        torch.testing.assert_close(probabilities(logits, top_p=top_p), wanted / wanted.sum(), **close)
    # Of what top_k leaves: 0.5 and 0.3 become 0.625 and 0.375.
    torch.testing.assert_close(probabilities(logits, top_k=2, top_p=0.6), torch.tensor([1.0, 0, 0, 0]), **close)
    shuffled = torch.tensor([2, 0, 3, 1])
    torch.testing.assert_close(
        probabilities(logits[shuffled], top_p=0.7), torch.tensor([0, 0.625, 0, 0.375]), **close
    )  # fmt: skip


def test_sampling_in_half_precision_and_greedy():
    logits = torch.tensor([[1.0, 3.0, 2.0], [5.0, -1.0, 0.0]])
    assert sample(logits, temperature=0.0).tolist() == [1, 0]
    assert sample(logits.bfloat16(), top_k=1).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature: given -1.0; it must not be negative"),
        ({"temperature": float("nan")}, "temperature: given nan"),
        ({"top_k": 0}, "top_k: given 0; it must be at least 1, or None"),
        ({"top_p": 0.0}, "top_p: given 0.0; it must be above 0 and at most 1"),
        ({"max_new_tokens": 0}, "max_new_tokens: given 0; it must be at least 1"),
        ({"lengths": torch.tensor([1])}, r"lengths: shape is \(1,\); it must be \(2,\)"),
        ({"lengths": torch.tensor([0, 3])}, r"lengths: given \[0, 3\]; they must be from 1 to 3"),
        ({"input_ids": tokens(2, 0)}, r"input_ids: shape is \(2, 0\); it must be \(B, S\) with at least one token"),
        ({"max_new_tokens": 80}, "input_ids: 65 tokens with those cached; max_position is 64"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        language_model().generate(**{"input_ids": tokens(2, 3), "max_new_tokens": 4} | options)


def test_a_cache_with_gradients_is_refused():
    model = language_model()
    cache = model.new_cache(1)
    model.requires_grad_(False)(tokens(1, 3), cache=cache)
    model.requires_grad_(True)
    with pytest.raises(RuntimeError, match="grad"):
        model(tokens(1, 1), cache=cache)


@BOTH
@torch.no_grad()
def test_steps_with_a_cache_compile_as_one_graph(techniques):
    model, ids = language_model(techniques=techniques), tokens(2, 8)
    wanted = model.generate(ids, 6, temperature=0.0)
    model.compile(fullgraph=True, backend="aot_eager")
    assert torch.equal(model.generate(ids, 6, temperature=0.0), wanted)


def test_prompts_of_int32_and_caches_of_other_batches():
    torch.manual_seed(0)
    model = LanguageModel(40, 16, num_layers=1, num_heads=2).eval()
    tokens = torch.randint(40, (2, 5))
    found = model.generate(tokens.int(), 4, temperature=0.0)
    assert found.dtype == torch.int32
    assert torch.equal(found.long(), model.generate(tokens, 4, temperature=0.0))
    with torch.no_grad(), pytest.raises(ValueError, match="cache: it is for 3 sequences; input_ids has 2"):
        model(tokens, cache=model.new_cache(3))
