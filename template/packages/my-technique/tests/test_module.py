"""The module."""

import pytest
import torch

from kernel_pytorch.my_technique import MyTechnique, my_technique
from kernel_pytorch.my_technique.levels import LADDER


@pytest.mark.parametrize("level", [None, *LADDER.levels("my_technique")])
def test_is_the_function(level, device):
    x = torch.randn(5, 3, 8, device=device)
    expected = my_technique(x, beta=0.3, level=level)
    assert torch.equal(MyTechnique(0.3, level=level)(x), expected)


def test_the_module_says_what_it_was_given():
    ours = MyTechnique(2.0, level="native")
    assert repr(ours) == "MyTechnique(beta=2.0, level='native')"
    assert repr(MyTechnique(0.5)) == "MyTechnique(beta=0.5)"
