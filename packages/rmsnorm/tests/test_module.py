"""The drop-in module."""

import re

import pytest
import torch

from kernel_pytorch.rmsnorm import RMSNorm, rms_norm
from kernel_pytorch.rmsnorm.levels import LADDER


@pytest.mark.parametrize("level", [None, "reference", "triton"])
@pytest.mark.parametrize("shape", [8, (8,), (3, 8)])
@pytest.mark.parametrize("eps", [None, 1e-5])
@pytest.mark.parametrize("affine", [True, False])
def test_equals_the_stock_module(shape, eps, affine, level, device):
    torch.manual_seed(0)
    stock = torch.nn.RMSNorm(shape, eps, affine, device=device)
    ours = RMSNorm(shape, eps, affine, device=device, level=level)
    if affine:
        torch.nn.init.normal_(stock.weight)
    ours.load_state_dict(stock.state_dict())
    x = torch.randn(5, 3, 8, device=device) * 1e-3  # small enough for eps to matter
    torch.testing.assert_close(ours(x), stock(x))
    assert isinstance(ours, torch.nn.RMSNorm)
    assert list(ours.state_dict()) == list(stock.state_dict())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_eps_none_is_the_stock_one_in_every_dtype(dtype):
    x = torch.full((2, 4), 1e-4, dtype=dtype)
    stock, ours = torch.nn.RMSNorm(4, dtype=dtype), RMSNorm(4, dtype=dtype)
    torch.testing.assert_close(ours(x), stock(x))


def test_wrong_shape_names_what_is_expected():
    with pytest.raises(ValueError, match=r"x: shape is \(2, 7\); its last dimensions must be \(8,\)"):
        RMSNorm(8)(torch.randn(2, 7))


@pytest.mark.parametrize("shape", [0, (0,), (3, 0), (0, 8), ()])
def test_nothing_to_normalise_is_refused_by_name(shape):
    with pytest.raises(ValueError, match=r"^normalized_shape: given \(.*\); it must be sizes of at least 1"):
        RMSNorm(shape)
    with pytest.raises(ValueError, match=r"^normalized_shape: given \(-1,\); it must be sizes of at least 1"):
        RMSNorm(-1, elementwise_affine=False)


def test_the_documented_levels_are_those_that_there_are():
    (text,) = re.findall(r"level: None for the default of this device, or (.*?)\.\n\n", rms_norm.__doc__, re.DOTALL)
    assert [name.strip('" \n') for name in text.split(",")] == list(LADDER.levels("rms_norm"))
