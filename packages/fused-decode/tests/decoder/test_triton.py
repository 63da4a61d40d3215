"""The step of Triton kernels under the interpreter: three families have all variants of the kernels."""

import os

import pytest
import torch
from tiny_models import make, prompt, stock

from kernel_pytorch.fused_decode import Decoder

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a GPU or TRITON_INTERPRET=1"
)
SMALL = {"vocab_size": 48, "intermediate_size": 32}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("family", ["llama_biased_tied", "gemma2", "olmo2"])
def test_twenty_tokens_are_those_of_transformers(family, rows):
    model = make(family, **SMALL).to(DEVICE)
    ids, mask = (each.to(DEVICE) for each in prompt([6, 3][:rows], 48))
    decoder = Decoder(model, rows, 32, level="triton")
    assert decoder.generate(ids, mask, 20).equal(stock(model, ids, mask, 20))


@pytest.mark.parametrize("family", ["qwen3", "phi3", "smollm3"])
def test_head_norms_partial_and_no_rotation(family):
    model = make(family, **SMALL).to(DEVICE)
    ids, mask = (each.to(DEVICE) for each in prompt([6, 3], 48))
    assert Decoder(model, 2, 16, level="triton").generate(ids, mask, 4).equal(stock(model, ids, mask, 4))


def test_draws_are_those_of_level_native():
    model = make("llama", num_hidden_layers=1, **SMALL).to(DEVICE)
    ids, mask = (each.to(DEVICE) for each in prompt([6, 3], 48))
    native, triton = (
        Decoder(model, 3, 16, level=level).generate(ids, mask, 6, do_sample=True, top_p=0.9, seed=5)
        for level in ("native", "triton")
    )
    assert native.equal(triton)
