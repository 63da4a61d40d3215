"""The drop-in module and its replacements."""

import pytest
import torch

from kernel_pytorch.rmsnorm import RMSNorm
from kernel_pytorch.rmsnorm.replacements import applies, build, restore

HOOKS = [
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
]


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


def test_replacement_shares_the_weight_and_goes_back():
    stock = torch.nn.RMSNorm(8, 1e-5).eval()
    ours = build(stock)
    assert isinstance(ours, RMSNorm)
    assert ours.weight is stock.weight
    assert not ours.training
    assert ours.eps == 1e-5
    back = restore(ours)
    assert type(back) is torch.nn.RMSNorm
    assert back.weight is stock.weight


def test_replacement_leaves_subclasses_alone():
    class Other(torch.nn.RMSNorm):
        pass

    assert applies(torch.nn.RMSNorm(4)) is None
    assert "Other may compute something else" in applies(Other(4))


@pytest.mark.parametrize("register", HOOKS)
def test_replacement_drops_no_hooks(register):
    stock = torch.nn.RMSNorm(8)
    getattr(stock, register)(lambda *given: None)
    assert applies(stock) == "RMSNorm has hooks, which a drop-in would not call"
    with pytest.raises(TypeError, match="module: RMSNorm has hooks, which a drop-in would not call"):
        build(stock)


def test_replacement_takes_over_no_weight_that_is_computed():
    """As a hypernetwork makes it."""
    stock = torch.nn.RMSNorm(8)
    weight = stock.weight.detach()
    del stock.weight
    stock.weight = weight
    assert applies(stock) == "the weight of RMSNorm is made of other tensors, and no torch.nn.Parameter"
    with pytest.raises(TypeError, match="module: the weight of RMSNorm is made of other tensors"):
        build(stock)


def test_replacement_needs_no_weight():
    assert applies(torch.nn.RMSNorm(8, elementwise_affine=False)) is None
