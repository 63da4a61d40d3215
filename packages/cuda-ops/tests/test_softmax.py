"""softmax: against plain PyTorch in float64, with every kind of mask, on every instruction set."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kernel_pytorch.cuda_ops import LIBRARY, levels, softmax
from kernel_pytorch.harness.checks import check_compiled_equals_eager

operators = torch.ops.kernel_pytorch_cuda
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


def masks(columns):
    """Shapes of masks for x of (3, 4, 5, columns): whole, causal, padding, by head, in the middle, by query, one."""
    return (
        None,
        (3, 4, 5, columns),
        (5, columns),
        (3, 1, 1, columns),
        (1, 4, 5, columns),
        (3, 1, 5, columns),
        (4, 5, 1),
        (),
    )


def runs_on(device, dtype):
    if (reason := levels.unavailable("cuda", torch.device(device), dtype)) is not None:
        pytest.skip(reason)


def make(*shape, dtype=torch.float32, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()


def mask_of(shape, dtype, device="cpu"):
    mask = make(*shape, device=device, seed=1).detach()
    return mask > -0.5 if dtype == torch.bool else mask.to(dtype).requires_grad_()


def plain(x, scale, mask):
    z = x.double() * scale
    if mask is None:
        return torch.softmax(z, -1)
    z = z.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else z + mask.double()
    nothing = z.amax(-1, keepdim=True) == -math.inf
    return torch.softmax(z.masked_fill(nothing, 0.0), -1).masked_fill(nothing, 0.0)


def check(shape, dtype, mask_shape=None, mask_dtype=None, device="cpu"):
    """Result and gradients against those of plain PyTorch in float64."""
    x = make(*shape, dtype=dtype, device=device)
    mask = None if mask_shape is None else mask_of(mask_shape, mask_dtype, device)
    leaves = [t for t in (x, mask) if t is not None and t.requires_grad]
    y, want = softmax(x, 0.7, mask), plain(x, 0.7, mask)
    added = mask is not None and mask_dtype != torch.bool
    assert y.dtype == (torch.promote_types(dtype, mask_dtype) if added else dtype)
    assert y.is_contiguous()
    torch.testing.assert_close(y.double(), want, rtol=TOLERANCES[y.dtype], atol=TOLERANCES[y.dtype])
    dy = make(*shape, dtype=y.dtype, device=device, seed=2).detach()
    for got, expected in zip(
        torch.autograd.grad(y, leaves, dy), torch.autograd.grad(want, leaves, dy.double()), strict=True
    ):
        assert got.dtype == expected.dtype
        tolerance = max(TOLERANCES[y.dtype], TOLERANCES[got.dtype])
        torch.testing.assert_close(got.double(), expected.double(), rtol=tolerance, atol=2 * tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mask_dtype", [torch.bool, *DTYPES])
@pytest.mark.parametrize("columns", [33, 40])  # no vectors make up such a row; some do
def test_masks(columns, dtype, mask_dtype, device):
    runs_on(device, dtype)
    if mask_dtype != torch.bool:
        runs_on(device, mask_dtype)
    for shape in masks(columns):
        check((3, 4, 5, columns), dtype, shape, mask_dtype, device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 1), (7, 8), (9, 64), (3, 1000), (2, 4099), (2, 40000), (2, 70000)])
def test_rows_of_every_length(shape, dtype, device):
    runs_on(device, dtype)
    check(shape, dtype, device=device)
    check(shape, dtype, shape[-1:], torch.bool, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_more_long_rows_than_clusters(dtype, device):
    """137 rows: a card has fewer clusters, which take several each."""
    runs_on(device, dtype)
    columns = 2 * 16384 // dtype.itemsize * 2 + 64
    x, dy = (make(137, columns, dtype=dtype, device=device, seed=seed) for seed in (0, 1))
    y = softmax(x, 0.7)
    want = plain(x, 0.7, None)
    error = (y.double() - want).abs().amax() / want.amax()
    assert error < TOLERANCES[dtype]
    (dx,) = torch.autograd.grad(y, x, dy)
    (expected,) = torch.autograd.grad(want, x, dy.double())
    assert (dx.double() - expected).abs().amax() / expected.abs().amax() < 2 * TOLERANCES[dtype]


def nearly_certain(columns, device):
    """x, dy and, in float64, dx of a row that is nearly one at its first column, where dx is a difference."""
    x, dy = (make(1, columns, device=device, seed=seed).detach() for seed in (0, 1))
    x[0, 0], dy[0, 0] = math.log(columns) + 12.0, 1000.0
    wide = x.double().requires_grad_()
    return x.requires_grad_(), dy, torch.autograd.grad(torch.softmax(wide, -1), wide, dy.double())[0]


@pytest.mark.parametrize(
    "columns", [33, 4099, 4096, 40000]
)  # two that no vectors make up; a block; where it can, a cluster
def test_where_the_gradient_cancels(columns, device):
    runs_on(device, torch.float32)
    if device.type == "cpu" and LIBRARY.instruction_sets != ("CUDA, emulated",):
        pytest.skip("the CPU backend takes dot as it is")
    x, dy, want = nearly_certain(columns, device)
    (dx,) = torch.autograd.grad(softmax(x), x, dy)
    assert ((dx - want) / want)[0, 0].abs() < 1e-5


def test_a_gradient_that_has_cancelled_is_found():
    """As most compute it: what dot is rounded by is as large as what is left."""
    x, dy, want = nearly_certain(4099, "cpu")
    y = torch.softmax(x, -1)
    dx = y * (dy - (dy * y).sum())
    assert ((dx - want) / want)[0, 0].abs() > 1e-2


@pytest.mark.parametrize("isa", LIBRARY.instruction_sets[:-1])  # on the best run all the others
def test_every_instruction_set(isa, run_on):
    program = (
        "from test_softmax import *\nfor d in DTYPES:\n for m in (torch.bool, d):\n"
        "  [check((3, 4, 5, 33), d, s, m) for s in masks(33)]; check((2, 4099), d, (4099,), m)"
    )
    run_on(isa, program)


def test_a_mask_that_is_not_applied_is_found(monkeypatch):
    right = softmax
    monkeypatch.setitem(check.__globals__, "softmax", lambda x, scale, mask: right(x, scale))
    with pytest.raises(AssertionError, match="not close"):
        check((3, 33), torch.float32, (33,), torch.bool)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_nothing_is_left_of_gives_zeros(dtype, device):
    runs_on(device, dtype)
    x = make(4, 40, dtype=dtype, device=device)
    kept = torch.ones(4, 40, dtype=torch.bool, device=device)
    kept[1] = False
    for mask in (kept, torch.zeros(4, 40, device=device, dtype=dtype).masked_fill(~kept, -math.inf)):
        y = softmax(x, 0.5, mask)
        (dx,) = torch.autograd.grad(y.float().square().sum(), x)
        assert torch.equal(y[1], torch.zeros_like(y[1]))
        assert torch.equal(dx[1], torch.zeros_like(dx[1]))
        torch.testing.assert_close(y[2].float().sum(), torch.tensor(1.0, device=device), rtol=2e-2, atol=0.0)


def test_infinities_and_nan(device):
    runs_on(device, torch.float32)
    x = torch.randn(6, 40, device=device)
    x[0, 3], x[1, 3], x[2, 3], x[3] = math.nan, math.inf, -math.inf, -math.inf
    assert softmax(x).isnan().all(1).tolist() == [True, True, False, True, False, False]
    kept = torch.ones(40, dtype=torch.bool, device=device)
    assert softmax(x, 1.0, kept).isnan().all(1).tolist() == [True, True, False, False, False, False]
    hidden = torch.full((40,), -math.inf, device=device)
    assert softmax(x, 1.0, hidden).isnan().any(1).tolist() == [True, True, False, False, False, False]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck's own
def test_opcheck(device):
    runs_on(device, torch.float32)
    x = make(3, 4, 10, device=device).detach().transpose(0, 1).requires_grad_()
    y = torch.softmax(make(4, 3, 10, device=device), -1).detach().requires_grad_()
    dy = make(4, 3, 10, device=device, seed=2)
    for shape, dtype in [(None, None), ((3, 10), torch.bool), ((4, 1, 10), torch.float32), ((3, 1), torch.float32)]:
        mask = None if shape is None else mask_of(shape, dtype, device)
        torch.library.opcheck(operators.softmax.default, (x, mask, 0.7))
        for needs in [(True, False), (True, True), (False, True)]:
            if mask is None or mask.requires_grad or not needs[1]:
                torch.library.opcheck(operators.softmax_backward.default, (dy, y, mask, 0.7, *needs))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_is_bitwise_eager(dynamic, device):
    runs_on(device, torch.float32)
    tensors = [make(6, 40, device=device), make(40, device=device, seed=1)]
    check_compiled_equals_eager(lambda x, mask: softmax(x, 0.3, mask), tensors, dynamic=dynamic)


def test_second_derivatives():
    inputs = make(3, 2, 8, dtype=torch.float64), make(2, 8, dtype=torch.float64, seed=1)
    assert torch.autograd.gradgradcheck(lambda x, mask: softmax(x, 0.7, mask), inputs)


@pytest.mark.parametrize("needed", [(True, False), (False, True), (True, True)])
def test_only_the_gradients_that_are_needed(needed):
    x, mask = make(4, 9), make(9, seed=1)
    whole = torch.autograd.grad(softmax(x, 0.7, mask).square().sum(), (x, mask))
    tensors = [t.detach().requires_grad_(need) for t, need in zip((x, mask), needed, strict=True)]
    y = softmax(tensors[0], 0.7, tensors[1])
    for tensor, need, expected in zip(tensors, needed, whole, strict=True):
        if need:
            assert torch.equal(torch.autograd.grad(y.square().sum(), tensor, retain_graph=True)[0], expected)
    empty = operators.softmax_backward(y.detach(), y.detach(), mask.detach(), 0.7, *needed)
    assert [t.numel() > 0 for t in empty] == list(needed)


def test_any_strides_and_no_rows():
    x = make(6, 2, 9).transpose(0, 2)
    mask = make(6, 2)[:, ::2].squeeze(1)
    assert torch.equal(softmax(x, 0.7, mask), softmax(x.contiguous(), 0.7, mask.clone()))
    nothing, bias = torch.empty(0, 6, requires_grad=True), make(6)
    dx, dbias = torch.autograd.grad(softmax(nothing, 1.0, bias).sum(), (nothing, bias))
    assert dx.shape == (0, 6)
    assert torch.equal(dbias, torch.zeros(6))


def test_more_dimensions_than_anybody_has():
    shape = (2, 3) * 6 + (4,)
    mask = make(*(size if i % 2 else 1 for i, size in enumerate(shape[:-1])), 4, seed=1)
    x = make(*shape)
    torch.testing.assert_close(softmax(x, 1.0, mask).double(), plain(x, 1.0, mask), rtol=2e-6, atol=2e-6)
    got, want = (torch.autograd.grad(f(x, 1.0, mask).double().square().sum(), mask)[0] for f in (softmax, plain))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_bits_do_not_depend_on_threads():
    x, mask = make(8, 70, 500, dtype=torch.bfloat16), make(70, 500, seed=1)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            y = softmax(x, 0.7, mask)
            found.append((y, *torch.autograd.grad(y.square().sum(), (x, mask))))
    finally:
        torch.set_num_threads(before)
    for others in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], others, strict=True))


def test_flops_are_counted():
    with FlopCounterMode(display=False) as counter:
        softmax(make(4, 6))
    assert counter.get_total_flops() == 4 * 6 * 6


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: softmax(torch.ones(())), "x: shape is \\(\\); it needs at least one dimension"),
        (lambda: softmax(torch.ones(3, 0)), "x: shape is \\(3, 0\\); the last dimension must not be empty"),
        (lambda: softmax(torch.ones(3, 4, dtype=torch.bool)), "x: dtype is torch.bool"),
        (lambda: softmax(torch.ones(3, 4), 1.0, torch.ones(5)), "mask: shape is \\(5,\\); it must broadcast"),
        (
            lambda: softmax(torch.ones(3, 4), 1.0, torch.ones(1, 3, 4)),
            "mask: shape is \\(1, 3, 4\\); it must broadcast",
        ),
        (
            lambda: softmax(torch.ones(3, 4), 1.0, torch.ones(4, dtype=torch.int32)),
            "mask: dtype is torch.int32; allowed are",
        ),
        (
            lambda: operators.softmax_backward(torch.ones(3, 5), torch.ones(3, 4), None, 1.0, True, False),
            "dy: shape is \\(3, 5\\); it must be that of y",
        ),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(RuntimeError, match=message):
        call()
