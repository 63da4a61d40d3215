"""Which level a call gets where something else is at work: transforms, devices without data, limits of a compiler."""

import pytest
import torch
from torch.autograd import forward_ad

from kernel_pytorch.fused_ln_act import MLP, GatedMLP, LinearAct, bias_act, layer_norm, softmax, swiglu
from kernel_pytorch.fused_ln_act.levels import LADDER

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
    # jvp of torch 2.11 widens the tangent of F.layer_norm on CUDA.
    torch.testing.assert_close(tangent, expected.to(x.dtype), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("build", [LinearAct, MLP, GatedMLP])
def test_no_data_is_no_obstacle(build):
    """As in torch.nn, where a model is built on "meta" to see its shapes."""
    module = build(8, 16, "gelu").to("meta")
    assert module(torch.randn(6, 8, device="meta")).shape == module.to_empty(device="cpu")(torch.zeros(6, 8)).shape


@pytest.mark.parametrize("limit", ["recompile_limit", "accumulated_recompile_limit"])
def test_the_limit_of_a_compiler_says_what_to_do(limit):
    x = torch.randn(2, 8)
    torch._dynamo.reset()
    with torch._dynamo.config.patch({limit: 1}):
        bias_act(x, None, "relu", level="compile")
        with pytest.raises(RuntimeError, match=rf"'compile' of bias_act.*at most 1 times.*config\.{limit}, or forget"):
            bias_act(x, None, "identity", level="compile")
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("scale", "mask", "level"), [(1.0, None, "native"), (0.5, None, None), (1.0, torch.ones(8, dtype=torch.bool), None)]
)
def test_softmax_alone_is_pytorchs_own_on_a_cpu(scale, mask, level, monkeypatch):
    """One operator, which there is nothing to fuse with; with a scale or a mask the default decides."""
    asked = []
    chosen = LADDER.chosen
    monkeypatch.setattr(LADDER, "chosen", lambda *given, **options: asked.append(given[1]) or chosen(*given, **options))
    LADDER.forget()
    x = torch.randn(4, 8)
    torch.testing.assert_close(softmax(x, scale, mask), torch.softmax(scale * x, -1))
    assert asked == [level]
