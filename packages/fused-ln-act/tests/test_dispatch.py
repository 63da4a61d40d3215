"""Which level a call gets where something else is at work: transforms, devices without data, limits of a compiler."""

import pytest
import torch
from torch.autograd import forward_ad

from kernel_pytorch.fused_ln_act import MLP, GatedMLP, LinearAct, bias_act, layer_norm, softmax, swiglu
from kernel_pytorch.fused_ln_act.levels import default_level_of

FUNCTIONS = {
    "layer_norm": layer_norm,
    "swiglu": swiglu,
    "softmax": lambda x: softmax(x, 0.5),
    "bias_act": lambda x: bias_act(x, None, "gelu"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_forward_mode_has_a_default(name, device):
    """Kernels have no rule for it, PyTorch's operators do."""
    function = FUNCTIONS[name]
    x, direction = (torch.randn(4, 8, device=device, dtype=torch.bfloat16) for _ in range(2))
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(function(forward_ad.make_dual(x, direction))).tangent
    _, expected = torch.func.jvp(function, (x,), (direction,))
    assert tangent is not None
    torch.testing.assert_close(tangent, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("build", [LinearAct, MLP, GatedMLP])
def test_no_data_is_no_obstacle(build):
    """As in torch.nn, where a model is built on "meta" to see its shapes."""
    module = build(8, 16, "gelu").to("meta")
    assert module(torch.randn(6, 8, device="meta")).shape == module.to_empty(device="cpu")(torch.zeros(6, 8)).shape


def test_the_limit_of_a_compiler_says_what_to_do():
    x = torch.randn(2, 8)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=1):
        bias_act(x, None, "relu", level="compile")
        with pytest.raises(RuntimeError, match=r"'compile' of bias_act.*at most 1 times.*recompile_limit"):
            bias_act(x, None, "identity", level="compile")
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_softmax_alone_is_pytorchs_own_on_a_cpu(dtype, monkeypatch):
    """One operator, which there is nothing to fuse with, whatever the default is with a scale or a mask."""
    x, called = torch.randn(4, 8, dtype=dtype), []
    own = torch.nn.functional.softmax
    monkeypatch.setattr(torch.nn.functional, "softmax", lambda *arguments: called.append(1) or own(*arguments))
    assert torch.equal(softmax(x), own(x, -1))
    assert called == [1]
    softmax(x, mask=torch.ones(8, dtype=torch.bool))
    assert called == [1] or default_level_of("softmax", x.device, dtype, 0) == "native"
