"""The drop-in module, and what it is put in the place of."""

import pytest
import torch

from kernel_pytorch.my_technique import MyTechnique, my_technique
from kernel_pytorch.my_technique.levels import LADDER
from kernel_pytorch.my_technique.replacements import patch, unpatch

LEVELS = LADDER.levels("my_technique")


@pytest.mark.parametrize("level", [None, *LEVELS])
def test_equals_the_stock_module(level, device):
    x = torch.randn(5, 3, 8, device=device)
    ours = MyTechnique(level=level)
    assert isinstance(ours, torch.nn.SiLU)
    torch.testing.assert_close(ours(x), torch.nn.SiLU()(x))
    expected = my_technique(x, beta=0.3, level=level)
    assert torch.equal(MyTechnique(0.3, level=level)(x), expected)


def test_patch_goes_there_and_back():
    model = torch.nn.Sequential(torch.nn.SiLU(), torch.nn.SiLU(inplace=True), torch.nn.ReLU())
    x = torch.randn(5, 8)
    stock = model(x.clone())
    report = patch(model)
    assert report.replaced == {"0": "my_technique"}
    assert report.left == {"1": "it writes into its input, which this package never does"}
    torch.testing.assert_close(model(x.clone()), stock)
    unpatch(model)
    assert all("forward" not in vars(module) for module in model.modules())


def test_the_module_says_what_it_was_given():
    ours = MyTechnique(level="native")
    assert repr(ours) == "MyTechnique(beta=1.0, level='native')"
    assert repr(MyTechnique(0.5)) == "MyTechnique(beta=0.5)"
