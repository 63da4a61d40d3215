"""PyTorch's own modules that do more than their classes say: they are refused, with the reason."""

import pytest
import torch

from kernel_pytorch.fused_ln_act import MLP, AddLayerNorm, GatedMLP, LayerNorm, LayerNormAct, LinearAct
from kernel_pytorch.fused_ln_act._core.stock import why_not_replaceable


def hooked(module):
    module.register_forward_hook(lambda module, inputs, y: 2.0 * y)
    return module


def normed(linear):
    with pytest.warns(FutureWarning, match="weight_norm"):
        return torch.nn.utils.weight_norm(linear)


def made(linear):
    """As a hypernetwork does it: a weight that something computes."""
    weight = linear.weight.detach()
    del linear.weight
    linear.weight = weight
    return linear


def feed_forward(first, between=None, last=None):
    last = torch.nn.Linear(3, 8) if last is None else last
    return torch.nn.Sequential(first, torch.nn.GELU(), *([] if between is None else [between]), last)


def gated(gate):
    module = torch.nn.Module()
    module.gate_proj, module.up_proj = gate, torch.nn.Linear(8, 3, bias=False)
    module.down_proj, module.act_fn = torch.nn.Linear(3, 8, bias=False), torch.nn.SiLU()
    return module


LINEAR = torch.nn.Linear
CASES = {
    "LayerNorm": (LayerNorm, lambda change: change(torch.nn.LayerNorm(8))),
    "AddLayerNorm": (AddLayerNorm, lambda change: change(torch.nn.LayerNorm(8))),
    "LayerNormAct": (LayerNormAct, lambda change: torch.nn.Sequential(torch.nn.LayerNorm(8), change(torch.nn.GELU()))),
    "LinearAct": (LinearAct, lambda change: torch.nn.Sequential(change(LINEAR(8, 3)), torch.nn.GELU())),
    "Linear": (LinearAct, lambda change: change(LINEAR(8, 3))),
    "MLP": (MLP, lambda change: feed_forward(LINEAR(8, 3), last=change(LINEAR(3, 8)))),
    "whole MLP": (MLP, lambda change: change(feed_forward(LINEAR(8, 3)))),
    "GatedMLP": (GatedMLP, lambda change: gated(change(LINEAR(8, 3, bias=False)))),
}


@pytest.mark.parametrize("case", CASES)
def test_hooks_are_not_dropped(case):
    ours, build = CASES[case]
    assert ours.from_torch(build(lambda module: module)) is not None
    with pytest.raises(TypeError, match="has hooks, which a drop-in would not call"):
        ours.from_torch(build(hooked))


@pytest.mark.parametrize("change", [normed, made])
def test_a_weight_that_is_computed_is_not_taken_over(change):
    with pytest.raises(TypeError, match=r"has hooks|the weight of Linear is made of other tensors"):
        LinearAct.from_torch(change(torch.nn.Linear(8, 3)))


def test_plain_modules_are_plain():
    assert why_not_replaceable(feed_forward(torch.nn.Linear(8, 3, bias=False)).modules()) is None
