"""The modules of the norm."""

import pytest
import torch

from kernel_pytorch.fused_ln_act import AddLayerNorm, LayerNorm, LayerNormAct


def randomised(module):
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module


@pytest.mark.parametrize("level", [None, "triton"])
@pytest.mark.parametrize("shape", [8, (3, 8)])
@pytest.mark.parametrize(("affine", "bias"), [(True, True), (True, False), (False, False)])
def test_equals_the_stock_module(shape, affine, bias, level, device):
    torch.manual_seed(0)
    stock = randomised(torch.nn.LayerNorm(shape, 1e-3, affine, bias, device=device))
    ours = LayerNorm(shape, 1e-3, affine, bias, device=device, level=level)
    ours.load_state_dict(stock.state_dict())
    x = torch.randn(5, 3, 8, device=device) * 1e-2  # small enough for eps to matter
    torch.testing.assert_close(ours(x), stock(x))
    assert isinstance(ours, torch.nn.LayerNorm)
    assert list(ours.state_dict()) == list(stock.state_dict())


def test_from_torch_shares_the_parameters_and_goes_back():
    stock = torch.nn.LayerNorm(8, 1e-3, bias=False).eval()
    ours = LayerNorm.from_torch(stock)
    assert type(ours) is LayerNorm
    assert ours.weight is stock.weight
    assert ours.bias is None
    assert (ours.training, ours.eps) == (False, 1e-3)
    back = ours.to_torch()
    assert type(back) is torch.nn.LayerNorm
    assert back.weight is stock.weight


@pytest.mark.parametrize("level", [None, "triton"])
@pytest.mark.parametrize("activation", [torch.nn.GELU(), torch.nn.GELU("tanh"), torch.nn.SiLU(), torch.nn.Tanh()])
def test_layer_norm_act_takes_over_a_sequence(activation, level, device):
    norm = randomised(torch.nn.LayerNorm(8, device=device))
    stock = torch.nn.Sequential(norm, activation, torch.nn.Dropout(0.3)).eval()
    ours = LayerNormAct.from_torch(stock, level=level)
    x = torch.randn(5, 8, device=device)
    torch.testing.assert_close(ours(x), stock(x))
    assert (ours.weight is norm.weight, ours.p, ours.training) == (True, 0.3, False)
    back = ours.to_torch()
    assert [type(part) for part in back] == [type(part) for part in stock]
    torch.testing.assert_close(back(x), stock(x))


def test_layer_norm_act_drops_in_training_only(device):
    module = LayerNormAct(64, "sigmoid", p=0.5, device=device, level="reference")
    x = torch.randn(32, 64, device=device)
    assert 0.4 < (module(x) == 0).float().mean() < 0.6
    assert (module.eval()(x) != 0).all()


@pytest.mark.parametrize("level", [None, "triton"])
def test_add_layer_norm(level, device):
    stock = randomised(torch.nn.LayerNorm(8, device=device))
    ours = AddLayerNorm.from_torch(stock, p=0.5, level=level).eval()
    x, residual = torch.randn(5, 8, device=device), torch.randn(5, 8, device=device)
    y, h = ours(x, residual)
    assert torch.equal(h, x + residual)
    torch.testing.assert_close(y, stock(x + residual))
    ours.train()
    dropped = ours(x, torch.zeros_like(x))[1]
    assert bool(((dropped == 0) | torch.isclose(dropped, 2 * x)).all())
    assert list(ours.state_dict()) == list(stock.state_dict())


BAD = {
    "norm": (
        lambda: LayerNorm.from_torch(torch.nn.Linear(2, 2)),
        TypeError,
        "Linear; it must be a torch.nn.LayerNorm",
    ),
    "sequence": (
        lambda: LayerNormAct.from_torch(torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.ELU())),
        TypeError,
        "module: given LayerNorm, ELU; it must be torch.nn.Sequential",
    ),
    "too long": (
        lambda: LayerNormAct.from_torch(
            torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.ReLU(), torch.nn.Linear(4, 4))
        ),
        TypeError,
        "module: given LayerNorm, ReLU, Linear",
    ),
    "another forward": (
        lambda: LayerNorm.from_torch(type("Scaled", (torch.nn.LayerNorm,), {"forward": lambda self, x: x})(4)),
        TypeError,
        "Scaled; it must be a torch.nn.LayerNorm, with the forward of that",
    ),
    "alone": (lambda: LayerNormAct.from_torch(torch.nn.LayerNorm(4)), TypeError, "module: given LayerNorm; it must be"),
    "activation": (lambda: LayerNormAct(4, "swish"), ValueError, "activation: given 'swish'"),
    "no stock module": (lambda: LayerNormAct(4, "quick_gelu").to_torch(), TypeError, "'quick_gelu' has no module"),
    "probability": (lambda: AddLayerNorm(4, p=1.0), ValueError, "p: given 1.0"),
    "no affine": (lambda: AddLayerNorm(4, p=2.0, elementwise_affine=False), ValueError, "p: given 2.0"),
    "level": (lambda: LayerNorm(4, level="tritn"), ValueError, "level: given 'tritn'"),
    "shape": (lambda: LayerNorm(8)(torch.randn(2, 7)), ValueError, r"x: shape is \(2, 7\); its last dim.*\(8,\)"),
    "no tensor": (lambda: LayerNorm(8)(None), TypeError, "x: given NoneType"),
    "residual": (
        lambda: AddLayerNorm(8)(torch.randn(2, 8), torch.randn(2, 7)),
        ValueError,
        r"residual: shape is \(2, 7\)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_names_the_argument(name):
    call, error, message = BAD[name]
    with pytest.raises(error, match=message):
        call()


def test_shown():
    assert "activation='gelu', p=0.1" in repr(LayerNormAct(4, "gelu", 0.1))
    assert "level='native'" in repr(LayerNorm(4, level="native"))
