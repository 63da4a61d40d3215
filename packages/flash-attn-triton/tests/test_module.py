"""The drop-in module, and what it is put in the place of."""

import pytest
import torch

from kernel_pytorch.flash_attn_triton import MultiheadAttention, flash_attention
from kernel_pytorch.flash_attn_triton import module as modules
from kernel_pytorch.flash_attn_triton.replacements import patch, unpatch

CASES = {
    "self": {},
    "batch first": {"batch_first": True},
    "other widths": {"kdim": 10, "vdim": 12},
    "no bias": {"bias": False, "batch_first": True},
}


def inputs(keywords, queries=5, keys=7):
    sizes = (queries, 24), (keys, keywords.get("kdim", 24)), (keys, keywords.get("vdim", 24))
    q, k, v = (torch.randn(tokens, 3, width) for tokens, width in sizes)
    return [t.transpose(0, 1) if keywords.get("batch_first") else t for t in (q, k, v)]


def pair(**keywords):
    stock = torch.nn.MultiheadAttention(24, 4, **keywords)
    ours = MultiheadAttention(24, 4, **keywords)
    ours.load_state_dict(stock.state_dict())
    return stock, ours


@pytest.mark.parametrize("name", CASES)
def test_equals_the_stock_module(name):
    stock, ours = pair(**CASES[name])
    tensors = inputs(CASES[name])
    masks = torch.rand(5, 7) > 0.8, torch.randn(12, 5, 7), torch.rand(3, 7) > 0.8
    for keywords in (
        {},
        {"attn_mask": masks[0]},
        {"attn_mask": masks[1]},
        {"key_padding_mask": masks[2]},
        {"attn_mask": masks[1], "key_padding_mask": torch.zeros(3, 7).masked_fill(masks[2], -float("inf"))},
        {"need_weights": True},
    ):
        keywords = {"need_weights": False, **keywords}
        expected, weights = stock(*tensors, **keywords)
        found, ours_weights = ours(*tensors, **keywords)
        torch.testing.assert_close(found, expected)
        assert (weights is None) == (ours_weights is None)


def test_self_attention_causal_and_without_a_batch():
    stock, ours = pair(batch_first=True)
    x = torch.randn(2, 6, 24)
    mask = torch.nn.Transformer.generate_square_subsequent_mask(6)
    expected = stock(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0]
    torch.testing.assert_close(ours(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)[0], expected)
    torch.testing.assert_close(ours(x, x, x, is_causal=True, need_weights=False)[0], expected)
    torch.testing.assert_close(ours(x[0], x[0], x[0], attn_mask=mask, need_weights=False)[0], expected[0])


def test_gradients_are_those_of_the_stock_module():
    stock, ours = pair(batch_first=True)
    x = torch.randn(2, 6, 24)
    for module in (stock, ours):
        module(x, x, x, need_weights=False)[0].square().sum().backward()
    for (name, expected), found in zip(stock.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, msg=name)


def test_a_query_that_sees_no_key_gives_no_nan():
    _, ours = pair(batch_first=True)
    x = torch.randn(2, 6, 24)
    everything = torch.ones(2, 6, dtype=torch.bool)
    y = ours(x, x, x, key_padding_mask=everything, need_weights=False)[0]
    torch.testing.assert_close(y, ours.out_proj(torch.zeros_like(x)))


def test_a_transformer_layer_takes_it():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(24, 4, 32, dropout=0.0, batch_first=True)
    x = torch.randn(2, 6, 24)
    expected = layer(x)
    assert patch(layer).replaced == {"self_attn": "flash_attention"}
    torch.testing.assert_close(layer(x), expected)


def test_patch_goes_there_and_back(monkeypatch):
    model = torch.nn.Sequential(torch.nn.MultiheadAttention(24, 4, kdim=10, vdim=12, batch_first=True).eval())
    tensors, used = inputs({"kdim": 10, "vdim": 12, "batch_first": True}), []
    stock = model[0](*tensors, need_weights=False)[0]
    patch(model)
    monkeypatch.setattr(modules, "flash_attention", lambda *a, **k: used.append(1) or flash_attention(*a, **k))
    torch.testing.assert_close(model[0](*tensors, need_weights=False)[0], stock)
    assert used
    assert model[0](*tensors)[1] is not None  # its weights come from PyTorch
    unpatch(model)
    assert torch.equal(model[0](*tensors, need_weights=False)[0], stock)


def test_patch_leaves_alone_what_computes_something_else():
    class Other(torch.nn.MultiheadAttention):
        pass

    report = patch(torch.nn.ModuleList([Other(8, 2), torch.nn.MultiheadAttention(8, 2, add_bias_kv=True)]))
    assert not report.replaced
    assert list(report.left) == ["0", "1"]
    assert "adds a key of its own" in report.left["1"]


def test_the_level_is_checked():
    with pytest.raises(ValueError, match="level: given 'tritn'"):
        MultiheadAttention(8, 2, level="tritn")


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"key_padding_mask": torch.ones(3, 7, dtype=torch.int64)}, AssertionError, "only bool and floating"),
        ({"key_padding_mask": torch.zeros(7, 3, dtype=torch.bool)}, AssertionError, "key_padded_mask"),
        ({"attn_mask": torch.zeros(5, 7, dtype=torch.int64)}, AssertionError, "only bool and floating"),
        ({"attn_mask": torch.zeros(1, 7)}, RuntimeError, "attn_mask"),
        ({"is_causal": True}, RuntimeError, "attn_mask"),
    ],
    ids=["integer padding", "padding turned", "integer mask", "mask of one row", "causal with more keys"],
)
def test_what_the_stock_module_refuses_is_refused(given, error, said):
    _, ours = pair(batch_first=True)
    with pytest.raises(error, match=said):
        ours.eval()(*inputs({"batch_first": True}), need_weights=False, **given)
