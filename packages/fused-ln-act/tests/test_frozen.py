"""What wants no gradient, and what is no number."""

import pytest
import torch

from kernel_pytorch import fused_ln_act

ADDING = {
    "add_layer_norm": {},
    "add_layer_norm_act": {"activation": "gelu"},
    "add_rms_norm_act": {"activation": "gelu"},
}
X = torch.linspace(-2.0, 2.0, 48).view(3, 16)


@pytest.mark.parametrize("level", ["reference", "native", "triton", "cuda"])
@pytest.mark.parametrize("name", ADDING)
def test_the_sum_of_frozen_tensors_wants_no_gradient(name, level):
    reason = fused_ln_act.levels.LADDER.unavailable(level, X.device, X.dtype)
    if reason is not None:
        pytest.skip(reason)
    function = getattr(fused_ln_act, name)
    weight = torch.ones(16, requires_grad=True)
    y, h = function(X, X, weight, level=level, **ADDING[name])
    assert y.requires_grad
    assert not h.requires_grad
    y.sum().backward()
    assert weight.grad is not None
    for trained in ((X.clone().requires_grad_(), X), (X, X.clone().requires_grad_())):
        assert function(*trained, weight, level=level, **ADDING[name])[1].requires_grad


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fused_ln_act.layer_norm(X, eps=True), "eps: given bool; it must be a Python number"),
        (lambda: fused_ln_act.add_layer_norm(X, X, dropout_p=True), "dropout_p: given bool"),
        (lambda: fused_ln_act.swiglu(X, alpha=True), "alpha: given bool"),
        (lambda: fused_ln_act.swiglu(X, limit=True), "limit: given bool"),
        (lambda: fused_ln_act.softmax(X, True), "scale: given bool"),
        (lambda: fused_ln_act.bias_dropout_add(X, None, X, False), "p: given bool"),
        (
            lambda: fused_ln_act.linear_act(X, X, None, "gelu", save_preactivation=1),
            "save_preactivation: given 1; it must be True or False",
        ),
        (
            lambda: fused_ln_act.gated_mlp(X, torch.ones(8, 16), torch.ones(16, 4), recompute=0),
            "recompute: given 0; it must be True or False",
        ),
    ],
)
def test_a_bool_is_no_number_and_a_number_no_bool(call, message):
    with pytest.raises(TypeError, match=f"^{message}"):
        call()
