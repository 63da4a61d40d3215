"""A gated activation and the layer behind it: the same numbers as one after the other, and h is not saved."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from kernel_pytorch.fused_ln_act import patch, swiglu
from kernel_pytorch.fused_ln_act.gated import operators
from kernel_pytorch.fused_ln_act.levels import LADDER
from kernel_pytorch.harness.checks import check_gradient_combinations

ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu}
SHAPES = {
    "one tile": (4, 32, 16),
    "several tiles and an odd rest": (37, 130, 24),
    "one column": (5, 1, 3),
    "one row": (1, 40, 8),
    "no row": (0, 8, 4),
}


class Gated(torch.nn.Module):
    """As Llama has it."""

    def __init__(self, bias=False, dtype=torch.float32):
        super().__init__()
        self.gate_proj, self.up_proj = (torch.nn.Linear(8, 12, bias=False, dtype=dtype) for _ in range(2))
        self.down_proj, self.act_fn = torch.nn.Linear(12, 8, bias=bias, dtype=dtype), torch.nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def drawn(rows, hidden, outputs, device, dtype=torch.float32):
    torch.manual_seed(0)
    shapes = (2, rows, hidden), (2, rows, hidden), (outputs, hidden)
    return [torch.randn(shape, device=device, dtype=dtype).requires_grad_() for shape in shapes]


def scalars(activation="silu", alpha=1.0, limit=None, offset=0.0):
    return activation, alpha, limit, offset


def separate(gate, up, weight, activation, alpha, limit, offset):
    return F.linear(operators.gated(gate, up, activation, alpha, limit, offset), weight)


def with_gradients(function, tensors, *given):
    y = function(*tensors, *given)
    torch.manual_seed(1)
    return y.detach(), *torch.autograd.grad(y, tensors, torch.randn(y.shape).to(y))


@pytest.fixture
def triton_is_default(monkeypatch, device):
    LADDER.forget()
    monkeypatch.setattr(LADDER, "default", lambda *_: "triton")
    yield device
    LADDER.forget()


def saved_bytes(model, x):
    """Memory of all that the graph of a model saves, parameters aside."""
    found, parameters = {}, {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor):
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = model(x)  # which holds what is saved, so that no memory is used twice
    assert y.requires_grad
    return sum(size for storage, size in found.items() if storage not in parameters)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("given", [*map(scalars, ACTIVATIONS), scalars("silu", 1.7, 0.7, 1.0)], ids=str)
def test_bit_for_bit_what_the_two_do(shape, given, device):
    tensors = drawn(*SHAPES[shape], device)
    ours, theirs = (with_gradients(f, tensors, *given) for f in (operators.gated_linear, separate))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_oracle(activation, device):
    gate, up, weight = (t.detach().double().cpu().requires_grad_() for t in drawn(37, 130, 24, device))
    truth = with_gradients(lambda g, u, w: F.linear(ACTIVATIONS[activation](g) * u, w), (gate, up, weight))
    ours = with_gradients(operators.gated_linear, drawn(37, 130, 24, device), *scalars(activation))
    for one, other in zip(ours, truth, strict=True):
        torch.testing.assert_close(one.cpu().double(), other, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("strides", ["transposed", "expanded", "sliced"])
def test_any_strides(strides, device):
    gate, up, weight = (t.detach() for t in drawn(6, 20, 4, device))
    if strides == "transposed":
        gate = gate.transpose(0, 1).contiguous().transpose(0, 1)
    elif strides == "expanded":
        up = up[:1].expand_as(gate)
    else:
        gate, up = torch.cat([gate, up], -1).chunk(2, -1)
    tensors = [t.requires_grad_() for t in (gate, up, weight)]
    ours, theirs = (with_gradients(f, tensors, *scalars()) for f in (operators.gated_linear, separate))
    torch.testing.assert_close(ours, theirs)


def test_every_combination_of_gradients(device):
    check_gradient_combinations(lambda *t: operators.gated_linear(*t, *scalars()), drawn(3, 9, 4, device))


def test_first_and_second_derivatives(device):
    tensors = [t.detach().double().requires_grad_() for t in drawn(2, 3, 3, device)]
    assert torch.autograd.gradcheck(lambda *t: operators.gated_linear(*t, *scalars()), tensors)
    assert torch.autograd.gradgradcheck(lambda *t: operators.gated_linear(*t, *scalars()), tensors)


def test_what_is_refused(device):
    gate, up, weight = drawn(3, 8, 4, device)
    with pytest.raises(ValueError, match=r"weight: shape is \(4, 7\)"):
        operators.gated_linear(gate, up, weight[:, :7], *scalars())
    with pytest.raises(TypeError, match=r"weight: dtype is torch\.float64"):
        operators.gated_linear(gate, up, weight.double(), *scalars())
    with pytest.raises(ValueError, match="up: shape is"):
        operators.gated_linear(gate, up[:1], weight, *scalars())
    with pytest.raises(ValueError, match="activation"):
        operators.gated_linear(gate, up, weight, *scalars("tanh"))
    freed = weight.detach().clone()
    freed.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"weight: .* its storage holds nothing"):
        operators.gated_linear(gate.detach(), up.detach(), freed, *scalars())


def test_operators_are_declared_right(device):
    gate, up, weight = drawn(3, 8, 4, device)
    dh = torch.randn_like(gate)
    for name, given in {
        "gated_linear": (gate, up, weight, *scalars()),
        "gated_linear_backward": (dh, gate.detach(), up.detach(), *scalars(), True, True),
    }.items():
        torch.library.opcheck(getattr(torch.ops.kernel_pytorch, name).default, given)


def test_operations_are_counted(device):
    rows, hidden, outputs = 2 * 3, 8, 4
    tensors = drawn(3, hidden, outputs, device)
    with FlopCounterMode(display=False) as counter:
        operators.gated_linear(*tensors, *scalars()).sum().backward()
    product = 2 * rows * hidden * outputs
    elementwise = counter.get_total_flops() - 3 * product
    assert 0 < elementwise < 40 * rows * hidden


# In a model.


def test_what_the_layer_reads_is_not_saved(triton_is_default):
    model, x = Gated().to(triton_is_default), torch.randn(50, 8, device=triton_is_default, requires_grad=True)
    stock = with_gradients(lambda x: model(x), [x])
    before = saved_bytes(model, x)
    patch(model)
    h = 50 * 12 * 4
    # Eager PyTorch saves gate, its activation, up and h; here it is gate and up. Both save x.
    assert before == x.nbytes + 4 * h
    assert saved_bytes(model, x) == x.nbytes + 2 * h
    torch.testing.assert_close(with_gradients(lambda x: model(x), [x]), stock)


def test_parameters_get_the_same_gradients(triton_is_default):
    stock, ours = Gated().to(triton_is_default), Gated().to(triton_is_default)
    ours.load_state_dict(stock.state_dict())
    patch(ours)
    x = torch.randn(2, 7, 8, device=triton_is_default)
    for model in (stock, ours):
        model(x).square().sum().backward()
    for (name, one), other in zip(ours.named_parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=lambda text, name=name: f"{name}: {text}")


def test_under_checkpointing(triton_is_default):
    model, x = Gated().to(triton_is_default), torch.randn(50, 8, device=triton_is_default, requires_grad=True)
    patch(model)
    expected = with_gradients(lambda x: model(x), [x])
    torch.testing.assert_close(with_gradients(lambda x: checkpoint(model, x, use_reentrant=False), [x]), expected)


def test_one_row_without_dimensions_in_front(triton_is_default):
    stock, ours = Gated().to(triton_is_default), Gated().to(triton_is_default)
    ours.load_state_dict(stock.state_dict())
    patch(ours)
    x = torch.randn(8, device=triton_is_default)
    for model in (stock, ours):
        model(x).square().sum().backward()
    for one, other in zip(ours.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_many_gradients_at_once(triton_is_default):
    model, x = Gated().to(triton_is_default), torch.randn(2, 8, device=triton_is_default, requires_grad=True)
    dy = torch.randn(4, 2, 8, device=triton_is_default)
    tensors = [x, *model.parameters()]
    stock = torch.autograd.grad(model(x), tensors, dy, is_grads_batched=True)
    patch(model)
    torch.testing.assert_close(torch.autograd.grad(model(x), tensors, dy, is_grads_batched=True), stock)


def test_forward_mode_after_an_ordinary_call(triton_is_default):
    model, x = Gated().to(triton_is_default), torch.randn(2, 8, device=triton_is_default)
    tangent = torch.randn_like(x)

    def derivative():
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(model(forward_ad.make_dual(x, tangent))).tangent

    stock = derivative()
    patch(model)
    model(x)
    torch.testing.assert_close(derivative(), stock)


class Adapter(torch.nn.Linear):
    """As an adapter stands in the place of a layer."""

    def forward(self, x):
        return super().forward(x) + 1.0


@pytest.mark.parametrize(
    "what", ["adapter", "bias", "hook", "hook on all", "forward", "frozen", "no gradient", "other dtype", "native"]
)
def test_where_the_layer_is_called_itself(what, triton_is_default, monkeypatch):
    device = triton_is_default
    model, x = Gated(bias=what == "bias").to(device), torch.randn(5, 8, device=device)
    calls = []
    if what == "adapter":
        model.down_proj = Adapter(12, 8, bias=False, device=device)
    stock = model(x)
    report, hook = patch(model), None
    if what == "hook on all":
        hook = torch.nn.modules.module.register_module_forward_hook(lambda *given: calls.append(1))
    elif what == "forward":  # as offloading and quantisation replace it
        own = model.down_proj.forward
        model.down_proj.forward = lambda x: own(x) * 3.0
        stock = 3.0 * stock
    elif what == "hook":
        model.down_proj.register_forward_hook(lambda *given: calls.append(1))
    elif what == "frozen":
        model.down_proj.weight.requires_grad_(False)
    elif what == "other dtype":
        model.down_proj.double()
    elif what == "native":
        monkeypatch.setattr(LADDER, "default", lambda *_: "native")
        LADDER.forget()

    def refuse(*given):
        raise AssertionError("the layer was not called")

    monkeypatch.setattr("kernel_pytorch.fused_ln_act.gated.operators.gated_linear", refuse)
    assert report.replaced
    with torch.set_grad_enabled(what != "no gradient"):
        if what == "other dtype":
            with pytest.raises(RuntimeError, match="dtype"):
                model(x)
            return
        found = model(x)
    if hook is not None:
        hook.remove()
    torch.testing.assert_close(found, stock)
    assert "hook" not in what or calls


def test_a_plain_layer_is_not_called(triton_is_default, monkeypatch):
    """Without it the tests above would pass for a function that is never reached."""
    model, x = Gated().to(triton_is_default), torch.randn(5, 8, device=triton_is_default)
    patch(model)
    seen = []
    real = operators.gated_linear
    monkeypatch.setattr(
        "kernel_pytorch.fused_ln_act.gated.operators.gated_linear", lambda *given: (seen.append(1), real(*given))[1]
    )
    gate, up = model.gate_proj(x), model.up_proj(x)
    torch.testing.assert_close(model(x), model.down_proj(swiglu(gate, up, level="reference")))
    assert seen
