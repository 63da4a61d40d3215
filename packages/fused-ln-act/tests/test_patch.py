"""`patch`: feed-forwards, norms and activations are found by what they compute, and what differs is left alone."""

import functools

import pytest
import torch
from torch.nn import functional as F

from kernel_pytorch import fused_ln_act
from kernel_pytorch.fused_ln_act import unpatch
from kernel_pytorch.fused_ln_act.levels import LADDER

patch = functools.partial(fused_ln_act.patch, gpu_bound=True)


class Gated(torch.nn.Module):
    """As Llama has it."""

    def __init__(self, act=None):
        super().__init__()
        self.gate_proj, self.up_proj = (torch.nn.Linear(8, 12, bias=False) for _ in range(2))
        self.down_proj, self.act_fn = torch.nn.Linear(12, 8, bias=False), act or torch.nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Clamped(Gated):
    """A mutant: as gpt-oss, which small numbers do not show."""

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=7.0)) * self.up_proj(x).clamp(-7.0, 7.0))


class Dropping(Gated):
    """A mutant: something happens in training alone."""

    def forward(self, x):
        return F.dropout(super().forward(x), 0.5, self.training)


class Scaled(Gated):
    """A mutant: a parameter of its own, which is one at first."""

    def __init__(self):
        super().__init__()
        self.gamma = torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.gamma * super().forward(x)


class Behind(torch.nn.Module):
    """What stands behind a block in BERT."""

    def __init__(self, norm=torch.nn.LayerNorm, p=0.0):
        super().__init__()
        self.dense, self.LayerNorm, self.dropout = torch.nn.Linear(12, 8), norm(8), torch.nn.Dropout(p)

    def forward(self, hidden_states, input_tensor):
        return self.LayerNorm(self.dropout(self.dense(hidden_states)) + input_tensor)


class TwiceNorm(torch.nn.LayerNorm):
    def forward(self, x):
        return 2.0 * super().forward(x)


class NewGELUActivation(torch.nn.Module):
    """Written out, as transformers has it."""

    def forward(self, x):
        return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x.pow(3.0))))


class ClippedGELUActivation(torch.nn.Module):
    def forward(self, x):
        return F.gelu(x).clip(-10.0, 10.0)


@pytest.mark.parametrize(
    ("act", "name"),
    [
        (torch.nn.SiLU(), "swiglu"),
        (torch.nn.GELU(), "geglu"),
        (torch.nn.GELU("tanh"), "geglu, approximate 'tanh'"),
        (torch.nn.ReLU(), "reglu"),
    ],
)
def test_gated_feed_forwards(act, name):
    model, x = Gated(act), torch.randn(5, 8, requires_grad=True)
    stock = model(x), torch.autograd.grad(model(x).sum(), x)[0]
    assert patch(model).replaced == {"": name}
    torch.testing.assert_close((model(x), torch.autograd.grad(model(x).sum(), x)[0]), stock)
    model.act_fn = torch.nn.Tanh()
    torch.testing.assert_close(model(x), Gated.forward(model, x))
    unpatch(model)
    assert "forward" not in vars(model)


@pytest.mark.parametrize("mutant", [Clamped, Dropping, Scaled])
def test_feed_forwards_that_compute_something_else_are_left_alone(mutant):
    report = patch(mutant().eval())
    assert not report.replaced
    assert "" in report.left


def test_behind_a_block():
    model, x, residual = Behind(), torch.randn(5, 12), torch.randn(5, 8)
    stock = model(x, residual)
    assert patch(model).replaced[""] == "add_layer_norm"
    torch.testing.assert_close(model(x, residual), stock)
    torch.testing.assert_close(model(x, input_tensor=residual), stock)
    seen = []
    model.LayerNorm.register_forward_hook(lambda *given: seen.append(1))
    torch.testing.assert_close(model(x, residual), stock)
    assert seen
    model.LayerNorm = torch.nn.RMSNorm(8)
    model(x, residual)


def test_dropout_behind_a_block_is_its_module_s():
    model, x, residual = Behind(p=0.5), torch.randn(50, 12), torch.randn(50, 8)
    stock = model.eval()(x, residual)
    patch(model)
    torch.testing.assert_close(model(x, residual), stock)
    model.dropout.train()  # as Monte Carlo dropout has it
    assert not torch.allclose(model(x, residual), stock)
    model.train()
    model.dropout.eval()
    torch.testing.assert_close(model(x, residual), stock)
    model.dropout = torch.nn.Dropout(1.0)
    torch.testing.assert_close(model(x, residual), model.LayerNorm(residual))


def test_a_norm_of_another_class_behind_a_block_is_left_alone():
    assert not patch(Behind(TwiceNorm)).replaced


class GEGLU(torch.nn.Module):
    """As diffusers has it: one layer makes both halves."""

    def __init__(self):
        super().__init__()
        self.proj = torch.nn.Linear(8, 24)

    def forward(self, x):
        x, gate = self.proj(x).chunk(2, -1)
        return x * F.gelu(gate)


class Mlp(torch.nn.Module):
    """As timm has it."""

    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.fc2 = torch.nn.Linear(8, 12), torch.nn.GELU(), torch.nn.Linear(12, 8)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class Experts(torch.nn.Module):
    """As transformers has them."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj, self.down_proj = (torch.nn.Parameter(torch.zeros(2, 8, 8)) for _ in range(2))


def test_what_looks_alike_is_named_with_the_reason():
    model = torch.nn.Sequential(GEGLU(), Mlp(), Experts(), TwiceNorm(8), torch.nn.Sequential(torch.nn.Linear(4, 4)))
    report = patch(model)
    assert not report.replaced
    assert list(report.left) == ["0", "1", "2", "3"]
    assert "gate_proj, up_proj, down_proj" in report.left["0"] == report.left["1"]
    assert "several experts" in report.left["2"]
    assert "TwiceNorm" in report.left["3"]


def test_activations():
    model = torch.nn.Sequential(NewGELUActivation(), ClippedGELUActivation(), torch.nn.GELU())
    report = patch(model)
    assert report.replaced == {"0": "the activation 'gelu_tanh', as one operation"}
    assert report.left == {"1": "it is no activation that bias_act knows"}
    x = torch.randn(7, 3)
    torch.testing.assert_close(model[0](x), NewGELUActivation()(x))


def test_layer_norm_in_mixed_dtypes_is_the_class_own():
    model, x = torch.nn.LayerNorm(8), torch.randn(3, 8, dtype=torch.float64)
    assert patch(model).replaced == {"": "layer_norm"}
    with pytest.raises(RuntimeError, match="type"):
        model(x)
    torch.testing.assert_close(model(x.float()), F.layer_norm(x.float(), (8,)))


@pytest.mark.parametrize("default", ["native", "torchscript"])
def test_where_the_default_is_pytorchs_own_the_class_computes(default, monkeypatch):
    """A detour to the same operators costs the host; elsewhere the function that was found runs."""
    model = torch.nn.ModuleDict({"gated": Gated(), "norm": torch.nn.LayerNorm(8), "behind": Behind()})
    x, wide = torch.randn(3, 8), torch.randn(3, 12)
    calls = {"gated": (x,), "norm": (x,), "behind": (wide, x)}
    expected = {name: model[name](*given) for name, given in calls.items()}
    patch(model)
    LADDER._resolved.clear()
    monkeypatch.setattr(LADDER, "default", lambda *_: default)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        found = {name: model[name](*given) for name, given in calls.items()}
    LADDER._resolved.clear()
    for name in calls:
        torch.testing.assert_close(found[name], expected[name])
    scripted = {event.key for event in profiler.key_averages()} & {"aten::native_layer_norm", "aten::silu"}
    assert scripted == ({"aten::native_layer_norm", "aten::silu"} if default == "native" else set())


def test_norms_are_left_to_pytorch_unless_the_gpu_is_the_limit():
    model = torch.nn.Sequential(Gated(), torch.nn.LayerNorm(8), Behind())
    report = fused_ln_act.patch(model)
    assert report.replaced == {"0": "swiglu"}
    assert all("patch(model, gpu_bound=True)" in report.left[path] for path in ("1", "2", "2.LayerNorm"))
    assert set(patch(model).replaced) == {"0", "1", "2", "2.LayerNorm"}
