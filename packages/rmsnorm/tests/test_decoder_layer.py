"""`patch` in a decoder layer: the residual sum and the norm behind it are one operation, and other layers stay."""

import copy

import pytest
import torch

from kernel_pytorch.rmsnorm import decoder_layer, patch, unpatch
from kernel_pytorch.rmsnorm.levels import LADDER

BY = "add_rms_norm of its second norm"


class Norm(torch.nn.RMSNorm):
    """As Llama's."""

    def __init__(self, n):
        super().__init__(n, eps=1e-5)


class Around0(Norm):
    """As Gemma's: weights around zero."""

    def forward(self, x):
        y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * (1.0 + self.weight.float())).type_as(x)


class Attention(torch.nn.Module):
    """Mixes tokens; returns weights too, as transformers' do."""

    def __init__(self, n):
        super().__init__()
        self.proj, self.scale = torch.nn.Linear(n, n, bias=False), 1.0

    def forward(self, hidden_states, mask=None, **kwargs):
        mixed = self.proj(hidden_states).cumsum(-2)
        return mixed if mask is None else mixed * mask, None


class Layer(torch.nn.Module):
    """As Llama, Mistral, Qwen and Gemma 1 have it."""

    __module__ = "transformers.models.test"

    def __init__(self, norm=Norm, n=16):
        super().__init__()
        self.self_attn, self.mlp = Attention(n), torch.nn.Linear(n, n)
        self.input_layernorm, self.post_attention_layernorm = norm(n), norm(n)

    def forward(self, hidden_states, mask=None, **kwargs):
        residual = hidden_states
        hidden_states, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), mask=mask, **kwargs)
        hidden_states = residual + hidden_states
        residual = hidden_states
        return residual + self.mlp(self.post_attention_layernorm(hidden_states))


class Scaled(Layer):
    """A mutant: what Granite multiplies the blocks with."""

    def forward(self, hidden_states):
        h = hidden_states + 0.5 * self.self_attn(self.input_layernorm(hidden_states))[0]
        return h + 0.5 * self.mlp(self.post_attention_layernorm(h))


class PostNorm(Layer):
    """A mutant: the norm before the sum."""

    def forward(self, hidden_states):
        h = hidden_states + self.post_attention_layernorm(self.self_attn(self.input_layernorm(hidden_states))[0])
        return h + self.mlp(h)


class NoResidual(Layer):
    """A mutant: the second sum lacks."""

    def forward(self, hidden_states):
        h = hidden_states + self.self_attn(self.input_layernorm(hidden_states))[0]
        return self.mlp(self.post_attention_layernorm(h))


class Dropping(Layer):
    """A mutant: drops in training alone, by a function."""

    def forward(self, hidden_states):
        x = torch.nn.functional.dropout(hidden_states, 0.5, self.training)
        return Layer.forward(self, x)


class Biased(Layer):
    """A mutant: with a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(16))


class Deeper(Layer):
    """A mutant: with one more child."""

    def __init__(self):
        super().__init__()
        self.dropout = torch.nn.Dropout(0.0)


class Mapped(Layer):
    """Of another library, of whose forward too little is known."""

    __module__ = "mine"


class Gated(Layer):
    """A mutant: a keyword that scales what attention returns."""

    def forward(self, hidden_states, gate=None):
        x = self.self_attn(hidden_states=self.input_layernorm(hidden_states), gate=gate)[0]
        h = hidden_states + (x if gate is None else x * gate)
        return h + self.mlp(self.post_attention_layernorm(h))


class Elsewhere(Layer):
    """A mutant: a keyword that attention does not get."""

    def forward(self, hidden_states, mask=None, bias=None):
        h = hidden_states + self.self_attn(hidden_states=self.input_layernorm(hidden_states), mask=mask)[0]
        return h + self.mlp(self.post_attention_layernorm(h))


class WithWeights(Layer):
    """A mutant: returns weights if it shall."""

    def forward(self, hidden_states, output_attentions=False):
        found = self.self_attn(hidden_states=self.input_layernorm(hidden_states), output_attentions=output_attentions)
        h = hidden_states + found[0]
        y = h + self.mlp(self.post_attention_layernorm(h))
        return (y, found[1]) if output_attentions else y


class TakesTuples(Layer):
    """A mutant: of a feed-forward that returns more, as experts do, the first counts."""

    def forward(self, hidden_states):
        h = hidden_states + self.self_attn(hidden_states=self.input_layernorm(hidden_states))[0]
        y = self.mlp(self.post_attention_layernorm(h))
        return h + (y[0] if isinstance(y, tuple) else y)


class ByPlace(Layer):
    """A mutant: attention is not called by keyword."""

    def forward(self, hidden_states):
        h = hidden_states + self.self_attn(self.input_layernorm(hidden_states))[0]
        return h + self.mlp(self.post_attention_layernorm(h))


class Factor(Layer):
    """A mutant: a factor that is one today."""

    def __init__(self):
        super().__init__()
        self.residual_multiplier = 1.0

    def forward(self, hidden_states):
        x = self.self_attn(hidden_states=self.input_layernorm(hidden_states))[0]
        h = hidden_states + self.residual_multiplier * x
        return h + self.mlp(self.post_attention_layernorm(h))


MUTANTS = [Scaled, PostNorm, NoResidual, Dropping, Biased, Deeper, Mapped, Gated, Elsewhere, WithWeights, TakesTuples,
           ByPlace, Factor]  # fmt: skip


@pytest.fixture(autouse=True)
def fused(monkeypatch):
    """Let the function compute on a CPU too; how often it did."""
    calls, own = [], decoder_layer.add_rms_norm
    monkeypatch.setattr(LADDER, "is_native", lambda function, x: False)
    monkeypatch.setattr(decoder_layer, "add_rms_norm", lambda *x, **more: (calls.append(1), own(*x, **more))[1])
    return calls


def batch(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randn(2, 5, 16, dtype=dtype, requires_grad=True)


def outputs(layer, x, **given):
    y = layer(x, **given)
    torch.manual_seed(1)
    return y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], torch.randn_like(y))


@pytest.mark.parametrize("norm", [Norm, Around0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_numbers_and_gradients(norm, dtype, fused):
    layer, x = Layer(norm).to(dtype), batch(dtype)
    given = {"mask": torch.rand(5, 1).to(dtype)}
    stock = outputs(layer, x, **given)
    assert patch(layer).replaced[""] == BY
    ours = outputs(layer, x, **given)
    for a, b in zip(ours, stock, strict=True):
        largest = float(b.abs().max())
        torch.testing.assert_close(a, b, rtol=0.0, atol=largest * (1e-6 if dtype == torch.float32 else 2e-2))
    assert fused
    unpatch(layer)
    assert torch.equal(layer(x, **given), stock[0])


@pytest.mark.parametrize("mutant", MUTANTS)
def test_what_computes_something_else_is_left_alone(mutant, fused):
    layer, x = mutant().eval(), batch()
    stock = layer(x)
    assert set(patch(layer).replaced) == {"input_layernorm", "post_attention_layernorm"}
    torch.testing.assert_close(layer(x), stock)
    assert not fused


@pytest.mark.parametrize("gpu_bound", [False, True])
def test_a_layer_is_replaced_where_its_norm_is(gpu_bound):
    """PyTorch has a kernel for its own RMSNorm; the sum without the norm would only take time."""
    report = patch(Layer(norm=lambda n: torch.nn.RMSNorm(n, eps=1e-5)), gpu_bound=gpu_bound)
    assert ("" in report.replaced) is ("post_attention_layernorm" in report.replaced) is gpu_bound


def test_a_norm_that_is_not_known_is_left_alone():
    layer = Layer()
    layer.post_attention_layernorm = torch.nn.LayerNorm(16)
    assert set(patch(layer).replaced) == {"input_layernorm"}


def changed(what, layer, seen):
    norm = layer.post_attention_layernorm
    if what == "hook":
        norm.register_forward_hook(lambda *given: seen.append(1))
    elif what == "hook before":
        norm.register_forward_pre_hook(lambda *given: seen.append(1))
    elif what == "another norm":
        layer.post_attention_layernorm = copy.deepcopy(layer.input_layernorm).double().float()
        layer.post_attention_layernorm.__class__ = type("Other", (Norm,), {})
    elif what == "another forward":
        del norm.forward
        norm.forward = lambda x: (seen.append(1), Norm.forward(norm, x))[1]
    elif what == "hook on all":
        return torch.nn.modules.module.register_module_forward_hook(
            lambda module, *given: seen.append(1) if module is norm else None
        )
    elif what == "wider norm":
        layer.bfloat16()
        norm.float()
    elif what == "autocast":
        layer.bfloat16()
    return None


CHANGES = ["hook", "hook before", "hook on all", "another norm", "another forward", "wider norm", "autocast"]


@pytest.mark.parametrize("what", CHANGES)
def test_where_the_norm_is_called_itself(what, fused):
    layer, seen = Layer(Around0), []
    patch(layer)
    hook = changed(what, layer, seen)
    x = batch(layer.mlp.weight.dtype)
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=what == "autocast"):
            torch.testing.assert_close(layer(x), Layer.forward(layer, x))
    finally:
        if hook is not None:
            hook.remove()
    assert not fused
    assert bool(seen) == (what in ("hook", "hook before", "hook on all", "another forward"))


def test_eps_that_is_changed_afterwards_counts(fused):
    layer, x = Layer(), batch()
    patch(layer)
    layer.post_attention_layernorm.eps = 0.5
    torch.testing.assert_close(layer(x), Layer.forward(layer, x))
    assert fused


def test_compiled(monkeypatch, fused):
    monkeypatch.undo()  # the level is the default of what is traced
    layer, x = Layer(), batch()
    stock = outputs(layer, x)
    patch(layer)
    torch._dynamo.reset()
    ours = outputs(torch.compile(layer, fullgraph=True, backend="aot_eager"), x)
    torch.testing.assert_close(ours, stock)


def test_keywords_that_are_missing_have_the_defaults_of_the_layer(fused):
    layer, x, seen = Layer(), batch(), []
    patch(layer)
    layer.self_attn.register_forward_pre_hook(lambda module, args, kwargs: seen.append({**kwargs}), with_kwargs=True)
    layer(x)
    assert seen[0].keys() == {"hidden_states", "mask"}
    assert fused


def test_keywords_that_the_layer_does_not_name_go_to_its_class(fused):
    layer, x = Layer(), batch()
    patch(layer)
    torch.testing.assert_close(layer(x, unknown=1), Layer.forward(layer, x, unknown=1))
    assert not fused
