"""The drop-in module and its replacements."""

import pytest
import torch

from kernel_pytorch.my_technique import MyTechnique, my_technique
from kernel_pytorch.my_technique.levels import LADDER
from kernel_pytorch.my_technique.replacements import applies, build, restore

LEVELS = LADDER.levels("my_technique")
HOOKS = [
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
]


@pytest.mark.parametrize("level", [None, *LEVELS])
def test_equals_the_stock_module(level, device):
    x = torch.randn(5, 3, 8, device=device)
    ours = MyTechnique(level=level)
    assert isinstance(ours, torch.nn.SiLU)
    torch.testing.assert_close(ours(x), torch.nn.SiLU()(x))
    expected = my_technique(x, beta=0.3, level=level)
    assert torch.equal(MyTechnique(0.3, level=level)(x), expected)


def test_replacement_goes_there_and_back():
    ours = build(torch.nn.SiLU().eval())
    assert isinstance(ours, MyTechnique)
    assert (ours.beta, ours.training) == (1.0, False)
    back = restore(ours)
    assert type(back) is torch.nn.SiLU
    assert not back.training


def test_replacement_leaves_alone_what_computes_something_else():
    class Other(torch.nn.SiLU):
        pass

    assert applies(torch.nn.SiLU()) is None
    assert "Other may compute something else" in applies(Other())
    assert "it writes into its input" in applies(torch.nn.SiLU(inplace=True))


@pytest.mark.parametrize("register", HOOKS)
def test_replacement_drops_no_hooks(register):
    stock = torch.nn.SiLU()
    getattr(stock, register)(lambda *given: None)
    assert applies(stock) == "SiLU has hooks, which a drop-in would not call"
    with pytest.raises(TypeError, match="module: SiLU has hooks, which a drop-in would not call"):
        build(stock)


def test_the_module_says_what_it_was_given():
    ours = MyTechnique(level="native")
    assert repr(ours) == "MyTechnique(beta=1.0, level='native')"
    assert repr(MyTechnique(0.5)) == "MyTechnique(beta=0.5)"
