"""What wants no gradient, and what is no number."""

import pytest
import torch

from kernel_pytorch import rmsnorm

X = torch.linspace(-2.0, 2.0, 48).view(3, 16)


@pytest.mark.parametrize("level", ["reference", "native", "triton", "cuda"])
def test_the_sum_of_frozen_tensors_wants_no_gradient(level):
    reason = rmsnorm.levels.LADDER.unavailable(level, X.device, X.dtype)
    if reason is not None:
        pytest.skip(reason)
    weight = torch.ones(16, requires_grad=True)
    y, h = rmsnorm.add_rms_norm(X, X, weight, level=level)
    assert y.requires_grad
    assert not h.requires_grad
    y.sum().backward()
    assert weight.grad is not None
    for trained in ((X.clone().requires_grad_(), X), (X, X.clone().requires_grad_())):
        assert rmsnorm.add_rms_norm(*trained, weight, level=level)[1].requires_grad


@pytest.mark.parametrize("name", ["eps", "offset"])
def test_a_bool_is_no_number(name):
    with pytest.raises(TypeError, match=f"^{name}: given bool; it must be a Python number"):
        rmsnorm.rms_norm(X, **{name: True})
