"""Layer norm of one column: nothing is left without the mean, so y is the bias and every gradient but its own is zero.

What is made of PyTorch's own kernels leaves what they round, times 1 / sqrt(eps).
"""

import pytest
import torch

from kernel_pytorch.fused_ln_act import add_layer_norm, layer_norm, levels


@pytest.mark.parametrize("level", ["triton", "cuda"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_of_one_column_nothing_is_left(level, dtype, device):
    device = torch.device(device)
    reason = levels.LADDER.unavailable(level, device, dtype)
    if reason is not None:
        pytest.skip(reason)
    generator = torch.Generator(device).manual_seed(0)
    x, residual, dy, dh = (torch.randn(67, 1, device=device, generator=generator).to(dtype) for _ in range(4))
    weight, bias = (torch.full((1,), value, device=device, dtype=dtype) for value in (1.37, 0.5))
    own = [tensor.requires_grad_() for tensor in (x, residual, weight, bias)]
    y = layer_norm(x, weight, bias, level=level)
    dx, dweight, dbias = torch.autograd.grad(y, (x, weight, bias), dy)
    assert torch.equal(y, bias.expand_as(y))
    assert not dx.any()
    assert not dweight.any()
    assert dbias.any()
    y, h = add_layer_norm(*own, level=level)
    dx, dresidual = torch.autograd.grad((y, h), (x, residual), (dy, dh))
    assert torch.equal(y, bias.expand_as(y))
    assert torch.equal(dx, dh)
    assert torch.equal(dresidual, dh)
