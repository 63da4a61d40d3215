"""What the feed-forward modules share: levels, parameters, and the names of a state_dict."""

import gc

import pytest
import torch

from kernel_pytorch.fused_ln_act import MLP, GatedMLP


class LlamaMLP(torch.nn.Module):
    """As Hugging Face's transformers have it."""

    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = (torch.nn.Linear(16, 24, bias=False) for _ in range(2))
        self.down_proj = torch.nn.Linear(24, 16, bias=False)
        self.act_fn = torch.nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def test_the_level_of_mlp_is_that_of_its_layers():
    ours = MLP(16, 24, level="native")
    assert (ours.level, ours.fc1.level, ours.fc2.level) == ("native",) * 3
    ours.level = "reference"
    assert (ours.level, ours.fc1.level, ours.fc2.level) == ("reference",) * 3
    with pytest.raises(ValueError, match="level: given 'fast'; allowed are None"):
        ours.level = "fast"


def test_taken_over_twice_a_feed_forward_is_one_still():
    stock = LlamaMLP()
    first, second = GatedMLP.from_torch(stock), GatedMLP.from_torch(stock)
    assert first.gate_up_proj.weight is second.gate_up_proj.weight
    x = torch.randn(3, 16)
    with torch.no_grad():
        first.gate_up_proj.weight.mul_(2.0)
    for other in (second, stock, first.to_torch(), second.to_torch()):
        torch.testing.assert_close(other(x), first(x))


def test_what_no_longer_is_a_half_is_packed_anew():
    stock = LlamaMLP()
    first = GatedMLP.from_torch(stock)
    stock.gate_proj.weight.data = torch.ones(24, 16)
    second = GatedMLP.from_torch(stock)
    assert torch.equal(second.gate_up_proj.weight[:24], torch.ones(24, 16))
    assert second.gate_up_proj.weight is not first.gate_up_proj.weight


def swap_layers(stock):
    stock.gate_proj, stock.up_proj = stock.up_proj, stock.gate_proj


def swap_memory(stock):
    stock.gate_proj.weight.data, stock.up_proj.weight.data = stock.up_proj.weight.data, stock.gate_proj.weight.data


def prune(stock):
    for layer in (stock.gate_proj, stock.up_proj):
        layer.weight.data, layer.out_features = layer.weight.data[:8], 8
    stock.down_proj.weight.data, stock.down_proj.in_features = stock.down_proj.weight.data[:, :8].contiguous(), 8


@pytest.mark.parametrize("change", [swap_layers, swap_memory, prune])
def test_from_torch_again_after_the_halves_have_changed(change):
    stock, x = LlamaMLP(), torch.randn(3, 16)
    GatedMLP.from_torch(stock)
    change(stock)
    expected = stock(x)
    ours = GatedMLP.from_torch(stock)
    torch.testing.assert_close(ours(x), expected)
    torch.testing.assert_close(stock(x), expected)


@pytest.mark.parametrize("name", ["gate_proj", "up_proj"])
def test_a_weight_that_another_layer_has_too_stays_tied(name):
    stock, other = LlamaMLP(), torch.nn.Linear(16, 24, bias=False)
    other.weight = getattr(stock, name).weight
    with pytest.raises(TypeError, match="another layer has the weight of its gate_proj or up_proj too"):
        GatedMLP.from_torch(stock)
    del other
    gc.collect()
    parameters = dict(stock.named_parameters())  # no layer
    GatedMLP.from_torch(stock)
    assert len(parameters) == 3


def test_gate_and_up_of_one_weight_stay_tied():
    stock = LlamaMLP()
    stock.up_proj.weight = stock.gate_proj.weight
    with pytest.raises(TypeError, match="do not fit"):
        GatedMLP.from_torch(stock)


@pytest.mark.parametrize("strict", [True, False])
def test_a_state_dict_with_both_spellings_is_refused(strict):
    ours = GatedMLP(16, 24)
    both = ours.state_dict() | LlamaMLP().state_dict()
    with pytest.raises(RuntimeError, match=r"gate_up_proj.weight is there, and so is gate_proj.weight or up_proj"):
        ours.load_state_dict(both, strict=strict)
    ours.load_state_dict(LlamaMLP().state_dict())
