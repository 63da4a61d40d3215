"""`linear_act`: what it computes and refuses, its gradients, operators and sharding; `LinearAct`."""

import math

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from kernel_pytorch.fused_ln_act import LinearAct, levels, linear_act
from kernel_pytorch.fused_ln_act._core.plans import forget_plans
from kernel_pytorch.fused_ln_act.linear.levels import reference
from kernel_pytorch.fused_ln_act.rules.activations import ACTIVATIONS
from kernel_pytorch.harness.checks import (
    check_compiled_equals_eager,
    check_export,
    check_gradient_combinations,
    check_second_derivatives,
)
from kernel_pytorch.harness.support import Processes

LEVELS = ["reference", "native", "torchscript", "triton"]  # "compile" is held by the declaration's tests
DEVICE = torch.device("cuda" if torch.cuda.device_count() > 1 else "cpu")
WHY_NO_TRITON = levels.LADDER.unavailable("triton", DEVICE, torch.float32)
operators = torch.ops.kernel_pytorch
pytestmark = [pytest.mark.filterwarnings("ignore:.torch.jit.*deprecated"), pytest.mark.slow]
triton_matmul = pytest.importorskip("kernel_pytorch.fused_ln_act.linear.kernels.matmul")
launcher = pytest.importorskip("kernel_pytorch.fused_ln_act._core.launch")


def layer(rows=9, depth=16, columns=24, device="cpu", dtype=torch.float32):
    torch.manual_seed(0)
    shapes = (rows, depth), (columns, depth), (columns,)
    x, weight, bias = (torch.randn(shape, device=device, dtype=dtype) for shape in shapes)
    return [x.requires_grad_(), (weight / math.sqrt(depth)).requires_grad_(), bias.requires_grad_()]


def triton_level(x, weight, bias, activation="silu", save=True):
    return linear_act(x, weight, bias, activation, save_preactivation=save, level="triton")


# What it computes.


@pytest.mark.parametrize("level", LEVELS)
def test_it_is_a_linear_layer_and_an_activation(level, device):
    x, weight, bias = layer(device=device)
    expected = F.linear(x, weight, bias)
    torch.testing.assert_close(linear_act(x, weight, bias, "identity", level=level), expected)
    torch.testing.assert_close(linear_act(x, weight, bias, "gelu", level=level), F.gelu(expected))
    torch.testing.assert_close(linear_act(x, weight, None, "silu", level=level), F.silu(F.linear(x, weight)))


@pytest.mark.parametrize("save", [True, False])
@pytest.mark.parametrize(
    "layout", ["transposed x", "transposed weight", "every second column", "shifted by one", "one row repeated"]
)
def test_any_strides(layout, save, device):
    x, weight, bias = (t.detach() for t in layer(8, 16, 24, device))
    if layout == "transposed x":
        x = x.t().contiguous().t()
    elif layout == "transposed weight":
        weight = weight.t().contiguous().t()
    elif layout == "every second column":
        x = x.repeat_interleave(2, 1)[:, ::2]
    elif layout == "shifted by one":
        x = torch.cat([x[:, :1], x], 1)[:, 1:]
    else:
        x = x[:1].expand(8, 16)
    arguments = [t.requires_grad_() for t in (x, weight, bias)]
    y, expected = triton_level(*arguments, save=save), reference.linear_act(*arguments, "silu", save)
    torch.testing.assert_close(y, expected)
    incoming = torch.randn(24, 8, device=device).t()  # strides of its own
    for ours, theirs in zip(*(torch.autograd.grad(o, arguments, incoming) for o in (y, expected)), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.fixture
def descriptors(monkeypatch):
    """How many descriptors have been made; of float32, which tensor cores would round, there are none."""
    made, plain = [], launcher.TensorDescriptor
    monkeypatch.setattr(launcher, "TensorDescriptor", lambda *a: made.append(1) or plain(*a))
    return made


@pytest.fixture
def copy_engine(monkeypatch):
    """Switch the copy engine on or off, which plans rest on."""

    def switch(engine):
        monkeypatch.setattr(triton_matmul, "copy_engine", lambda device: engine)
        forget_plans()

    yield switch
    forget_plans()


@pytest.mark.parametrize("shape", [(40, 48, 80), (33, 16, 8)])
def test_descriptors_and_pointers_give_the_same(shape, descriptors, copy_engine, device):
    x, weight, bias = layer(*shape, device, torch.float16)
    results, used = {}, []
    for engine in (True, False):
        if device.type == "cpu":  # a GPU may have none
            copy_engine(engine)
        for save in (True, False):
            y = triton_level(x, weight, bias, "gelu", save)
            results[engine, save] = [y, *torch.autograd.grad(y, (x, weight, bias), torch.ones_like(y))]
        used.append(len(descriptors))
    assert device.type != "cpu" or used[1] == used[0] > 0
    for save in (True, False):
        for a, b in zip(results[True, save], results[False, save], strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: bfloat16 through the copy engine")
@pytest.mark.parametrize("save", [True, False])
def test_descriptors_and_pointers_give_the_same_in_bfloat16(save, copy_engine, device):
    x, weight, bias = layer(1000, 768, 1032, device, torch.bfloat16)
    results = []
    for engine in (torch.cuda.get_device_capability() >= (9, 0), False):
        copy_engine(engine)
        y = triton_level(x, weight, bias, "gelu", save)
        results.append([y, *torch.autograd.grad(y, (x, weight, bias), torch.ones_like(y))])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: tensor cores")
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_tensor_cores(activation, device):
    """bfloat16 at a size with many tiles, against float64."""
    arguments = layer(1537, 640, 1160, device, torch.bfloat16)
    exact = [t.detach().double().requires_grad_() for t in arguments]
    truth = reference.linear_act(*exact, activation, True)
    for save in (True, False):
        y = triton_level(*arguments, activation, save)
        for a, b in zip(
            (y, *torch.autograd.grad(y, arguments, torch.ones_like(y))),
            (truth, *torch.autograd.grad(truth, exact, torch.ones_like(truth), retain_graph=True)),
            strict=True,
        ):
            assert ((a.double() - b).norm() / b.norm()).item() < 6e-3


def test_full_precision_unless_torch_allows_tf32():
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    assert triton_matmul.precision_of(torch.float32) == ("ieee", True)
    try:
        matmul.fp32_precision = "tf32"
        assert triton_matmul.precision_of(torch.float32) == ("tf32", False)
        assert triton_matmul.precision_of(torch.float64) == ("ieee", True)
        assert triton_matmul.precision_of(torch.bfloat16) == ("ieee", False)
    finally:
        matmul.fp32_precision = before


# Gradients.


@pytest.mark.parametrize("save", [True, False])
@pytest.mark.parametrize("level", LEVELS)
def test_every_combination_of_inputs(level, save, device):
    def function(x, weight, bias):
        return linear_act(x, weight, bias, "gelu", save_preactivation=save, level=level)

    check_gradient_combinations(function, layer(device=device))


@pytest.mark.parametrize("activation", ["gelu", "tanh", "identity"])
@pytest.mark.parametrize("level", LEVELS)
def test_second_derivatives(level, activation, device):
    def function(x, weight, bias):
        return linear_act(x, weight, bias, activation, level=level)

    check_second_derivatives(function, layer(2, 3, 4, device), fast=level == "triton")


def test_second_derivatives_of_what_is_computed_again(device):
    check_second_derivatives(lambda *t: triton_level(*t, save=False), layer(2, 3, 2, device), fast=True)
    check_second_derivatives(lambda x, weight: triton_level(x, weight, None), layer(2, 3, 2, device)[:2], fast=True)


# Operators.


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck's own, torch 2.15
def test_opcheck(device):
    x, weight, bias = layer(device=device)
    dy = torch.randn(9, 24, device=device, requires_grad=True)
    for arguments in [(x, weight, bias, "gelu", True), (x, weight, None, "relu", False)]:
        torch.library.opcheck(operators.linear_act.default, arguments)
    for arguments in [
        (dy, None, x, weight, bias, "gelu", True, True),
        (dy, dy.detach(), x, weight, bias, "silu", True, False),
        (dy, None, x, weight, None, "identity", True, False),
    ]:
        torch.library.opcheck(operators.linear_act_backward.default, arguments)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_is_bitwise_eager(dynamic, device):
    check_compiled_equals_eager(triton_level, layer(device=device), dynamic=dynamic)


@pytest.mark.parametrize("level", ["triton", None])
def test_export(level, device):
    arguments = [t.detach() for t in layer(device=device)]
    program = check_export(lambda *t: linear_act(*t, "gelu", level=level), arguments)
    if level == "triton":
        assert sum("kernel_pytorch" in str(node.target) for node in program.graph.nodes) == 1


def test_flop_counter(device):
    x, weight, bias = layer(device=device)
    with FlopCounterMode(display=False) as counter:
        triton_level(x, weight, bias, save=False).sum().backward()
    counts = counter.get_flop_counts()["Global"]
    product = 2 * 9 * 16 * 24
    assert counts[operators.linear_act] == product + 5 * 9 * 24
    assert counts[operators.linear_act_backward] == product + 9 * 9 * 24
    assert counts[torch.ops.aten.mm] == 2 * product


@pytest.mark.parametrize("level", ["native", "triton"])
def test_autocast(level, device):
    x, weight, bias = layer(device=device)
    with torch.autocast(device.type, torch.float16):
        y = linear_act(x, weight, bias, "silu", level=level)
    assert y.dtype == torch.float16
    gradients = torch.autograd.grad(y.float().sum(), (x, weight, bias))
    assert all(g.dtype == torch.float32 for g in gradients)
    torch.testing.assert_close(y.float(), F.silu(F.linear(x, weight, bias)), rtol=2e-2, atol=2e-2)


# Sharding.


def sharded(mesh, of_x, of_weight):
    """Where results are placed, messages that were sent for them, and how far they are off."""
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    placements = {"replicate": Replicate(), "rows": Shard(0), "columns": Shard(0)}
    whole = layer(10, 16, 24, mesh.device_type)
    own = [
        distribute_tensor(t.detach(), mesh, [placements[p]], src_data_rank=None).requires_grad_()
        for t, p in zip(whole, (of_x, of_weight, of_weight), strict=True)
    ]
    with CommDebugMode() as messages:
        y = triton_level(*own, "gelu")
        dy = distribute_tensor(torch.ones(10, 24, device=mesh.device_type), mesh, y.placements, src_data_rank=None)
        gradients = torch.autograd.grad(y, own, dy)
    expected = reference.linear_act(*whole, "gelu", True)
    truths = torch.autograd.grad(expected, whole, torch.ones_like(expected))
    off = max(
        (a.full_tensor() - b).abs().max().item() for a, b in zip((y, *gradients), (expected, *truths), strict=True)
    )
    names = {Replicate(): "replicate", Partial(): "partial", Shard(0): "shard 0", Shard(1): "shard 1"}
    return [names[t.placements[0]] for t in (y, *gradients)], messages.get_total_counts(), off


@pytest.mark.skipif(WHY_NO_TRITON is not None, reason=str(WHY_NO_TRITON))
def test_sharding():
    with Processes(device_type=DEVICE.type) as two:
        for placed, messages, off in two.call(sharded, "rows", "replicate"):
            assert (placed, messages) == (["shard 0", "shard 0", "partial", "partial"], 0)
            assert off < 1e-4
        for placed, messages, off in two.call(sharded, "replicate", "columns"):
            assert (placed, messages) == (["shard 1", "partial", "shard 0", "shard 0"], 0)
            assert off < 1e-4


# What it refuses.


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": [1.0]}, TypeError, r"x: given list; it must be a torch\.Tensor"),
        ({"weight": torch.ones(24, 15)}, ValueError, r"weight: shape is \(24, 15\).*the last 16"),
        ({"weight": torch.ones(24, 16).half()}, TypeError, r"weight: dtype is torch\.float16; it must be that of x"),
        ({"bias": torch.ones(23)}, ValueError, r"bias: shape is \(23,\)"),
        ({"bias": torch.ones(24, device="meta")}, ValueError, "bias: device is meta"),
        ({"activation": "gelou"}, ValueError, "activation: given 'gelou'; allowed are 'gelu', 'gelu_tanh'"),
        ({"level": "fast"}, ValueError, "level: given 'fast'"),
    ],
)
def test_bad_input(change, error, message):
    good = {"x": torch.ones(9, 16), "weight": torch.ones(24, 16), "bias": torch.ones(24), "activation": "gelu"}
    with pytest.raises(error, match=message):
        linear_act(**(good | change))


def test_calling_the_operator_checks_what_would_read_foreign_memory(device):
    x, weight, bias = (t.detach() for t in layer(device=device))
    with pytest.raises(ValueError, match=r"weight: shape is \(24, 15\)"):
        operators.linear_act(x, weight[:, 1:], bias, "gelu", True)
    with pytest.raises(ValueError, match=r"bias: shape is \(23,\); it must be \(24,\)"):
        operators.linear_act(x, weight, bias[1:], "gelu", True)
    with pytest.raises(ValueError, match=r"dy: shape is \(9, 23\)"):
        operators.linear_act_backward(torch.ones(9, 23, device=device), None, x, weight, bias, "gelu", True, True)


# The module.


@pytest.mark.parametrize("level", [None, "triton"])
def test_the_module_is_the_sequence(level, device):
    torch.manual_seed(0)
    stock = torch.nn.Sequential(torch.nn.Linear(16, 24, device=device), torch.nn.GELU("tanh")).eval()
    ours = LinearAct.from_torch(stock, level=level)
    x = torch.randn(3, 5, 16, device=device)
    torch.testing.assert_close(ours(x), stock(x))
    assert ours.weight is stock[0].weight
    assert list(ours.state_dict()) == ["weight", "bias"]
    assert not ours.training
    back = ours.to_torch()
    assert back[0].weight is stock[0].weight
    torch.testing.assert_close(back(x), stock(x), rtol=0, atol=0)
    assert "activation='gelu_tanh'" in repr(ours)
    assert "save_preactivation=False" in repr(LinearAct(8, 3, "gelu", save_preactivation=False))


def test_the_module_refuses_what_it_does_not_know():
    with pytest.raises(
        TypeError, match=r"given Linear, Softplus; it must be torch\.nn\.Sequential of Linear and one of"
    ):
        LinearAct.from_torch(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Softplus()))
    with pytest.raises(TypeError, match="'quick_gelu' has no module in PyTorch"):
        LinearAct(2, 2, "quick_gelu").to_torch()


def test_activations_of_transformers_are_taken_over_by_name():
    """They are classes of its own, and it need not be installed."""
    kind = type("NewGELUActivation", (torch.nn.Module,), {"forward": lambda self, x: F.gelu(x, approximate="tanh")})
    stock = torch.nn.Sequential(torch.nn.Linear(8, 5), kind())
    ours, x = LinearAct.from_torch(stock), torch.randn(3, 8)
    assert ours.activation == "gelu_tanh"
    torch.testing.assert_close(ours(x), stock(x))
    with pytest.raises(TypeError, match=r"it must be torch.nn.Sequential of Linear and one of GELU, .* transformers"):
        LinearAct.from_torch(torch.nn.Sequential(stock[0], type("ClippedGELUActivation", (torch.nn.GELU,), {})()))
