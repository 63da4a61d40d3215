"""ConvNet: layouts that survive, and norms that are gone after folding without a change of numbers."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernel_pytorch.models import ConvNet, fold


class Operators(TorchDispatchMode):
    """The names of all operators, and the layouts of what convolutions return."""

    def __init__(self):
        super().__init__()
        self.names, self.layouts = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **kwargs or {})
        self.names.append(function.__name__)
        if "convolution" in function.__name__:
            self.layouts.append(found.is_contiguous(memory_format=torch.channels_last))
        return found

    @property
    def norms(self):
        return sum("batch_norm" in name for name in self.names)


def model(dtype=torch.float32, **options):
    """With statistics as after training: at the start a fold would multiply by 1 and 0."""
    torch.manual_seed(0)
    network = ConvNet(3, 5, **{"widths": (8, 16), "depth": 2} | options).to(dtype)
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            for tensor, low in ((module.weight, 0.5), (module.bias, -0.5), (module.running_mean, -0.5)):
                torch.nn.init.uniform_(tensor, low, low + 1.0)
            torch.nn.init.uniform_(module.running_var, 0.5, 2.0)
    return network


def images(dtype=torch.float32, size=12):
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_folding_changes_no_number_but_by_rounding(dtype, tolerance):
    network, x = model(dtype).eval(), images(dtype)
    before = {name: value.clone() for name, value in network.state_dict().items()}
    expected, found = network(x), fold(network)(x)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert found.dtype == dtype
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())


def test_weights_are_folded_in_float64_and_rounded_once():
    network = model()
    expected = fold(copy.deepcopy(network).double()).state_dict()
    assert all(torch.equal(value, expected[name].float()) for name, value in fold(network).state_dict().items())


def test_no_norm_is_left_after_folding():
    network, x = model(), images()
    with Operators() as before:
        network.eval()(x)
    with Operators() as after:
        fold(network)(x)
    assert before.norms == before.names.count("convolution.default") == 10
    assert after.norms == 0
    assert after.names.count("convolution.default") == 10


def test_folding_is_of_evaluation_even_of_a_model_in_training():
    network, x = model().train(), images()
    folded = fold(network)
    assert network.training
    assert not folded.training
    torch.testing.assert_close(folded(x), copy.deepcopy(network).eval()(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(fold(folded)(x), folded(x))


@pytest.mark.parametrize("folded", [False, True])
def test_everything_stays_channels_last(folded, tmp_path):
    network = copy.deepcopy(model().eval())
    torch.save(network.state_dict(), tmp_path / "weights.pt")
    network.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    network = fold(network) if folded else network
    weights = [p for p in network.parameters() if p.dim() == 4]
    assert all(p.is_contiguous(memory_format=torch.channels_last) for p in weights)
    with Operators() as used:
        network(images())
    assert used.layouts
    assert all(used.layouts)


def test_gradients_are_those_of_float64():
    network = model()
    wide = copy.deepcopy(network).double()
    found = torch.autograd.grad(network(images()).square().sum(), [*network.parameters()])
    expected = torch.autograd.grad(wide(images(torch.float64)).square().sum(), [*wide.parameters()])
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-3, atol=1e-3 * theirs.abs().max().item())


@pytest.mark.parametrize("size", [1, 7, 12], ids=["one position", "odd", "even"])
def test_images_of_any_size(size):
    assert model(stem_stride=2).eval()(images(size=size)).shape == (2, 5)


def test_it_compiles_whole_and_exports():
    network, x = fold(model()), images()
    expected = network(x)
    torch.testing.assert_close(torch.compile(network, fullgraph=True, backend="aot_eager")(x), expected)
    torch.testing.assert_close(torch.export.export(network, (x,)).module()(x), expected)


def test_a_network_needs_stages():
    with pytest.raises(ValueError, match="widths"):
        ConvNet(3, 5, widths=())
