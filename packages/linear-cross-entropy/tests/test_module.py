"""The modules."""

import pytest
import torch

from kernel_pytorch.linear_cross_entropy import CrossEntropyLoss, LinearCrossEntropy, linear_cross_entropy

HOOKS = [
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
]


@pytest.mark.parametrize("level", [None, "reference", "triton"])
@pytest.mark.parametrize("bias", [True, False])
def test_the_head_is_a_linear_layer_and_the_loss(bias, level, device):
    torch.manual_seed(0)
    stock = torch.nn.Linear(8, 30, bias=bias, device=device)
    ours = LinearCrossEntropy.from_torch(stock, level=level)
    hidden, target = torch.randn(5, 3, 8, device=device), torch.randint(30, (5, 3), device=device)
    expected = torch.nn.functional.cross_entropy(stock(hidden).flatten(0, 1), target.flatten())
    torch.testing.assert_close(ours(hidden, target), expected)
    torch.testing.assert_close(ours(hidden), stock(hidden))
    assert list(ours.state_dict()) == list(stock.state_dict())


def test_parameters_are_shared_and_go_back():
    stock = torch.nn.Linear(8, 30).eval()
    ours = LinearCrossEntropy.from_torch(stock, softcap=2.0, z_loss=1e-4, chunk=7)
    assert ours.weight is stock.weight
    assert ours.bias is stock.bias
    assert not ours.training
    back = ours.to_torch()
    assert type(back) is torch.nn.Linear
    assert back.weight is stock.weight
    assert not back.training


def test_all_of_its_options_arrive():
    torch.manual_seed(0)
    options = {
        "ignore_index": 3,
        "label_smoothing": 0.1,
        "z_loss": 1e-2,
        "softcap": 1.0,
        "reduction": "none",
        "chunk": 5,
    }
    ours = LinearCrossEntropy(8, 30, **options)
    hidden, target = torch.randn(9, 8), torch.randint(30, (9,))
    target[4] = 3
    assert torch.equal(ours(hidden, target), linear_cross_entropy(hidden, ours.weight, target, **options))
    assert ours(hidden).abs().max() < 1.0
    assert "softcap=1.0" in repr(ours)
    assert "chunk=5" in repr(ours)


@pytest.mark.parametrize("level", [None, "reference", "triton"])
@pytest.mark.parametrize("shape", [(9,), (5, 9), (5, 9, 4), (2, 9, 3, 4)])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.2}, {"reduction": "none"}, {"ignore_index": 1}])
def test_equals_the_stock_loss(shape, options, level, device):
    torch.manual_seed(0)
    stock, ours = torch.nn.CrossEntropyLoss(**options), CrossEntropyLoss(**options, level=level)
    logits = torch.randn(shape, device=device, requires_grad=True)
    target = torch.randint(9, shape[:1] + shape[2:] if len(shape) > 1 else (), device=device)
    target = torch.where(target == 1, 2, target) if len(shape) == 1 else target
    for a, b in zip(
        *((loss(logits, target), *torch.autograd.grad(loss(logits, target).sum(), logits)) for loss in (ours, stock)),
        strict=True,
    ):
        torch.testing.assert_close(a, b)
    assert isinstance(ours, torch.nn.CrossEntropyLoss)


def test_what_computes_something_else_is_refused():
    """A head with a forward of its own, as adapters and quantised layers have, would lose it in silence."""
    scaled = type("Scaled", (torch.nn.Linear,), {"forward": lambda self, x: 7.0 * torch.nn.Linear.forward(self, x)})
    with pytest.raises(TypeError, match=r"given Scaled; it must be a torch\.nn\.Linear, no subclass"):
        LinearCrossEntropy.from_torch(scaled(4, 9))
    normed = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(4, 9))
    with pytest.raises(TypeError, match="module: given ParametrizedLinear; it must be"):
        LinearCrossEntropy.from_torch(normed)
    for options in ({"bias": False}, {"dtype": torch.bfloat16}, {"device": "cpu"}):
        with pytest.raises(TypeError, match=r"it is that of the module, so leave it out"):
            LinearCrossEntropy.from_torch(torch.nn.Linear(4, 9), **options)


@pytest.mark.parametrize("softcap", [1e39, 1e-46])
def test_a_cap_that_float32_cannot_divide_by_is_refused(softcap):
    with pytest.raises(ValueError, match=r"softcap: given .*; allowed is what float32 divides by"):
        LinearCrossEntropy(4, 9, softcap=softcap)


@pytest.mark.parametrize("register", HOOKS)
def test_hooks_are_not_dropped(register):
    stock = torch.nn.Linear(4, 9)
    assert LinearCrossEntropy.from_torch(stock) is not None
    getattr(stock, register)(lambda *given: None)
    with pytest.raises(TypeError, match="module: Linear has hooks, which a drop-in would not call"):
        LinearCrossEntropy.from_torch(stock)


@pytest.mark.parametrize("parameter", ["weight", "bias"])
def test_a_parameter_that_is_computed_is_not_taken_over(parameter):
    """As a hypernetwork makes it."""
    stock = torch.nn.Linear(4, 9)
    computed = getattr(stock, parameter).detach()
    delattr(stock, parameter)
    setattr(stock, parameter, computed)
    with pytest.raises(TypeError, match=f"module: the {parameter} of Linear is made of other tensors"):
        LinearCrossEntropy.from_torch(stock)


def test_weights_of_classes_are_not_dropped():
    with pytest.raises(ValueError, match="weight: given Tensor; allowed is None"):
        CrossEntropyLoss(torch.ones(3))
