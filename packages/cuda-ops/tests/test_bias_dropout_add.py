"""bias_dropout_add: against plain PyTorch in float64 with the same mask, on every instruction set."""

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kernel_pytorch.cuda_ops import LIBRARY, bias_dropout_add, levels
from kernel_pytorch.cuda_ops._core.philox import dropout
from kernel_pytorch.cuda_ops.rungs import rung
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


def seed_on(device="cpu"):
    return torch.tensor(-1234567890123456789, device=device)


def definition(x, bias, residual, p, seed):
    return residual + dropout(x if bias is None else x + bias, seed, p)


def check(shape, p, dtype, bias_dtype=None, residual_dtype=None, device="cpu"):
    """Result and gradients against those of plain PyTorch in float64; no bias where it has no dtype."""
    x, seed = make(*shape, dtype=dtype, device=device), seed_on(device)
    bias = None if bias_dtype is None else make(shape[-1], dtype=bias_dtype, device=device, seed=1)
    residual = make(*shape, dtype=residual_dtype or dtype, device=device, seed=2)
    leaves = [t for t in (x, bias, residual) if t is not None]
    y = bias_dropout_add(x, bias, residual, p, seed)
    assert y.dtype == torch.promote_types(dtype, residual.dtype)
    assert y.is_contiguous()
    want = definition(x.double(), None if bias is None else bias.double(), residual.double(), p, seed)
    dy = make(*shape, dtype=y.dtype, device=device, seed=3).detach()
    torch.testing.assert_close(y.double(), want, rtol=TOLERANCES[y.dtype], atol=4 * TOLERANCES[y.dtype])
    for got, expected in zip(
        torch.autograd.grad(y, leaves, dy), torch.autograd.grad(want, leaves, dy.double()), strict=True
    ):
        assert got.dtype == expected.dtype
        tolerance = max(TOLERANCES[y.dtype], TOLERANCES[got.dtype])
        torch.testing.assert_close(got.double(), expected.double(), rtol=tolerance, atol=8 * tolerance)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("dtype", DTYPES)
def test_result_and_gradients(p, dtype, device):
    runs_on(device, dtype)
    for shape in [(5, 33), (2, 3, 64), (7, 1), (2, 9001), (131, 40)]:
        check(shape, p, dtype, dtype, device=device)
        check(shape, p, dtype, device=device)


@pytest.mark.parametrize(("x", "bias", "residual"), list(itertools.product(DTYPES, repeat=3)))
def test_mixed_dtypes(x, bias, residual, device):
    for dtype in (x, bias, residual):
        runs_on(device, dtype)
    check((29, 40), 0.3, x, bias, residual, device)
    check((29, 33), 0.0, x, bias, residual, device)


@pytest.mark.parametrize("isa", LIBRARY.instruction_sets[:-1])  # on the best run all the others
def test_every_instruction_set(isa, run_on):
    program = (
        "from test_bias_dropout_add import *\nfor d in DTYPES:\n"
        " for p in (0.0, 0.4): check((131, 33), p, d, d); check((3, 4099), p, d); check((9, 17), p, d, torch.float32)"
    )
    run_on(isa, program)


def test_a_wrong_mask_is_found(monkeypatch):
    right = bias_dropout_add
    monkeypatch.setitem(check.__globals__, "bias_dropout_add", lambda *a: right(*a[:-1], a[-1] + 1))
    with pytest.raises(AssertionError, match="not close"):
        check((5, 33), 0.1, torch.float32, torch.float32)


def test_what_is_dropped_is_zero_whatever_it_was(device):
    runs_on(device, torch.float32)
    x = torch.full((4, 64), float("nan"), device=device)
    y = bias_dropout_add(x, None, torch.zeros_like(x), 0.5, seed_on(device))
    assert torch.equal(y.isnan(), dropout(torch.ones_like(x), seed_on(device), 0.5) > 0)
    assert y.nan_to_num(0.0).abs().max() == 0


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck's own
@pytest.mark.parametrize("p", [0.0, 0.25])
@pytest.mark.parametrize("biased", [False, True])
def test_opcheck(biased, p, device):
    runs_on(device, torch.float32)
    x = make(3, 4, 10, device=device).detach().transpose(0, 1).requires_grad_()
    bias, dy = make(10, device=device, seed=1) if biased else None, make(4, 3, 10, device=device, seed=2)
    torch.library.opcheck(operators.bias_dropout_add.default, (x, bias, dy, seed_on(device), p))
    for needs in [(True, True), (True, False), (False, True)]:
        arguments = (dy, bias, seed_on(device), p, "bfloat16", *needs)
        torch.library.opcheck(operators.bias_dropout_add_backward.default, arguments)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_is_bitwise_eager(dynamic, device):
    runs_on(device, torch.float32)
    tensors = [make(6, 40, device=device), make(40, device=device, seed=1), make(6, 40, device=device, seed=2)]
    seed = seed_on(device)
    check_compiled_equals_eager(lambda *t: bias_dropout_add(*t, 0.2, seed), tensors, dynamic=dynamic)


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_second_derivatives(p):
    inputs = [make(3, 8, dtype=torch.float64), make(8, dtype=torch.float64), make(3, 8, dtype=torch.float64)]

    def function(x, bias, residual):
        return bias_dropout_add(x, bias, residual, p, seed_on()).square()

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("needed", [n for n in itertools.product([False, True], repeat=3) if any(n)])
def test_only_the_gradients_that_are_needed(p, needed):
    whole = [make(4, 9), make(9, seed=1), make(4, 9, seed=2)]
    gradients = torch.autograd.grad(bias_dropout_add(*whole, p, seed_on()).square().sum(), whole)
    tensors = [t.detach().requires_grad_(need) for t, need in zip(whole, needed, strict=True)]
    y = bias_dropout_add(*tensors, p, seed_on())
    found = torch.autograd.grad(y.square().sum(), [t for t in tensors if t.requires_grad])
    wanted = [g for g, need in zip(gradients, needed, strict=True) if need]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    empty = operators.bias_dropout_add_backward(y.detach(), whole[1].detach(), seed_on(), p, "float32", *needed[:2])
    assert [t.numel() > 0 for t in empty] == list(needed[:2])


def test_the_incoming_gradient_is_not_written_to():
    x, bias, residual, dy = make(4, 9), make(9, seed=1), make(4, 9), torch.ones(4, 9)
    dx, _, dresidual = torch.autograd.grad(bias_dropout_add(x, bias, residual, 0.0, None), (x, bias, residual), dy)
    assert torch.equal(dy, torch.ones(4, 9))
    assert torch.equal(dx, dy)
    assert torch.equal(dresidual, dy)


def test_any_strides_and_no_rows():
    x, residual, bias = make(6, 2, 9), make(9, 2, 6, seed=1), make(12, seed=1)
    turned, every_other = x.transpose(0, 2), bias[::2]
    found = bias_dropout_add(turned, every_other, residual, 0.5, seed_on())
    assert torch.equal(found, bias_dropout_add(turned.contiguous(), every_other.clone(), residual, 0.5, seed_on()))
    nothing, weight = torch.empty(0, 6, requires_grad=True), make(6)
    y = bias_dropout_add(nothing, weight, nothing, 0.5, seed_on())
    dx, dbias = torch.autograd.grad(y.sum(), (nothing, weight))
    assert dx.shape == (0, 6)
    assert torch.equal(dbias, torch.zeros(6))


def test_bits_do_not_depend_on_threads():
    x, bias = make(700, 500, dtype=torch.bfloat16), make(500, seed=1)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            y = bias_dropout_add(x, bias, x.detach(), 0.1, seed_on())
            found.append((y, *torch.autograd.grad(y.float().square().sum(), (x, bias))))
    finally:
        torch.set_num_threads(before)
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


def test_flops_are_counted():
    with FlopCounterMode(display=False) as counter:
        bias_dropout_add(make(4, 6), make(6), make(4, 6), 0.5, seed_on()).sum().backward()
    counts = {operators.bias_dropout_add: 3 * 24, operators.bias_dropout_add_backward: 2 * 24}
    assert counter.get_flop_counts()["Global"] == counts


ONES = torch.ones(3, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((ONES[0, 0], None, ONES, 0.0, None), r"x: shape is \(\); it needs at least one dimension"),
        ((ONES, torch.ones(5), ONES, 0.0, None), r"bias_dropout_add: bias: shape is \(5,\); for x of shape"),
        ((ONES, None, ONES[:2], 0.0, None), r"residual: shape is \(2, 4\); it must be that of x, \(3, 4\)"),
        ((ONES.int(), None, ONES, 0.0, None), "x: dtype is torch.int32; allowed are float16"),
        ((ONES, None, ONES.bool(), 0.0, None), "residual: dtype is torch.bool"),
        ((ONES, None, ONES, 1.0, seed_on()), "p: given 1; it must be at least 0 and below 1"),
        ((ONES, None, ONES, 0.5, None), "seed: given None; with p 0.5 it must be an int64 tensor"),
        ((ONES, None, ONES, 0.5, torch.tensor(1.0)), "seed: .* it must be an int64 tensor of shape"),
        (
            (ONES, None, ONES, 0.5, torch.tensor([1])),
            r"seed: given torch.int64 of shape \(1,\); it must be an int64 tensor",
        ),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(RuntimeError, match=message):
        bias_dropout_add(*arguments)


def test_bad_dtype_of_a_gradient():
    with pytest.raises(RuntimeError, match="x_dtype: given 'int8'; allowed are 'float16'"):
        operators.bias_dropout_add_backward(ONES, None, None, 0.0, "int8", True, False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("columns", [33, 64, 4096])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_rung_on_cuda(number, columns, dtype):
    runs_on("cuda", dtype)
    x, residual = make(37, columns, dtype=dtype).detach().cuda(), make(37, columns, seed=1).detach().cuda()
    bias, seed = make(columns, dtype=dtype, seed=2).detach().cuda(), seed_on("cuda")
    with rung(number):
        y = operators.bias_dropout_add(x, bias, residual, seed, 0.3)
    want = definition(x.double(), bias.double(), residual.double(), 0.3, seed)
    torch.testing.assert_close(y.double(), want, rtol=4e-6, atol=4e-6)
