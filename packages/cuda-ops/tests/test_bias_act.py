"""bias_act: against plain PyTorch in float64, in every combination, on every instruction set."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kernel_pytorch.cuda_ops import LIBRARY, bias_act, levels
from kernel_pytorch.cuda_ops._fused_ln_act.activations import ACTIVATIONS, activate
from kernel_pytorch.harness.checks import check_compiled_equals_eager

operators = torch.ops.kernel_pytorch_cuda
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
TOLERANCES = {torch.float64: 1e-12, torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def runs_on(device, dtype):
    if (reason := levels.unavailable("cuda", torch.device(device), dtype)) is not None:
        pytest.skip(reason)


def make(*shape, dtype=torch.float32, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()


def check(activation, shape, dtype, bias_dtype=None, device="cpu"):
    """Result and gradients against those of plain PyTorch in float64; no bias where it has no dtype."""
    x = make(*shape, dtype=dtype, device=device)
    bias = None if bias_dtype is None else make(shape[-1], dtype=bias_dtype, device=device, seed=1)
    leaves = (x,) if bias is None else (x, bias)
    y = bias_act(x, bias, activation)
    assert y.dtype == dtype
    assert y.is_contiguous()
    want = activate(x.double() + (0.0 if bias is None else bias.double()), activation)
    dy = make(*shape, dtype=dtype, device=device, seed=2).detach()
    torch.testing.assert_close(y.double(), want, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])
    for got, expected in zip(
        torch.autograd.grad(y, leaves, dy), torch.autograd.grad(want, leaves, dy.double()), strict=True
    ):
        assert got.dtype == expected.dtype
        tolerance = max(TOLERANCES[dtype], TOLERANCES[got.dtype])
        torch.testing.assert_close(got.double(), expected.double(), rtol=tolerance, atol=8 * tolerance)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_result_and_gradients(activation, dtype, device):
    runs_on(device, dtype)
    for shape in [(5, 33), (2, 3, 64), (7, 1), (1, 4099), (131, 40)]:
        check(activation, shape, dtype, dtype, device)
        check(activation, shape, dtype, None, device)


@pytest.mark.parametrize(
    ("dtype", "bias_dtype"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.float32, torch.float64),
        (torch.float64, torch.float32),
    ],
)
def test_bias_of_another_dtype(dtype, bias_dtype):
    check("gelu", (29, 33), dtype, bias_dtype)
    check("identity", (29, 33), dtype, bias_dtype)


@pytest.mark.parametrize("isa", LIBRARY.instruction_sets[:-1])  # on the best run all the others
def test_every_instruction_set(isa, run_on):
    program = (
        "from test_bias_act import *\nfor a in ACTIVATIONS:\n for d in DTYPES:\n"
        "  check(a, (131, 33), d, d); check(a, (3, 4099), d, None); check(a, (9, 17), d, torch.float32)"
    )
    run_on(isa, program)


def test_a_wrong_gradient_is_found(monkeypatch):
    right = bias_act
    monkeypatch.setitem(
        check.__globals__, "bias_act", lambda x, bias, name: right(x, bias, name) + 0.01 * (x - x.detach())
    )
    with pytest.raises(AssertionError, match="not close"):
        check("gelu", (5, 33), torch.float32, torch.float32)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck's own
@pytest.mark.parametrize("biased", [False, True])
def test_opcheck(biased, device):
    runs_on(device, torch.float32)
    x = make(3, 4, 10, device=device).detach().transpose(0, 1).requires_grad_()
    bias, dy = make(10, device=device, seed=1) if biased else None, make(4, 3, 10, device=device, seed=2)
    torch.library.opcheck(operators.bias_act.default, (x, bias, "gelu"))
    for needs in [(True, True), (True, False), (False, True)]:
        torch.library.opcheck(operators.bias_act_backward.default, (dy, x, bias, "silu", *needs))
        torch.library.opcheck(operators.bias_act_backward.default, (dy, None, bias, "identity", *needs))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_is_bitwise_eager(dynamic, device):
    runs_on(device, torch.float32)
    tensors = [make(6, 40, device=device), make(40, device=device, seed=1)]
    check_compiled_equals_eager(lambda x, bias: bias_act(x, bias, "gelu_tanh"), tensors, dynamic=dynamic)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_second_derivatives(activation):
    inputs = make(3, 8, dtype=torch.float64), make(8, dtype=torch.float64, seed=1)
    assert torch.autograd.gradgradcheck(lambda x, bias: bias_act(x, bias, activation), inputs)


@pytest.mark.parametrize("activation", ["gelu", "identity"])
@pytest.mark.parametrize("needed", [(True, False), (False, True), (True, True)])
def test_only_the_gradients_that_are_needed(activation, needed):
    x, bias = make(4, 9), make(9, seed=1)
    whole = torch.autograd.grad(bias_act(x, bias, activation).square().sum(), (x, bias))
    tensors = [t.detach().requires_grad_(need) for t, need in zip((x, bias), needed, strict=True)]
    y = bias_act(*tensors, activation)
    for tensor, need, expected in zip(tensors, needed, whole, strict=True):
        if need:
            assert torch.equal(torch.autograd.grad(y.square().sum(), tensor, retain_graph=True)[0], expected)
    empty = operators.bias_act_backward(y.detach(), x.detach(), bias.detach(), activation, *needed)
    assert [t.numel() > 0 for t in empty] == list(needed)


def test_the_incoming_gradient_is_not_written_to():
    x, bias = make(4, 9), make(9, seed=1)
    dy = torch.ones(4, 9)
    dx, _ = torch.autograd.grad(bias_act(x, bias, "identity"), (x, bias), dy)
    assert torch.equal(dy, torch.ones(4, 9))
    assert torch.equal(dx, dy)


def test_any_strides_and_no_rows():
    x, bias = make(6, 2, 9), make(12, seed=1)
    turned, every_other = x.transpose(0, 2), bias[::2]
    assert torch.equal(
        bias_act(turned, every_other, "silu"), bias_act(turned.contiguous(), every_other.clone(), "silu")
    )
    nothing = torch.empty(0, 6, requires_grad=True)
    weight = make(6)
    y = bias_act(nothing, weight, "gelu")
    dx, dbias = torch.autograd.grad(y.sum(), (nothing, weight))
    assert dx.shape == (0, 6)
    assert torch.equal(dbias, torch.zeros(6))
    assert bias_act(nothing, None, "gelu").shape == (0, 6)


def test_bits_do_not_depend_on_threads():
    x, bias = make(700, 500, dtype=torch.bfloat16), make(500, seed=1)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            y = bias_act(x, bias, "gelu")
            found.append((y, *torch.autograd.grad(y.float().square().sum(), (x, bias))))
    finally:
        torch.set_num_threads(before)
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


def test_flops_are_counted():
    with FlopCounterMode(display=False) as counter:
        bias_act(make(4, 6), make(6), "gelu")
    assert counter.get_total_flops() == 4 * 6 * 6


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bias_act(torch.ones(()), None, "gelu"), "x: shape is \\(\\); it needs at least one dimension"),
        (lambda: bias_act(torch.ones(3, 4), torch.ones(5), "gelu"), "bias: shape is \\(5,\\); for x of shape"),
        (lambda: bias_act(torch.ones(3, 4), torch.ones(1, 4), "gelu"), "bias: shape is \\(1, 4\\); for x of shape"),
        (
            lambda: bias_act(torch.ones(3, 4, dtype=torch.int64), None, "gelu"),
            "x: dtype is torch.int64; allowed are float16",
        ),
        (lambda: bias_act(torch.ones(3, 4), torch.ones(4, dtype=torch.bool), "gelu"), "bias: dtype is torch.bool"),
        (lambda: bias_act(torch.ones(3, 4), None, "mish"), "activation: given 'mish'; allowed are 'gelu', 'gelu_tanh'"),
        (
            lambda: operators.bias_act_backward(torch.ones(3, 4), None, None, "gelu", True, False),
            "x: given None; only 'identity' needs none",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(RuntimeError, match=message):
        call()
