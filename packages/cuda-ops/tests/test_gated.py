"""swiglu, geglu and reglu: against plain PyTorch in float64, in every combination, on every instruction set."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kernel_pytorch.cuda_ops import LIBRARY, geglu, levels, reglu, swiglu
from kernel_pytorch.cuda_ops._fused_ln_act.activations import activate
from kernel_pytorch.harness.checks import check_compiled_equals_eager

operators = torch.ops.kernel_pytorch_cuda
FUNCTIONS = {
    "silu": lambda gate, up, limit: swiglu(gate, up, 1.702, limit, 1.0),
    "gelu": lambda gate, up, limit: geglu(gate, up, "none", limit),
    "gelu_tanh": lambda gate, up, limit: geglu(gate, up, "tanh", limit),
    "relu": lambda gate, up, limit: reglu(gate, up, limit),
}
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def runs_on(device, dtype):
    if (reason := levels.unavailable("cuda", torch.device(device), dtype)) is not None:
        pytest.skip(reason)


def make(*shape, dtype=torch.float32, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()


def plain(gate, up, activation, limit):
    gate, up = gate.double(), up.double()
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if activation == "silu":
        return gate * torch.sigmoid(1.702 * gate) * (up + 1.0)
    return activate(gate, activation) * up


def check(activation, shape, dtype, limit=None, packed=False, device="cpu"):
    """Result and gradients against those of plain PyTorch in float64."""
    if packed:
        gate = make(*shape[:-1], 2 * shape[-1], dtype=dtype, device=device)
        y, leaves = FUNCTIONS[activation](gate, None, limit), (gate,)
        want = plain(*gate.chunk(2, -1), activation, limit)
    else:
        gate, up = make(*shape, dtype=dtype, device=device), make(*shape, dtype=dtype, device=device, seed=1)
        y, leaves = FUNCTIONS[activation](gate, up, limit), (gate, up)
        want = plain(gate, up, activation, limit)
    assert y.dtype == dtype
    assert y.is_contiguous()
    dy = make(*shape, dtype=dtype, device=device, seed=2).detach()
    close = {"rtol": TOLERANCES[dtype], "atol": TOLERANCES[dtype]}
    torch.testing.assert_close(y.double(), want, **close)
    for got, expected in zip(
        torch.autograd.grad(y, leaves, dy), torch.autograd.grad(want, leaves, dy.double()), strict=True
    ):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), expected.double(), **close)


@pytest.mark.parametrize("activation", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("limit", [None, 0.7])
def test_result_and_gradients(activation, dtype, packed, limit, device):
    runs_on(device, dtype)
    for shape in [(5, 33), (2, 3, 64), (7, 1), (1, 4099)]:
        check(activation, shape, dtype, limit, packed, device)


@pytest.mark.parametrize("isa", LIBRARY.instruction_sets[:-1])  # on the best run all the others
def test_every_instruction_set(isa, run_on):
    program = (
        "from test_gated import *\nfor a in FUNCTIONS:\n for d in DTYPES:\n  for p in (False, True):\n"
        "   check(a, (5, 33), d, 0.7, p); check(a, (3, 4099), d, None, p)"
    )
    run_on(isa, program)


def test_a_wrong_result_is_found(monkeypatch):
    monkeypatch.setitem(FUNCTIONS, "relu", lambda gate, up, limit: reglu(gate, up, limit) * (1.0 + 1e-4))
    with pytest.raises(AssertionError, match="not close"):
        check("relu", (5, 33), torch.float32)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck's own
@pytest.mark.parametrize("packed", [False, True])
def test_opcheck(packed, device):
    runs_on(device, torch.float32)
    gate = make(3, 4, 10, device=device).detach().transpose(0, 1).requires_grad_()
    up = None if packed else make(4, 3, 10, device=device, seed=1)
    dy = make(4, 3, 5 if packed else 10, device=device, seed=2)
    torch.library.opcheck(operators.gated.default, (gate, up, "silu", 1.702, 0.7, 1.0))
    for needs in [(True, True), (True, False), (False, True)]:
        torch.library.opcheck(operators.gated_backward.default, (dy, gate, up, "gelu", 1.0, None, 0.0, *needs))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_is_bitwise_eager(dynamic, device):
    runs_on(device, torch.float32)
    tensors = [make(6, 40, device=device), make(6, 40, device=device, seed=1)]
    check_compiled_equals_eager(lambda gate, up: swiglu(gate, up, 1.0, 7.0, 1.0), tensors, dynamic=dynamic)


@pytest.mark.parametrize("activation", FUNCTIONS)
@pytest.mark.parametrize("packed", [False, True])
def test_second_derivatives(activation, packed):
    gate = make(3, 8, dtype=torch.float64)
    up = None if packed else make(3, 8, dtype=torch.float64, seed=1)
    inputs = (gate,) if packed else (gate, up)
    assert torch.autograd.gradgradcheck(lambda *given: FUNCTIONS[activation](*given, *(None,) * packed, None), inputs)


@pytest.mark.parametrize("needed", [(True, False), (False, True), (True, True), (False, False)])
def test_only_the_gradients_that_are_needed(needed):
    gate, up = make(4, 9), make(4, 9, seed=1)
    whole = torch.autograd.grad(swiglu(gate, up).sum(), (gate, up))
    tensors = [t.detach().requires_grad_(need) for t, need in zip((gate, up), needed, strict=True)]
    y = swiglu(*tensors)
    assert y.requires_grad == any(needed)
    for tensor, need, expected in zip(tensors, needed, whole, strict=True):
        if need:
            assert torch.equal(torch.autograd.grad(y.sum(), tensor, retain_graph=True)[0], expected)
    empty = operators.gated_backward(y.detach(), gate.detach(), up.detach(), "silu", 1.0, None, 0.0, *needed)
    assert [t.numel() > 0 for t in empty] == list(needed)


def test_dtypes_that_differ():
    for left, right, promoted in [
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float16, torch.bfloat16, torch.float32),
        (torch.float32, torch.float64, torch.float64),
    ]:
        gate, up = make(3, 9, dtype=left), make(3, 9, dtype=right, seed=1)
        y = swiglu(gate, up)
        assert y.dtype == promoted
        torch.testing.assert_close(y, (torch.nn.functional.silu(gate.to(promoted)) * up.to(promoted)))
        assert [g.dtype for g in torch.autograd.grad(y.sum(), (gate, up))] == [left, right]


def test_any_strides_and_no_rows():
    gate, up = make(6, 2, 9), make(9, 2, 6, seed=1)
    turned = gate.transpose(0, 2), up
    assert torch.equal(swiglu(*turned), swiglu(turned[0].contiguous(), up))
    every_other = make(5, 24)[:, ::2]
    assert torch.equal(swiglu(every_other), swiglu(every_other.contiguous()))
    for shape in [(0, 8), (3, 0, 8)]:
        packed = torch.empty(shape, requires_grad=True)
        y = swiglu(packed)
        assert y.shape == (*shape[:-1], 4)
        assert torch.autograd.grad(y.sum(), packed)[0].shape == shape


def test_bits_do_not_depend_on_threads():
    gate, up = make(70, 5000, dtype=torch.bfloat16), make(70, 5000, dtype=torch.bfloat16, seed=1)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            y = geglu(gate, up)
            found.append((y, *torch.autograd.grad(y.sum(), (gate, up))))
    finally:
        torch.set_num_threads(before)
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


def test_flops_are_counted():
    with FlopCounterMode(display=False) as counter:
        swiglu(make(4, 6), make(4, 6))
    assert counter.get_total_flops() == 4 * 6 * 5


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: swiglu(torch.ones(3, 5)),
            "gate: shape is \\(3, 5\\); packed with up, its last dimension must be even",
        ),
        (lambda: swiglu(torch.ones(())), "gate: shape is \\(\\); it needs at least one dimension"),
        (lambda: swiglu(torch.ones(3, 0)), "gate: shape is \\(3, 0\\); the last dimension must not be empty"),
        (lambda: swiglu(torch.ones(3, 4), torch.ones(3, 5)), "up: shape is \\(3, 5\\); it must be that of gate"),
        (lambda: swiglu(torch.ones(3, 4, dtype=torch.int32)), "gate: dtype is torch.int32; allowed are float16"),
        (lambda: swiglu(torch.ones(3, 4), torch.ones(3, 4, dtype=torch.bool)), "up: dtype is torch.bool"),
        (lambda: swiglu(torch.ones(3, 4), limit=-1.0), "limit: given -1; it must be positive"),
        (lambda: geglu(torch.ones(3, 4), approximate="fast"), "approximate: given 'fast'; allowed are 'none', 'tanh'"),
        (lambda: operators.gated(torch.ones(3, 4), None, "tanh", 1.0, None, 0.0), "activation: given 'tanh'; allowed"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(RuntimeError, match=message):
        call()
