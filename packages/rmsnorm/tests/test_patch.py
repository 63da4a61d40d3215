"""`patch`: norms are found by what they compute, and what computes something else is left alone."""

import functools

import pytest
import torch

from kernel_pytorch import rmsnorm
from kernel_pytorch.rmsnorm import RMSNorm, unpatch
from kernel_pytorch.rmsnorm.levels import LADDER

patch = functools.partial(rmsnorm.patch, gpu_bound=True)


@pytest.fixture(autouse=True)
def ours(monkeypatch):
    """Let the function compute on a CPU too, where a patched module runs its class's own forward."""
    monkeypatch.setattr(LADDER, "is_native", lambda function, x: False)


class Llama(torch.nn.Module):
    """As Llama, Mistral and Qwen have it: rounded before the weight."""

    def __init__(self, n=16, eps=1e-5):
        super().__init__()
        self.weight, self.variance_epsilon = torch.nn.Parameter(torch.rand(n) + 0.5), eps

    def forward(self, hidden_states):
        x = hidden_states.float()
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * x.to(hidden_states.dtype)


class Counted(Llama):
    """The same, and how often its own forward ran."""

    calls = 0

    def forward(self, hidden_states):
        Counted.calls += 1
        return super().forward(hidden_states)


class Gemma(torch.nn.Module):
    """Weights around zero, rounded at the end."""

    def __init__(self, n=16, eps=1e-6):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.rand(n) - 0.5), eps

    def forward(self, x):
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * (1.0 + self.weight.float())).type_as(x)


class MeanRMSNorm(Llama):
    """A mutant: the mean of magnitudes."""

    def forward(self, x):
        return self.weight * x / (x.abs().mean(-1, keepdim=True) + self.variance_epsilon)


class TwiceRMSNorm(Llama):
    """A mutant: eps counted twice."""

    def forward(self, x):
        self = type("Other", (), {"weight": self.weight, "variance_epsilon": 1e-1})()
        return Llama.forward(self, x)


class TwoRMSNorm(Llama):
    """Takes another argument."""

    def forward(self, x, gate):
        return Llama.forward(self, x) * gate


class ScaledRMSNorm(Llama):
    """A mutant: 1 % too large."""

    def forward(self, x):
        return 1.01 * super().forward(x)


class OutsideRMSNorm(Llama):
    """A mutant: eps outside of the root, which random numbers of size 1 do not show."""

    def forward(self, x):
        return self.weight * (x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon))


class DroppingRMSNorm(Llama):
    """A mutant: something happens in training alone."""

    def forward(self, x):
        return torch.nn.functional.dropout(super().forward(x), 0.5, self.training)


FOUND = {
    "Llama": (Llama, "rms_norm, offset 0, casting 'llama'"),
    "Gemma": (Gemma, "rms_norm, offset 1, casting 'gemma'"),
    "PyTorch": (lambda: torch.nn.RMSNorm(16, 1e-6), "rms_norm, offset 0, casting 'gemma'"),
}


@pytest.mark.parametrize("name", FOUND)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_found_by_what_it_computes(name, dtype, device):
    build, by = FOUND[name]
    model = torch.nn.Sequential(build()).to(device, dtype)
    x = torch.randn(7, 16, device=device, dtype=dtype, requires_grad=True)
    dy = torch.randn_like(x)
    stock = model(x), *torch.autograd.grad(model(x), [x, model[0].weight], dy)
    assert patch(model).replaced == {"0": by}
    ours = model(x), *torch.autograd.grad(model(x), [x, model[0].weight], dy)
    for a, b in zip(ours, stock, strict=True):  # gradients in 16 bits are rounded at other places
        largest = float(b.detach().abs().max())
        torch.testing.assert_close(a, b, rtol=0.0, atol=largest * (1e-6 if dtype == torch.float32 else 1e-2))
    unpatch(model)
    assert torch.equal(model(x), stock[0])


MUTANTS = [MeanRMSNorm, TwiceRMSNorm, TwoRMSNorm, ScaledRMSNorm, OutsideRMSNorm, DroppingRMSNorm]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_what_computes_something_else_is_left_alone(mutant):
    report = patch(torch.nn.Sequential(mutant()).eval())
    assert report.replaced == {}
    assert report.left == {"0": "it computes something else than rms_norm"}


def test_other_modules_are_not_spoken_of():
    model = torch.nn.Sequential(torch.nn.LayerNorm(4, bias=False), torch.nn.Linear(4, 4, bias=False), RMSNorm(4))
    report = patch(model)
    assert not report.replaced
    assert not report.left


def test_what_has_no_weight_or_no_eps_is_left_alone_with_the_reason():
    report = patch(torch.nn.Sequential(torch.nn.RMSNorm(4), torch.nn.RMSNorm(4, 1e-6, elementwise_affine=False)))
    assert report.left["0"] == "it must have a weight (N,), an eps that is a float, and no buffers"
    assert not report.replaced


def test_what_is_changed_afterwards_counts():
    norm = Llama()
    patch(norm)
    norm.variance_epsilon = 0.5
    x = torch.randn(3, 16)
    torch.testing.assert_close(norm(x), Llama.forward(norm, x))
    scaled = Llama()
    scaled.register_buffer("scale", torch.ones(()))
    assert not patch(scaled).replaced


def test_autocast_over_16_bit_weights_is_the_class_own():
    norm = Llama().bfloat16()
    x = torch.randn(3, 16, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        stock = norm(x)
        patch(norm)
        assert torch.equal(norm(x), stock)


def test_the_seed_of_the_user_stays():
    model, before = torch.nn.Sequential(Llama()), torch.get_rng_state()
    patch(model)
    assert torch.equal(torch.get_rng_state(), before)


def test_mixed_dtypes_are_rounded_as_the_class_does():
    model = torch.nn.Sequential(Llama())
    x = torch.randn(3, 16, dtype=torch.bfloat16)
    stock = model(x)
    patch(model)
    assert torch.equal(model(x), stock)
    assert model(x).dtype == torch.float32


def test_keywords_go_to_the_class():
    norm = Llama()
    x = torch.randn(3, 16)
    stock = norm(x)
    patch(norm)
    assert torch.equal(norm(hidden_states=x), stock)


def test_it_is_known_on_any_device():
    model = Llama().to("meta")
    assert patch(model).replaced


@pytest.mark.parametrize("default", ["native", "torchscript"])
def test_on_a_cpu_the_class_computes_where_the_default_is_native(default, monkeypatch):
    monkeypatch.undo()
    model, x, asked = Counted(), torch.randn(3, 16), []
    patch(model)
    Counted.calls = 0
    LADDER.forget()
    monkeypatch.setattr(LADDER, "default", lambda *of: asked.append(of) or default)
    torch.testing.assert_close(model(x), Llama.forward(model, x))
    for _ in range(3):
        model(x)
    LADDER.forget()
    assert Counted.calls == (4 if default == "native" else 0)
    assert len(asked) == (1 if default == "native" else 3)  # what was found is remembered


@pytest.mark.parametrize("training", [False, True])
def test_compiled_inference_is_the_class_own(training, monkeypatch):
    """TorchInductor makes faster kernels of that."""
    monkeypatch.undo()
    model, x, nodes = torch.nn.Sequential(Llama()), torch.randn(3, 16), []

    def backend(graph, inputs):
        nodes.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    patch(model)
    torch._dynamo.reset()
    with torch.set_grad_enabled(training):
        found = torch.compile(model, fullgraph=True, backend=backend)(x)
    torch.testing.assert_close(found, Llama.forward(model[0], x))
    assert any("rms_norm" in node for node in nodes) == training


def test_a_norm_with_a_kernel_of_pytorch_is_left_alone_unless_the_gpu_is_the_limit():
    model = torch.nn.Sequential(torch.nn.RMSNorm(16, eps=1e-6), Llama())
    report = rmsnorm.patch(model)
    assert list(report.replaced) == ["1"]
    assert "patch(model, gpu_bound=True)" in report.left["0"]
    assert list(patch(model).replaced) == ["0", "1"]
