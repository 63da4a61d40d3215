"""The step of Triton kernels under the interpreter: three families have all variants of the kernels."""

import os

import pytest
import torch
from tiny_models import MIXED, make, prompt, stock

from kernel_pytorch.fused_decode import Decoder

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1",
    reason="without a GPU it needs TRITON_INTERPRET=1",
)
SMALL = {"vocab_size": 48, "hidden_size": 16, "intermediate_size": 16, "head_dim": 8}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize(("family", "rows"), [("llama_biased_tied", 1), ("gemma2", 2), ("olmo2", 1)])
def test_twenty_tokens_are_those_of_transformers(family, rows):
    layers = {"num_hidden_layers": 2, "layer_types": MIXED[:2]} if family == "gemma2" else {"num_hidden_layers": 1}
    model = make(family, **SMALL, **layers)
    ids, mask = (each.to(DEVICE) for each in prompt([6, 3][:rows], 48))
    decoder = Decoder(model.to(DEVICE), rows, 32, level="triton")
    assert decoder.generate(ids, mask, 20).equal(stock(model, ids, mask, 20))


@pytest.mark.parametrize(
    ("family", "rows"), [("llama_biased_tied", 2), ("olmo2", 2), ("qwen3", 2), ("phi3", 2), ("smollm3", 1)]
)
def test_head_norms_partial_and_no_rotation(family, rows):
    model = make(family, **SMALL).to(DEVICE)
    ids, mask = (each.to(DEVICE) for each in prompt([6, 3][:rows], 48))
    assert Decoder(model, 2, 16, level="triton").generate(ids, mask, 4).equal(stock(model, ids, mask, 4))


def test_ties_give_the_lowest_token():
    decoder = Decoder(make("llama", num_hidden_layers=1, **SMALL).to(DEVICE), 3, 16, level="triton")
    step = decoder._step
    step.caches.lengths.copy_(torch.tensor([4, -1, 5]))
    logits = torch.zeros(3, 300, device=DEVICE)
    logits[0, [7, 70, 299]], logits[2, [65, 190]] = 1.0, 2.0
    step.choose(logits, "greedy")
    if logits.is_cuda:
        torch.cuda.synchronize()
    assert step.caches.history[[0, 2], [4, 5]].tolist() == [7, 65]
    assert step.tokens.tolist() == [7, 0, 65]
    assert step.caches.lengths.tolist() == [5, -1, 6]


def test_ends_and_logits_that_are_no_numbers():
    model = make("llama", num_hidden_layers=1, **SMALL).to(DEVICE)
    ids, mask = (each.to(DEVICE) for each in prompt([6, 3], 48))
    decoder = Decoder(model, 2, 16, level="triton")
    end = int(stock(model, ids, mask, 3)[0, -1])
    options = {"eos_token_id": [end, 47], "pad_token_id": 1}
    assert decoder.generate(ids, mask, 6, **options).equal(stock(model, ids, mask, 6, **options))
    with torch.no_grad():
        model.lm_head.weight[11] = float("nan")
    with pytest.raises(RuntimeError, match="the logits of row 0 are NaN or infinite in step 0"):
        decoder.generate(ids, mask, 5)


def test_draws_are_those_of_level_native():
    model = make("llama", num_hidden_layers=1, **SMALL).to(DEVICE)
    ids, mask = (each.to(DEVICE) for each in prompt([6, 3], 48))
    native, triton = (
        Decoder(model, 3, 16, level=level).generate(ids, mask, 6, do_sample=True, top_p=0.9, seed=5)
        for level in ("native", "triton")
    )
    assert native.equal(triton)
