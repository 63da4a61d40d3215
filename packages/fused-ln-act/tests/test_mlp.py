"""`gated_mlp`, and the feed-forward modules `GatedMLP` and `MLP`."""

import copy
import math

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from kernel_pytorch.fused_ln_act import MLP, GatedMLP, gated_mlp, linear_act
from kernel_pytorch.fused_ln_act.linear.levels import reference
from kernel_pytorch.harness.checks import (
    check_compiled_equals_eager,
    check_deterministic,
    check_export,
    check_gradient_combinations,
    check_second_derivatives,
)
from kernel_pytorch.harness.launches import count_launches
from kernel_pytorch.harness.memory import profile_memory

LEVELS = ["reference", "native", "torchscript", "triton"]  # "compile" is held by the declaration's tests
operators = torch.ops.kernel_pytorch
pytestmark = [pytest.mark.filterwarnings("ignore:.torch.jit.*deprecated"), pytest.mark.slow]
pytest.importorskip("triton")


def weights(rows=9, depth=16, hidden=24, outputs=8, device="cpu", dtype=torch.float32):
    torch.manual_seed(0)
    shapes = (rows, depth), (2 * hidden, depth), (outputs, hidden)
    x, first, second = (torch.randn(shape, device=device, dtype=dtype) for shape in shapes)
    first, second = first / math.sqrt(depth), second / math.sqrt(hidden)
    return [x.requires_grad_(), first.requires_grad_(), second.requires_grad_()]


def eager(x, w_gate_up, w_down):
    gate, up = F.linear(x, w_gate_up).chunk(2, -1)
    return F.linear(F.silu(gate) * up, w_down)


def triton_level(x, w_gate_up, w_down, recompute=True):
    return gated_mlp(x, w_gate_up, w_down, recompute=recompute, level="triton")


# The function.


@pytest.mark.parametrize("level", LEVELS)
def test_it_is_the_composition(level, device):
    x, first, second = weights(device=device)
    torch.testing.assert_close(gated_mlp(x, first, second, level=level), eager(x, first, second))
    gate, up = F.linear(x, first).chunk(2, -1)
    expected = F.linear(F.gelu(gate) * up, second)
    torch.testing.assert_close(gated_mlp(x, first, second, "gelu", level=level), expected)


def test_h_is_rounded_to_the_dtype_of_x():
    x, first, second = weights(dtype=torch.float16)
    gate, up = F.linear(x.float(), first.float()).chunk(2, -1)
    h = (F.silu(gate) * up).half()
    expected = F.linear(h.float(), second.float()).half()
    assert torch.equal(reference.gated_mlp(x, first, second, "silu", True), expected)


@pytest.mark.parametrize("recompute", [True, False])
def test_any_strides(recompute, device):
    x, first, second = (t.detach() for t in weights(8, 16, 24, 8, device))
    arguments = [t.t().contiguous().t().requires_grad_() for t in (x, first, second)]
    y, expected = triton_level(*arguments, recompute), eager(*arguments)
    torch.testing.assert_close(y, expected)
    incoming = torch.randn(8, 8, device=device).t()
    for ours, theirs in zip(*(torch.autograd.grad(o, arguments, incoming) for o in (y, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: tensor cores")
@pytest.mark.parametrize("recompute", [True, False])
def test_tensor_cores(recompute, device):
    """bfloat16 at a size with many tiles, against float64."""
    arguments = weights(1537, 640, 1160, 512, device, torch.bfloat16)
    exact = [t.detach().double().requires_grad_() for t in arguments]
    y, truth = triton_level(*arguments, recompute), eager(*exact)
    for a, b in zip(
        (y, *torch.autograd.grad(y, arguments, torch.ones_like(y))),
        (truth, *torch.autograd.grad(truth, exact, torch.ones_like(truth))),
        strict=True,
    ):
        assert ((a.double() - b).norm() / b.norm()).item() < 1e-2


# Kernels and memory.


@pytest.mark.parametrize("level", ["triton", "native"])
def test_the_forward_is_no_product_of_pytorch(level, device):
    arguments = weights(device=device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        gated_mlp(*arguments, level=level)
    names = {event.key for event in profiler.key_averages()}
    assert bool(names & {"aten::mm", "aten::addmm", "aten::matmul", "aten::linear"}) == (level == "native")


@pytest.mark.parametrize(
    ("recompute", "backward"),
    [(True, "_gated_linear_backward_kernel"), (False, "_gated_linear_saved_backward_kernel")],
)
def test_launches(recompute, backward, device):
    arguments = weights(device=device)
    with count_launches() as launched:
        y = triton_level(*arguments, recompute)
    assert launched == ["_gated_linear_kernel", "_linear_kernel"]
    with count_launches() as launched:
        torch.autograd.grad(y.sum(), arguments)
    assert launched == [backward]


def test_what_is_saved(device):
    """Of `(M, I)` elements eager PyTorch saves four times as many, with `recompute` nothing, else two."""
    rows, hidden = 9, 24
    arguments = weights(rows, 16, hidden, 8, device)
    of_eager, of_recomputed, of_saved = (
        profile_memory(function, *arguments).saved_for_backward // 4
        for function in (eager, triton_level, lambda *t: triton_level(*t, recompute=False))
    )
    assert of_eager == 4 * hidden * rows
    assert of_recomputed == 0
    assert of_saved == 2 * hidden * rows
    assert of_eager - of_recomputed >= 2 * hidden * rows


@pytest.mark.parametrize("recompute", [True, False])
def test_bitwise_reproducible(recompute, device):
    check_deterministic(lambda *t: triton_level(*t, recompute), weights(40, 40, 48, 8, device))


# Gradients.


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("level", LEVELS)
def test_every_combination_of_inputs(level, recompute, device):
    def function(x, first, second):
        return gated_mlp(x, first, second, recompute=recompute, level=level)

    check_gradient_combinations(function, weights(device=device))


@pytest.mark.parametrize("level", LEVELS)
def test_second_derivatives(level, device):
    def function(x, first, second):
        return gated_mlp(x, first, second, "gelu", level=level)

    check_second_derivatives(function, weights(2, 3, 2, 2, device), fast=level == "triton")


# Operators.


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck's own, torch 2.15
def test_opcheck(device):
    x, first, second = weights(device=device)
    dh = torch.randn(9, 24, device=device, requires_grad=True)
    saved = torch.randn(9, 48, device=device)
    torch.library.opcheck(operators.gated_mlp.default, (x, first, second, "silu", True))
    torch.library.opcheck(operators.gated_mlp_backward.default, (dh, None, x, first, "gelu", True, True))
    torch.library.opcheck(operators.gated_mlp_backward.default, (dh, saved, x, first, "silu", False, True))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_is_bitwise_eager(dynamic, device):
    check_compiled_equals_eager(triton_level, weights(device=device), dynamic=dynamic)


def test_export(device):
    program = check_export(triton_level, [t.detach() for t in weights(device=device)])
    assert sum("kernel_pytorch" in str(node.target) for node in program.graph.nodes) == 1


def test_flop_counter(device):
    x, first, second = weights(device=device)
    with FlopCounterMode(display=False) as counter:
        triton_level(x, first, second).sum().backward()
    counts = counter.get_flop_counts()["Global"]
    product = 2 * 9 * 16 * 48
    assert counts[operators.gated_mlp] == product + 5 * 9 * 24 + 2 * 9 * 24 * 8
    assert counts[operators.gated_mlp_backward] == product + 15 * 9 * 24
    assert counts[torch.ops.aten.mm] == 2 * product + 2 * 2 * 9 * 24 * 8


# What it refuses.


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"w_gate_up": torch.ones(47, 16)}, ValueError, r"w_gate_up: shape is \(47, 16\); its first.*even"),
        ({"w_gate_up": torch.ones(48, 15)}, ValueError, r"w_gate_up: shape is \(48, 15\).*the last 16"),
        ({"w_down": torch.ones(8, 48)}, ValueError, r"w_down: shape is \(8, 48\).*the last 24"),
        ({"w_down": torch.ones(8, 24).half()}, TypeError, r"w_down: dtype is torch\.float16"),
        ({"activation": "swish"}, ValueError, "activation: given 'swish'"),
    ],
)
def test_bad_input(change, error, message):
    good = {"x": torch.ones(9, 16), "w_gate_up": torch.ones(48, 16), "w_down": torch.ones(8, 24)}
    with pytest.raises(error, match=message):
        gated_mlp(**(good | change))


# The modules.


class LlamaMLP(torch.nn.Module):
    """As Hugging Face's transformers have it."""

    def __init__(self, features=16, hidden=24, bias=False, act_fn=None, device=None):
        super().__init__()
        self.gate_proj = torch.nn.Linear(features, hidden, bias=bias, device=device)
        self.up_proj = torch.nn.Linear(features, hidden, bias=bias, device=device)
        self.down_proj = torch.nn.Linear(hidden, features, bias=bias, device=device)
        self.act_fn = torch.nn.SiLU() if act_fn is None else act_fn

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize("level", [None, "triton"])
def test_gated_mlp_takes_over_a_llama_mlp(level, device):
    torch.manual_seed(0)
    stock = LlamaMLP(device=device).eval()
    untouched = copy.deepcopy(stock)
    ours = GatedMLP.from_torch(stock, level=level)
    x = torch.randn(2, 5, 16, device=device)
    torch.testing.assert_close(ours(x), untouched(x))
    assert not ours.training
    assert ours.down_proj.weight is stock.down_proj.weight
    packed = ours.gate_up_proj.weight
    assert stock.up_proj.weight.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr()
    with torch.no_grad():
        packed.mul_(2.0)
    torch.testing.assert_close(stock(x), ours(x))
    assert ours.to_torch() is stock


def test_the_way_back_follows_the_weights_wherever_they_went():
    stock = LlamaMLP()
    ours = GatedMLP.from_torch(stock).double()
    assert ours.to_torch().gate_proj.weight.dtype == torch.float64
    x = torch.randn(3, 16, dtype=torch.float64)
    torch.testing.assert_close(ours.to_torch()(x), ours(x))
    with pytest.raises(TypeError, match="no module to go back to"):
        GatedMLP(4, 8).to_torch()


def test_gated_mlp_loads_what_is_stored_apart():
    stock = LlamaMLP()
    ours = GatedMLP(16, 24)
    ours.load_state_dict(stock.state_dict())
    x = torch.randn(3, 16)
    torch.testing.assert_close(ours(x), stock(x))
    again = torch.nn.Sequential(GatedMLP(16, 24))
    again.load_state_dict({f"0.{name}": t for name, t in ours.state_dict().items()})
    torch.testing.assert_close(again(x), stock(x))


def test_gated_mlp_learns():
    ours = GatedMLP.from_torch(LlamaMLP())
    ours(torch.randn(3, 16)).sum().backward()
    assert all(p.grad is not None for p in ours.parameters())
    assert [name for name, _ in ours.named_parameters()] == ["gate_up_proj.weight", "down_proj.weight"]


def test_gated_mlp_refuses_what_it_does_not_know():
    with pytest.raises(TypeError, match="given Linear with NoneType, NoneType, NoneType; it must have gate_proj"):
        GatedMLP.from_torch(torch.nn.Linear(2, 2))
    with pytest.raises(
        TypeError, match=r"given LlamaMLP with Linear, Linear, Linear; it must have gate_proj.*without a bias"
    ):
        GatedMLP.from_torch(LlamaMLP(bias=True))
    frozen, narrow = LlamaMLP(), LlamaMLP()
    frozen.up_proj.weight.requires_grad_(False)
    narrow.down_proj = torch.nn.Linear(12, 16, bias=False)
    for module in (frozen, narrow):
        with pytest.raises(TypeError, match="do not fit, or only one of the first two is trained"):
            GatedMLP.from_torch(module)
    tripled = type("Tripled", (torch.nn.Linear,), {"forward": lambda self, x: 3.0 * F.linear(x, self.weight)})
    other = LlamaMLP()
    other.gate_proj = tripled(16, 24, bias=False)
    with pytest.raises(TypeError, match=r"with Tripled, Linear, Linear; .*no subclass"):
        GatedMLP.from_torch(other)
    with pytest.raises(TypeError, match=r"its act_fn is Softplus.*give activation"):
        GatedMLP.from_torch(LlamaMLP(act_fn=torch.nn.Softplus()))
    assert GatedMLP.from_torch(LlamaMLP(act_fn=F.silu)).activation == "silu"
    assert GatedMLP.from_torch(LlamaMLP(act_fn=torch.nn.Softplus()), activation="gelu").activation == "gelu"


def test_what_was_frozen_goes_back_frozen():
    stock = LlamaMLP()
    ours = GatedMLP.from_torch(stock).requires_grad_(False)
    assert not any(p.requires_grad for p in ours.to_torch().parameters())
    assert all(p.requires_grad for p in ours.requires_grad_(True).to_torch().parameters())


def test_a_module_shows_what_was_asked_for():
    ours = GatedMLP(8, 16)
    assert "recompute" not in repr(ours)
    ours.recompute = True
    assert "activation='silu', recompute=True" in repr(ours)


def feed_forward(*between, device=None):
    return torch.nn.Sequential(
        torch.nn.Linear(16, 24, device=device), torch.nn.GELU(), *between, torch.nn.Linear(24, 12, device=device)
    )


@pytest.mark.parametrize("level", [None, "triton"])
@pytest.mark.parametrize("between", [(), (torch.nn.Dropout(0.25),)], ids=["plain", "dropout"])
def test_mlp_is_the_sequence(between, level, device):
    torch.manual_seed(0)
    stock = feed_forward(*between, device=device).eval()
    ours = MLP.from_torch(stock, level=level)
    x = torch.randn(2, 5, 16, device=device)
    torch.testing.assert_close(ours(x), stock(x))
    assert ours.fc1.weight is stock[0].weight
    assert ours.fc2.bias is stock[-1].bias
    assert ours.dropout.p == (0.25 if between else 0.0)
    torch.testing.assert_close(ours.to_torch()(x), stock(x), rtol=0, atol=0)


def test_mlp_drops_while_it_is_training():
    ours = MLP(16, 24, "relu", p=0.5)
    x = torch.randn(4, 16)
    assert not torch.equal(ours(x), ours(x))
    ours.eval()
    assert torch.equal(ours(x), ours(x))
    assert ours(x).shape == (4, 16)


def test_mlp_refuses_what_it_does_not_know():
    with pytest.raises(TypeError, match=r"given Linear, GELU, ReLU, Linear; it must be torch\.nn\.Sequential of"):
        MLP.from_torch(feed_forward(torch.nn.ReLU()))
    with pytest.raises(TypeError, match="given Linear; it must be"):
        MLP.from_torch(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("level", ["native", "triton"])
def test_one_row_needs_no_dimension_of_rows(level, device):
    torch.manual_seed(0)
    x, weight = torch.randn(16, device=device, requires_grad=True), torch.randn(24, 16, device=device)
    down = torch.randn(5, 12, device=device)
    for run in (
        lambda x: linear_act(x, weight, None, "gelu", level=level),
        lambda x: gated_mlp(x, weight, down, level=level),
    ):
        one, rows = run(x), run(x[None])
        assert torch.equal(one, rows[0])
        assert torch.equal(*(torch.autograd.grad(y.sum(), x)[0] for y in (one, rows)))
