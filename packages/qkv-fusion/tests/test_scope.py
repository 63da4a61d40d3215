"""What fused layers share belongs to one call of their parent: threads, recomputation, exceptions, hooks, compilers."""

import copy
import pickle
import sys
import threading
import weakref

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from kernel_pytorch.qkv_fusion import (
    FusedSelfAttention,
    LinearGroup,
    RotaryTable,
    fuse,
    fusion_report,
    unfuse,
)
from kernel_pytorch.qkv_fusion._core import patching
from kernel_pytorch.qkv_fusion._core.patching import Found
from kernel_pytorch.qkv_fusion.modules import scope


class Attention(torch.nn.Module):
    def __init__(self, channels=8):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (torch.nn.Linear(channels, n, bias=False) for n in (channels, 4, 4))

    def forward(self, x, memory=None, between=None):
        memory, q = x if memory is None else memory, self.q_proj(x)
        if between is not None:
            between()
        return torch.cat((q, self.k_proj(memory), self.v_proj(memory)), -1)


@pytest.fixture
def products(monkeypatch):
    """Rows of the weights of all products."""
    rows, linear = [], F.linear
    monkeypatch.setattr(F, "linear", lambda x, w, b=None: rows.append(w.shape[0]) or linear(x, w, b))
    return rows


def pair():
    torch.manual_seed(0)
    stock = Attention()
    return stock, fuse(copy.deepcopy(stock))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_another_request_between_two_layers(mode, products):
    """Whatever the interpreter runs when it switches threads between the first layer and the second."""
    stock, fused = pair()
    with mode():
        x, other = torch.randn(2, 1, 8).unbind(0)
        products.clear()
        y = fused(x, between=lambda: (fused(other), fused.k_proj(x), fused.q_proj(other)))
        assert products == [16, 16, 4, 8]
        torch.testing.assert_close(y, stock(x))


def test_four_threads():
    stock, fused = pair()
    inputs, wrong, interval = [torch.randn(1, 8) for _ in range(4)], [], sys.getswitchinterval()
    wanted = [stock(x).detach() for x in inputs]

    def serve(x, want):
        with torch.no_grad():
            wrong.extend(1 for _ in range(300) if not torch.allclose(fused(x), want, atol=1e-5))

    sys.setswitchinterval(1e-7)
    try:
        threads = [threading.Thread(target=serve, args=each) for each in zip(inputs, wanted, strict=True)]
        [each.start() for each in threads]
        [each.join() for each in threads]
    finally:
        sys.setswitchinterval(interval)
    assert not wrong


def test_nothing_outlives_a_call(products):
    _, fused = pair()

    def fails():
        raise ValueError

    before = {name: dict(vars(module)) for name, module in fused.named_modules()}
    fused.q_proj(torch.randn(1, 8))
    x = torch.randn(1, 8)
    with pytest.raises(ValueError):
        fused(x, between=fails)
    fused(x)
    kept = weakref.ref(x)
    del x
    products.clear()
    fused(torch.randn(1, 8))
    assert products == [16]
    assert kept() is None
    assert {name: dict(vars(module)) for name, module in fused.named_modules()} == before


def test_cross_attention_computes_what_it_needs(products):
    stock, fused = pair()
    x, memory = torch.randn(2, 3, 8).unbind(0)
    for given in ((x, memory), (x, x)):
        products.clear()
        y = fused(*given)
        assert products == [8, 4, 4]
        torch.testing.assert_close(y, stock(*given))


def hook(fused):
    fused.k_proj.register_forward_hook(lambda module, args, y: 3.0 * y)


def pre_hook(fused):
    fused.v_proj.register_forward_pre_hook(lambda module, args: (2.0 * args[0],))


def new_forward(fused):
    inner = fused.q_proj.forward
    fused.q_proj.forward = lambda x: inner(x) + 1.0


def adapter(fused):
    fused.k_proj = torch.nn.Sequential(fused.k_proj, torch.nn.Tanh())


@pytest.mark.parametrize("change", [hook, pre_hook, new_forward, adapter])
def test_what_is_put_on_a_layer_afterwards_is_honoured(change):
    stock, fused = pair()
    assert fusion_report(fused).replaced == {"": "q_proj, k_proj, v_proj: one product"}
    x = torch.randn(3, 8)
    for each in (stock, fused):
        change(each)
    torch.testing.assert_close(fused(x), stock(x))
    report = fusion_report(fused)
    assert not report.replaced
    assert "_proj" in report.left[""]


def test_global_hooks_see_every_layer():
    _, fused = pair()
    seen = []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda module, args, y: seen.append(module))
    try:
        fused(torch.randn(1, 8))
    finally:
        handle.remove()
    assert seen == [fused.q_proj, fused.k_proj, fused.v_proj, fused]


class Normed(Attention):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)

    def forward(self, x):
        return self.q_proj(x) + torch.cat((self.k_proj(self.norm(x)), self.v_proj(x)), -1)


class Counting(Attention):
    def forward(self, x):
        y = super().forward(x)
        self.calls = getattr(self, "calls", 0) + 1
        return y


class InPlace(Attention):
    def forward(self, x):
        q = self.q_proj(x)
        return q, self.k_proj(x.add_(1.0)), self.v_proj(x)


class Twice(Attention):
    def forward(self, x):
        return self.q_proj(x) + self.q_proj(x), self.k_proj(x), self.v_proj(x)


class Silent(Attention):
    forward = torch.nn.Module.forward


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Normed, "gives the layers different tensors"),
        (Counting, "sets an attribute, calls"),
        (InPlace, "gives the layers different tensors"),
        (Twice, "calls v_proj not once beside the others"),
        (Silent, "has no forward"),
    ],
)
def test_what_cannot_be_proven_stays_and_is_named(kind, reason):
    model = torch.nn.ModuleDict({"a": kind(), "b": Attention()})
    assert fuse(model) is model
    assert type(model["a"].q_proj) is torch.nn.Linear
    assert "forward" not in vars(model["a"])
    report = fusion_report(model)
    assert report.replaced == {"b": "q_proj, k_proj, v_proj: one product"}
    assert reason in report.left["a"]


def test_the_report_of_a_model_that_is_not_fused():
    model = torch.nn.ModuleDict({"a": Attention(), "b": Attention(), "cross_attn": Attention()})
    hook(model["b"])
    report = fusion_report(model)
    assert not report.replaced
    assert report.left["a"].endswith("`fuse` was not called")
    assert "Linear has hooks" in report.left["b"]
    assert "cross-attention" in report.left["cross_attn"]


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, lambda: torch.device("meta")])
def test_proven_anywhere(context):
    with context():
        model = fuse(Attention())
        assert isinstance(model.q_proj.group, LinearGroup)
        assert model(torch.ones(2, 8)).shape == (2, 16)
    assert fuse(Attention().to("meta"))(torch.ones(2, 8, device="meta")).device.type == "meta"


def test_copies_are_fused_and_compute_with_their_own_parameters(products):
    _, fused = pair()
    x = torch.randn(3, 8)
    y = fused(x)
    for other in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        products.clear()
        assert torch.equal(other(x), y)
        assert products == [16]
        torch.nn.init.zeros_(other.q_proj.group.weight)
        assert not other(x).any()
    assert torch.equal(fused(x), y)


@pytest.mark.parametrize("first", ["patch", "fuse"])
def test_fused_and_patched_in_any_order(first, products):
    """A patch of the module that has the layers runs inside of the forward that shares the product."""
    stock, _ = pair()

    def find(module):
        return (
            Found(lambda self, x: 2.0 * patching.forward_of_class(self)(self, x), "twice")
            if type(module) is Attention
            else None
        )

    x, ours = torch.randn(3, 8), copy.deepcopy(stock)
    for step in (first, {"patch": "fuse", "fuse": "patch"}[first]):
        fuse(ours) if step == "fuse" else patching.patch(ours, "p", [find])
    assert patching.patch(ours, "p", [find]).replaced == {"": "p, patched before"}
    products.clear()
    torch.testing.assert_close(ours(x), 2.0 * ours.__class__.forward(stock, x))
    assert products[:1] == [16]
    other = copy.deepcopy(ours)
    patching.unpatch(ours, "p")
    torch.testing.assert_close(ours(x), stock(x))
    torch.testing.assert_close(unfuse(other)(x), 2.0 * stock(x))
    for each in (unfuse(ours), other):
        patching.unpatch(each, "p")
        assert "forward" not in vars(each)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_one_product_in_the_compiled_graph(training, dynamic):
    stock, fused = pair()
    counts = []

    def count(graph, inputs):
        counts.append(sum(str(node.target).startswith(("aten.mm", "aten.addmm")) for node in graph.graph.nodes))
        return make_boxed_func(graph)

    backend = aot_autograd(fw_compiler=count, bw_compiler=count)
    compiled = torch.compile(fused, backend=backend, fullgraph=True, dynamic=dynamic)
    x = torch.randn(3, 8, requires_grad=training)
    with torch.set_grad_enabled(training):
        y = compiled(x)
        torch.testing.assert_close(y, stock(x))
        if training:
            torch.testing.assert_close(
                torch.autograd.grad(y.square().sum(), x), torch.autograd.grad(stock(x).square().sum(), x)
            )
    assert counts == ([1, 2] if training else [1])
    assert vars(fused.q_proj.group)["_modules"] == {}


@pytest.mark.parametrize("strict", [False, True])
def test_exported(strict):
    stock, fused = pair()
    x = torch.randn(3, 8)
    exported = torch.export.export(fused, (x,), dynamic_shapes=({0: torch.export.Dim("rows")},), strict=strict)
    torch.testing.assert_close(exported.module()(torch.cat((x, x))), stock(torch.cat((x, x))))


def test_functional_call_and_vmap():
    stock, fused = pair()
    x, parameters = torch.randn(5, 3, 8), {name: 2.0 * p for name, p in fused.named_parameters()}
    torch.testing.assert_close(torch.func.functional_call(fused, parameters, (x,)), 2.0 * stock(x))
    torch.testing.assert_close(torch.func.vmap(fused)(x), stock(x))
    losses = torch.func.vmap(torch.func.grad(lambda x: fused(x).square().sum()))
    torch.testing.assert_close(losses(x), torch.func.vmap(torch.func.grad(lambda x: stock(x).square().sum()))(x))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("crossed", [False, True])
def test_activation_checkpointing(use_reentrant, crossed):
    stock, fused = pair()
    found = []
    torch.manual_seed(1)
    x, memory = torch.randn(2, 3, 8).unbind(0)
    for each in (stock, fused):
        given = x.clone().requires_grad_()
        y = checkpoint(each, given, memory if crossed else None, use_reentrant=use_reentrant)
        y = checkpoint(each, 0.1 * y[..., :8], memory if crossed else None, use_reentrant=use_reentrant)
        y.square().sum().backward()
        weights = [p.grad for p in each.parameters()]
        found.append((given.grad, torch.cat(weights)))
    torch.testing.assert_close(*found)


def test_a_checkpoint_lists_names_in_the_order_of_stock():
    class Gemma(Attention):
        def __init__(self):
            torch.nn.Module.__init__(self)
            for name in ("q_proj", "norm", "k_proj", "v_proj"):  # as Gemma 3n has them
                self.add_module(name, torch.nn.Linear(8, 8))

    model = Gemma()
    names = list(model.state_dict())
    assert list(fuse(model).state_dict()) == names


def test_a_whole_checkpoint_into_a_sharded_model(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for make in (
            lambda: fuse(Attention()),
            lambda: FusedSelfAttention(8, 2, 1, qk_norm=1e-6, rotary=RotaryTable(4)),
        ):
            model = fully_shard(make(), mesh=init_device_mesh("cpu", (1,)))
            whole = {name: torch.randn_like(value) for name, value in make().state_dict().items()}
            set_model_state_dict(model, dict(whole), options=StateDictOptions(full_state_dict=True))
            for name, value in model.state_dict().items():
                assert torch.equal(value.full_tensor(), whole[name])
    finally:
        torch.distributed.destroy_process_group()


def test_other_inputs_are_known_by_their_names():
    def forward(self, hidden_states, position_embeddings, key_value_states=None, attention_mask=None, **kwargs):
        raise NotImplementedError

    assert scope.other_inputs(forward) == [(2, "key_value_states")]


def brought_back(group, weight):
    """As accelerate: a forward that brings the weight to the device, and takes it away again."""
    own = group.forward

    def forward(x):
        group.weight = weight
        try:
            return own(x)
        finally:
            group.weight = torch.nn.Parameter(weight.detach().to("meta"))

    group.weight, group.forward = torch.nn.Parameter(weight.detach().to("meta")), forward


def test_weights_that_a_library_took_away():
    """Results of a weight on the meta device would be whatever is in memory."""
    stock, fused = pair()
    group = fused.q_proj.group
    weight = group.weight
    brought_back(group, weight)
    with pytest.raises(RuntimeError, match=r"offloaded.*unfuse\(model\)"):
        fused(torch.randn(3, 8))
    with pytest.raises(RuntimeError, match=r"offloaded.*unfuse\(model\)"):
        fused.k_proj(torch.randn(3, 8))
    group.weight, x = weight, torch.randn(3, 8)  # one that is in place again is used through that forward
    called, own = [], group.forward
    group.forward = lambda x: called.append(1) or own(x)
    torch.testing.assert_close(fused(x), stock(x))
    assert called
