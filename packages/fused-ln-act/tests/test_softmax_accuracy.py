"""The gradient of softmax in 16 bits, next to that of PyTorch's own operators."""

import pytest
import torch

from kernel_pytorch.fused_ln_act import levels, softmax


def gradient(level, x, dy):
    x = x.detach().clone().requires_grad_()
    return torch.autograd.grad(softmax(x, 0.125, level=level), x, dy)[0].double()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("common", [0.0, 10.0])
@pytest.mark.parametrize("spread", [0.1, 1.0, 4.0, 10.0])
def test_the_default_on_a_cpu_errs_no_more_than_native(dtype, common, spread):
    torch.manual_seed(0)
    x, dy = (torch.randn(64, 1024) * spread * 8).to(dtype), (torch.randn(64, 1024) + common).to(dtype)
    truth = gradient("reference", x.double(), dy.double())
    ours, native = ((gradient(level, x, dy) - truth).norm() for level in (None, "native"))
    assert ours <= 1.05 * native


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mask", [None, "bool", "half", "float"])
def test_whether_a_gradient_is_wanted_changes_no_bit(dtype, mask):
    if levels.LADDER.unavailable("cuda", torch.device("cpu"), dtype):
        pytest.skip("kernel_pytorch.cuda_ops is not here")
    torch.manual_seed(0)
    x = torch.randn(7, 129, dtype=dtype)
    masks = {None: None, "bool": x > -1, "half": torch.randn(129).to(dtype), "float": torch.randn(7, 129)}
    trained = x.clone().requires_grad_()
    y = softmax(trained, 0.5, masks[mask], level="cuda")
    expected = softmax(x, 0.5, masks[mask], level="cuda")
    assert y.dtype == expected.dtype
    assert torch.equal(y, expected)
    assert torch.autograd.grad(y.sum(), trained)[0].dtype == dtype
