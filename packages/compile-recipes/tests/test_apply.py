"""Changes are made in place, proven, and taken off again bit for bit; what is wrong or slower is taken back."""

import copy
import io
import pickle
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kernel_pytorch.compile_recipes import CompilerOptimizationAssistant, Verdict, apply, optimize, techniques
from kernel_pytorch.compile_recipes.apply.changes import Change, Done
from kernel_pytorch.compile_recipes.apply.rewrite import rewrite_attention

# Dynamo, of a compiled part whose input is no leaf.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class Attention(nn.Module):
    """Attention by hand, as a part of a forward that does more."""

    def __init__(self, p=0.0, causal=False):
        super().__init__()
        self.qkv, self.out, self.drop = nn.Linear(32, 96), nn.Linear(32, 32), nn.Dropout(p)
        self.causal = causal
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.calls += 1
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) * 8**-0.5
        if self.causal:
            later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, float("-inf"))
        return x + self.out((self.drop(scores.softmax(-1)) @ v).transpose(1, 2).flatten(-2))


def gradients(model, x):
    return torch.autograd.grad(model(x).square().sum(), [*model.parameters()])


def operators(model, x):
    with torch.no_grad():
        model(x)  # compiles it, and proves it
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            model(x)
    return {event.key for event in profile.key_averages()}


@pytest.fixture
def alone(monkeypatch):
    """Without the techniques that happen to be installed."""
    monkeypatch.setattr(apply, "technique_changes", list)


@pytest.fixture
def tried(monkeypatch):
    """Optimise with one change alone."""

    def run(make, model, *inputs, **options):
        monkeypatch.setattr(apply, "changes", lambda: [Change("the change", "safe", make)])
        return optimize(model, *inputs, **options)

    return run


class Masked(Attention):
    """Attention by hand that masks what it is told to, by an argument or a buffer."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.register_buffer("seen", torch.ones(1, 1, 12, 12))

    def forward(self, x, mask=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) * 8**-0.5
        if self.how == "buffer":
            scores = scores.masked_fill(self.seen == 0, float("-inf"))
        elif mask is not None and self.how == "masked_fill":
            scores = scores.masked_fill(mask[:, None, None, :], float("-inf"))
        elif mask is not None:
            scores = torch.where(mask[:, None, None, :], -1e9, scores)
        return x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))


@pytest.mark.parametrize("how", ["masked_fill", "where", "buffer"])
@pytest.mark.parametrize("given", [False, True])
def test_a_mask_that_hides_nothing_in_the_proof_is_kept(how, given, alone):
    model, x = Masked(how).eval(), torch.randn(2, 12, 32)
    nothing, padding = torch.zeros(2, 12, dtype=torch.bool), (torch.arange(12) >= 8).expand(2, 12)
    optimize(model, x, *([nothing] if given else []), rounds=0)
    if how == "buffer":
        model.seen.tril_()
    torch.testing.assert_close(model(x, padding), type(model).forward(model, x, padding))


@pytest.mark.parametrize("causal", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_attention_by_hand_becomes_one_call_and_comes_back(alone, causal):
    model, x = nn.Sequential(Attention(causal=causal), Attention(causal=causal)), torch.randn(2, 12, 32)
    names, before, grads = list(model.state_dict()), model(x), gradients(model, x)
    parameters, seen = [*model.parameters()], []
    model[0].out.register_forward_hook(lambda *_: seen.append(1))
    result = optimize(model, x, rounds=0)
    assert list(result.applied) == ["rewrite attention"]
    assert result.module is model
    torch.testing.assert_close(model(x), before)
    torch.testing.assert_close(gradients(model, x), grads)
    assert list(model.state_dict()) == names
    seen.clear()
    calls = int(model[0].calls)
    model(x)
    assert (len(seen), int(model[0].calls)) == (1, calls + 1)
    y = torch.randn(3, 7, 32)  # another shape
    changed = model(y)
    result.revert()
    torch.testing.assert_close(changed, model(y))
    assert torch.equal(model(x), before)
    assert all(torch.equal(a, b) for a, b in zip(gradients(model, x), grads, strict=True))
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert not any("forward" in m.__dict__ for m in model.modules())


def test_the_rewritten_forward_runs_the_fused_operator(alone):
    model, x = Attention().eval(), torch.randn(2, 12, 32)

    assert "aten::_softmax" in operators(model, x)
    optimize(model, x, rounds=0)
    assert "aten::_softmax" not in operators(model, x)
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in operators(model, x)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_the_rewrite_lasts_beyond_the_recompile_limit(alone, causal):
    model = Attention(causal=causal).eval()
    optimize(model, torch.randn(2, 12, 32), rounds=0)
    torch._dynamo.utils.counters.clear()
    for length in range(5, 29, 2):
        x = torch.randn(2, length, 32)
        torch.testing.assert_close(model(x), type(model).forward(model, x))
        assert "aten::_softmax" not in operators(model, x), length
    assert torch._dynamo.utils.counters["frames"]["ok"] <= 4  # one length and any length, with gradients and without


def test_a_window_that_hides_nothing_in_the_first_length_is_kept(alone):
    class Local(Attention):
        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
            seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril().triu(-15)
            scores = (q @ k.transpose(-1, -2) * 8**-0.5).masked_fill(~seen, float("-inf"))
            return x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))

    model = Local().eval()
    assert "rewrite attention" in optimize(model, torch.randn(2, 12, 32), rounds=0).applied
    for length in (12, 14, 20, 16, 24):
        x = torch.randn(2, length, 32)
        torch.testing.assert_close(model(x), type(model).forward(model, x))


def test_dropout_on_the_weights_is_left_alone_in_training(alone):
    model, x = Attention(p=0.5), torch.randn(2, 12, 32)
    result = optimize(model, x, rounds=0)
    assert result.rejected["rewrite attention"] == "it cannot be rewritten: dropout stands between its products"
    assert "forward" not in model.__dict__


def test_products_that_are_no_matmul_are_named(alone):
    class Sums(Attention):
        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
            weights = (torch.einsum("bhqd,bhkd->bhqk", q, k) * 8**-0.5).softmax(-1)
            return x + self.out(torch.einsum("bhqk,bhkd->bhqd", weights, v).transpose(1, 2).flatten(-2))

    rejected = optimize(Sums().eval(), torch.randn(2, 12, 32), rounds=0).rejected["rewrite attention"]
    assert rejected == "it cannot be rewritten: its products are not matmul or bmm of two tensors"


def test_a_mask_that_is_given_is_named(alone):
    class Masked(Attention):
        def forward(self, x, mask):
            q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
            scores = q @ k.transpose(-1, -2) * 8**-0.5 + mask
            return x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(-2))

    rejected = optimize(Masked().eval(), torch.randn(2, 12, 32), torch.zeros(12, 12), rounds=0).rejected
    assert rejected["rewrite attention"] == "it cannot be rewritten: a mask stands between its products"


def test_a_forward_that_is_compiled_again_in_each_call_is_left_alone(alone):
    class Counting(Attention):
        def forward(self, x):
            self.number = getattr(self, "number", 0) + 1
            q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
            return ((q @ k.transpose(-1, -2)).softmax(-1) @ v).mean() * self.number

    result = optimize(Counting().eval(), torch.randn(2, 12, 32), rounds=0)
    assert result.rejected["rewrite attention"] == "its forward would be compiled again in each call"


@pytest.mark.slow
def test_copies_pickles_and_compilation_of_a_changed_model(alone):
    model, x = nn.Sequential(Attention()).eval(), torch.randn(2, 12, 32)
    before = model(x)
    optimize(model, x, rounds=0)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin[0].qkv.weight.zero_()
    assert not torch.equal(twin(x), model(x))
    loaded = pickle.loads(pickle.dumps(model))
    assert torch.equal(loaded(x), before), "a pickled model comes back unchanged"
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), before)
    stream = io.BytesIO()
    torch.save(model.state_dict(), stream)


def test_a_wrong_change_is_taken_back(tried):
    def double(model, context):
        model.forward = lambda x: 2 * type(model).forward(model, x)
        return Done("doubled", lambda: model.__dict__.pop("forward"))

    model, x = nn.Linear(8, 8), torch.randn(4, 8)
    before = model(x)
    result = tried(double, model, x, rounds=0)
    assert "taken back, it is wrong: " in result.rejected["the change"]
    assert torch.equal(model(x), before)


def test_a_change_that_is_wrong_on_other_inputs_alone_is_taken_back(tried):
    x = torch.randn(4, 8)

    def cached(model, context):
        kept = {True: type(model).forward(model, x).detach()}
        model.forward = lambda y: kept[True] if y.shape == x.shape else type(model).forward(model, y)
        return Done("cached", lambda: model.__dict__.pop("forward"))

    result = tried(cached, nn.Linear(8, 8).requires_grad_(False).eval(), x, rounds=0)
    assert "other inputs" in result.rejected["the change"]


def test_a_change_with_wrong_gradients_is_taken_back(tried):
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x @ weight.T

        @staticmethod
        def backward(ctx, g):
            x, weight = ctx.saved_tensors
            return g @ weight, 1.01 * g.T @ x

    def wrong(model, context):
        model.forward = lambda x: Wrong.apply(x, model.weight)
        return Done("wrong", lambda: model.__dict__.pop("forward"))

    result = tried(wrong, nn.Linear(8, 8, bias=False), torch.randn(4, 8), rounds=0)
    assert "gradient of weight" in result.rejected["the change"]


def test_a_slower_change_is_taken_back(tried):
    def slow(model, context):
        def forward(x):
            for _ in range(300):
                x.sin()
            return type(model).forward(model, x)

        model.forward = forward
        return Done("slowed", lambda: model.__dict__.pop("forward"))

    result = tried(slow, nn.Linear(64, 64).eval(), torch.randn(64, 64), rounds=8)
    assert "taken back, it is slower" in result.rejected["the change"]


def test_an_exception_leaves_the_model_as_it_was(tried):
    def interrupted(model, context):
        raise KeyboardInterrupt

    model, x = Attention(), torch.randn(2, 12, 32)
    before = model(x)
    with pytest.raises(KeyboardInterrupt):
        tried(interrupted, model, x)
    assert torch.equal(model(x), before)


def test_projections_are_packed_and_come_back_as_they_were():
    pytest.importorskip("kernel_pytorch.qkv_fusion")
    if "qkv-fusion" not in techniques.able():
        pytest.skip("qkv-fusion is not installed")

    class Projected(nn.Module):
        def __init__(self):
            super().__init__()
            self.q_proj, self.k_proj, self.v_proj = (nn.Linear(32, 32) for _ in range(3))

        def forward(self, x):
            return self.q_proj(x) + self.k_proj(x) * self.v_proj(x)

    model, x = nn.Sequential(Projected()), torch.randn(4, 32)
    parameters, before = dict(model.named_parameters()), model(x)
    result = optimize(model, x, apply=["fuse"], rounds=0)
    assert list(result.applied) == ["fuse"]
    result.revert()
    assert torch.equal(model(x), before)
    assert all(parameters[name] is p for name, p in model.named_parameters())


def test_layout_blocks_and_checkpoints_by_name():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3, padding=1)
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8)) for _ in range(3))

        def forward(self, x):
            x = self.conv(x).mean((2, 3))
            for block in self.blocks:
                x = x + block(x)
            return x

    model, x = Net(), torch.randn(2, 3, 8, 8)
    before, state = model(x), copy.deepcopy(model.state_dict())
    result = optimize(model, x, apply=["channels_last", "checkpointing"], rounds=0)
    assert list(result.applied) == ["channels_last", "checkpointing"]
    verdict = result.applied["checkpointing"][1]
    kept = verdict["memory_efficiency"]["saved"]
    assert kept[1] < kept[0]
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    result.revert()
    assert torch.equal(model(x), before)
    assert model.conv.weight.is_contiguous()
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    with pytest.raises(ValueError, match="no change 'luck'; there are: safe, all"):
        optimize(model, x, apply="luck")


def test_a_verdict_has_four_parts():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 16)

        def forward(self, x):
            h = self.layer(x)
            return 0.5 * h * (1 + torch.erf(h * 2**-0.5))

    class Fused(Plain):
        def forward(self, x):
            return F.gelu(self.layer(x))

    original, optimized, x = Plain(), Fused(), torch.randn(64, 16)
    optimized.load_state_dict(original.state_dict())
    verdict = CompilerOptimizationAssistant().validate_optimization(original, optimized, x)
    assert verdict.passed
    assert verdict["correctness_check"]["compared"] > 8
    assert verdict["performance_improvement"]["rounds"] == 8
    before, after = verdict["memory_efficiency"]["saved"]
    assert after < before
    assert verdict["compilation_success"]["breaks"] == (0, 0)
    assert str(verdict).startswith("correctness: passed")
    with pytest.raises(KeyError, match="there are: correctness_check"):
        verdict["luck"]


@pytest.mark.parametrize("rounds", [-1, 1, 7])
def test_too_few_rounds_are_refused(rounds):
    message = rf"rounds is {rounds}; it must be at least 8, or 0 to time nothing"
    with pytest.raises(ValueError, match=message):
        optimize(nn.Linear(2, 2), torch.ones(2), rounds=rounds)
    with pytest.raises(ValueError, match=message):
        CompilerOptimizationAssistant().validate_optimization(nn.Linear(2, 2), nn.Linear(2, 2), rounds=rounds)


def test_everything_is_as_before_a_validation():
    model, x = Attention(p=0.3), torch.randn(2, 8, 32)
    state = torch.get_rng_state()
    CompilerOptimizationAssistant().validate_optimization(model, copy.deepcopy(model), x, rounds=0)
    assert torch.equal(torch.get_rng_state(), state)
    assert (int(model.calls), model.training, model.drop.p) == (0, True, 0.3)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.slow
def test_what_does_not_fit_twice_is_proven_block_by_block(alone, monkeypatch, tried):
    monkeypatch.setattr(sys.modules[Verdict.__module__], "fits", lambda module: False)
    model, x = nn.Sequential(Attention(), Attention()), torch.randn(2, 12, 32)
    result = tried(rewrite_attention, model, x, rounds=0)
    verdict = result.applied["the change"][1]
    assert verdict["correctness_check"]["by_blocks"]
    assert "of the changed modules alone" in str(verdict)
    result.revert()

    def double_the_second(model, context):
        model[1].forward = lambda x: 2 * type(model[1]).forward(model[1], x)
        return Done("doubled", lambda: model[1].__dict__.pop("forward"))

    result = tried(double_the_second, model, x, rounds=0)
    assert "taken back, it is wrong: 1: " in result.rejected["the change"]
