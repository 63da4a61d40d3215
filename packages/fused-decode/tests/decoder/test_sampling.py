"""Draws: what is kept is what transformers keeps, the noise is Philox', the frequencies are the probabilities."""

import pytest
import torch
from tiny_models import make, prompt, stock
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from kernel_pytorch.fused_decode import Decoder
from kernel_pytorch.fused_decode.decoder.sampling import Sampling

KEYS = [(0x00000000, 0x00000000), (0xFFFFFFFF, 0xFFFFFFFF), (0xA4093822, 0x299F31D0)]


def sampling(rows=1, seed=0, temperature=1.0, top_k=10**6, top_p=1.0):
    made = Sampling(rows, torch.device("cpu"))
    made.set(seed, temperature, top_k, top_p)
    return made


def theirs(logits, temperature, top_k, top_p):
    for warper in (
        TemperatureLogitsWarper(temperature), TopKLogitsWarper(top_k) if top_k else None,
        TopPLogitsWarper(top_p) if top_p < 1.0 else None,
    ):  # fmt: skip
        logits = logits if warper is None else warper(None, logits)
    return logits


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [0, 1, 7, 50, 1000])
@pytest.mark.parametrize("top_p", [0.0, 1e-6, 0.3, 0.9, 1.0])
def test_kept_is_what_transformers_keeps(temperature, top_k, top_p):
    logits = torch.randn(5, 200) * 3
    ours = sampling(5, 0, temperature, top_k or 200, top_p).kept(logits)
    assert ours.equal(theirs(logits, temperature, top_k, top_p))


def test_ties_with_the_kth_are_kept():
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    assert sampling(top_k=2).kept(logits).equal(theirs(logits, 1.0, 2, 1.0))
    assert sampling(top_k=2).kept(logits).isfinite().tolist() == [[False, True, True, True, True, False]]


@pytest.mark.parametrize(("top_p", "kept"), [(0.0, 1), (0.4, 1), (0.51, 2), (0.75, 2), (0.76, 3), (0.9, 4), (1.0, 4)])
def test_edges_of_top_p(top_p, kept):
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    assert sampling(top_p=top_p).kept(logits).isfinite().sum() == kept
    assert sampling(top_p=top_p).kept(logits).equal(theirs(logits, 1.0, 0, top_p))


def test_noise_is_a_function_of_seed_row_step_and_token():
    """Against Philox in Python's integers."""

    def words(seed, counter):
        a, b, c, d = counter & 0xFFFFFFFF, counter >> 32, 0, 0
        key = [seed & 0xFFFFFFFF, seed >> 32]
        for _ in range(10):
            first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
            a, b = (second >> 32) ^ b ^ key[0], second & 0xFFFFFFFF
            c, d = (first >> 32) ^ d ^ key[1], first & 0xFFFFFFFF
            key = [(key[0] + 0x9E3779B9) & 0xFFFFFFFF, (key[1] + 0xBB67AE85) & 0xFFFFFFFF]
        return a, b, c, d

    made = sampling(3, seed := 0x1234567890ABCDE)
    made.step.fill_(5)
    noise = made._noise(3, 10)
    for row in range(3):
        for token in range(10):
            word = words(seed, ((row * 2**20 + 5) << 32) + token // 4)[token % 4]
            uniform = torch.tensor((word + 0.5) * 2.0**-32, dtype=torch.float64)
            assert torch.allclose(noise[row, token].double(), -torch.log1p(-uniform), rtol=1e-5)


def test_rows_do_not_depend_on_their_companions():
    logits = torch.randn(16, 300)
    together = [sampling(16, 3).draw(logits).tolist() for _ in range(2)]
    assert together[0] == together[1] != sampling(16, 4).draw(logits).tolist()
    assert [sampling(1, 3).draw(logits[:1]).item()] == together[0][:1]
    assert sampling(16, 3).draw(logits.flip(0)).tolist() != together[0][::-1]
    one = torch.randn(1, 300).expand(16, 300)
    assert len({*sampling(16, 3).draw(one).tolist()}) > 8, "rows share their noise"
    made = sampling(1, 3)
    assert len({int(made.draw(one[:1])) for _ in range(16)}) > 8, "steps share their noise"


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 12, 1.0), (1.3, 0, 0.8), (1.5, 20, 0.9)]
)
def test_frequencies(temperature, top_k, top_p):
    """Chi-square of 1e5 draws of 32 tokens."""
    logits = torch.randn(1, 32, generator=torch.Generator().manual_seed(5)) * 1.5
    expected = theirs(logits, temperature, top_k, top_p).double().softmax(-1)[0]
    made = sampling(2000, 7, temperature, top_k or 32, top_p)  # as many rows as the counter has room for
    tokens = torch.cat([made.draw(logits.expand(2000, 32)) for _ in range(50)])
    counts = torch.bincount(tokens, minlength=32).double()
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    square = ((counts - 1e5 * expected)[kept] ** 2 / (1e5 * expected[kept])).sum()
    freedom = int(kept.sum()) - 1
    assert square < freedom + 5 * (2 * freedom) ** 0.5, "a chi-square of this size is less likely than 1 in 3000"


def test_tokens_without_probability_are_never_drawn():
    logits = torch.full((64, 500), -float("inf"))
    logits[:, 123], logits[:, 321] = 0.0, -1e30
    made = sampling(64, 1, 1.0, 500, 1.0)
    assert {int(token) for _ in range(50) for token in made.draw(logits)} == {123}


@pytest.mark.parametrize("level", [None, "native"])
def test_the_largest_alone_is_greedy(device, level):
    """On a GPU, a kernel chooses at level "triton" but among all tokens, and PyTorch's operators choose at "native"."""
    model = make("llama").to(device)
    ids, mask = (each.to(device) for each in prompt([4, 9]))
    decoder = Decoder(model, 2, 64, level=level)
    expected = stock(model, ids, mask)
    assert decoder.generate(ids, mask, 30, do_sample=True, top_k=1).equal(expected)
    assert decoder.generate(ids, mask, 30, do_sample=True, top_p=0.0).equal(expected)
    assert decoder.generate(ids, mask, 30, do_sample=True, top_k=0, temperature=1e-4).equal(expected)


def test_seeds():
    model = make("llama")
    ids, mask = prompt([4, 9])
    decoder = Decoder(model, 2, 64)

    def draw(decoder=decoder, ids=ids, mask=mask, **options):
        return decoder.generate(ids, mask, 30, do_sample=True, **options)

    assert draw(seed=1).equal(draw(seed=1))
    assert not draw(seed=1).equal(draw(seed=2))
    alone = draw(Decoder(model, 1, 64), ids[:1, 5:], None, seed=1)
    assert alone[0].equal(draw(seed=1)[0, 5:])
    torch.manual_seed(11)
    first, second = draw(), draw()
    torch.manual_seed(11)
    assert draw().equal(first)
    assert not first.equal(second)
