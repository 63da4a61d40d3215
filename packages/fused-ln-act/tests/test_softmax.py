"""Softmax of scaled and masked scores: results, masks where they lie, gradients, kernels and operators."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kernel_pytorch.fused_ln_act import softmax
from kernel_pytorch.harness.checks import (
    check_compiled_equals_eager,
    check_deterministic,
    check_export,
    check_gradient_combinations,
    check_rows_independent,
    check_second_derivatives,
)
from kernel_pytorch.harness.launches import count_launches

LEVELS = ["reference", "native", "torchscript", "triton"]  # "compile" is held by the declaration's tests
operators = torch.ops.kernel_pytorch
pytestmark = [pytest.mark.filterwarnings("ignore:.torch.jit.*deprecated"), pytest.mark.slow]
INFINITY = float("inf")


def make(*shape, device, dtype=torch.float32):
    torch.manual_seed(0)
    return torch.randn(shape, device=device, dtype=dtype, requires_grad=True)


# What it computes.


@pytest.mark.parametrize("level", LEVELS)
def test_it_is_the_softmax_of_pytorch(level, device):
    x, mask = make(3, 4, 5, device=device), make(4, 5, device=device)
    torch.testing.assert_close(softmax(x, level=level), torch.softmax(x, -1))
    torch.testing.assert_close(softmax(x, -0.5, mask, level=level), torch.softmax(-0.5 * x + mask, -1))
    kept = torch.ones(5, 5, dtype=torch.bool, device=device).tril()[1:]
    theirs = torch.softmax(x.masked_fill(~kept, -INFINITY), -1)
    torch.testing.assert_close(softmax(x, mask=kept, level=level), theirs)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ["bool", "added"])
@pytest.mark.parametrize("columns", [40, 16400])
def test_a_row_that_is_masked_out_gives_zeros(columns, kind, level, device):
    x = make(3, columns, device=device)
    mask = torch.ones(3, columns, dtype=torch.bool, device=device)
    mask[1] = False
    if kind == "added":
        mask = torch.zeros(3, columns, device=device).masked_fill(~mask, -INFINITY)
    y = softmax(x, 2.0, mask, level=level)
    assert not y[1].any()
    torch.testing.assert_close(y[::2], torch.softmax(2.0 * x[::2], -1))
    (dx,) = torch.autograd.grad(y, x, torch.randn_like(y))
    assert not dx[1].any()
    assert dx.isfinite().all()


@pytest.mark.parametrize("columns", [40, 16400])
def test_what_all_incoming_gradients_share_changes_nothing(columns, device):
    """Of y rounded to 16 bits the sum is not quite one: without the correction 1024 would show as some 0.1 * y."""
    x = make(5, columns, device=device, dtype=torch.float16)
    y = softmax(x, 3.0, level="triton")
    dy = torch.randint(-9, 10, (5, columns), device=device).half()  # 1024 + dy is exact in float16
    expected, found = (torch.autograd.grad(y, x, dy + shared, retain_graph=True)[0] for shared in (0.0, 1024.0))
    torch.testing.assert_close(found, expected, rtol=0.0, atol=2e-3 * float(expected.abs().max()))


@pytest.mark.parametrize("level", LEVELS)
def test_large_scores_do_not_overflow(level, device):
    x = 1e4 * make(4, 40, device=device).detach()
    torch.testing.assert_close(softmax(x, 30.0, level=level), torch.softmax(x.double() * 30.0, -1).float())


@pytest.mark.parametrize("level", LEVELS)
def test_dtypes(level, device):
    x, mask = make(4, 8, device=device).detach(), make(8, device=device).detach()
    assert softmax(x.half(), level=level).dtype == torch.float16
    assert softmax(x.half(), mask=mask > 0, level=level).dtype == torch.float16
    assert softmax(x.half(), mask=mask, level=level).dtype == torch.float32
    assert softmax(x.double(), mask=mask.half(), level=level).dtype == torch.float64


SHAPES = [
    (),
    (7,),
    (1,),
    (4, 1),
    (4, 7),
    (3, 1, 7),
    (1, 3, 4, 7),
    (2, 1, 1, 7),
    (2, 1, 4, 7),
    (2, 3, 1, 1),
    (2, 3, 4, 7),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_masks_are_broadcast(shape, device):
    """Forward and both gradients, added; forward and dx, boolean."""
    x, mask = make(2, 3, 4, 7, device=device), make(*shape, device=device)
    results = []
    for level in ("triton", "reference"):
        y, masked = softmax(x, 0.7, mask, level=level), softmax(x, 0.7, mask > -0.5, level=level)
        incoming = torch.linspace(-1, 1, y.numel(), device=device).view_as(y)
        gradients = torch.autograd.grad([y, masked], (x, mask), [incoming, incoming])
        results.append([y, masked, *gradients])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_masks_are_read_where_they_lie(device):
    triton_forward = pytest.importorskip("kernel_pytorch.fused_ln_act.softmax.kernels.forward")
    shape = torch.Size((2, 3, 4, 7))
    for mask in (
        torch.zeros(2, 1, 1, 7, device=device),
        torch.zeros(3, 4, 14, device=device)[..., ::2],
        torch.zeros(4, 1, device=device, dtype=torch.bool),
        torch.zeros(2, 4, 7, device=device).unsqueeze(1),
        torch.zeros(2, 7, 4, 3, device=device).transpose(1, 3),
    ):
        view = triton_forward.mask_view(mask, shape)
        assert view.data.data_ptr() == mask.data_ptr()
        rows = torch.arange(2 * 3 * 4, device=device)
        size_1, size_2 = view.sizes
        stride_0, stride_1, stride_2, column_stride = view.strides
        offsets = rows // (size_1 * size_2) * stride_0 + rows // size_2 % size_1 * stride_1 + rows % size_2 * stride_2
        offsets = offsets[:, None] + torch.arange(7, device=device) * column_stride
        count = mask.untyped_storage().nbytes() // mask.element_size()
        places = torch.arange(count, device=device).as_strided(mask.shape, mask.stride()).expand(shape)
        assert torch.equal(offsets.view(shape), places)


def test_only_a_mask_with_too_many_strides_is_copied(device):
    triton_forward = pytest.importorskip("kernel_pytorch.fused_ln_act.softmax.kernels.forward")
    mask = torch.zeros(2, 1, 2, 1, 2, 7, device=device)
    view = triton_forward.mask_view(mask, torch.Size((2, 3, 2, 3, 2, 7)))
    assert view.data.data_ptr() != mask.data_ptr()
    assert view.data.shape == (2, 3, 2, 3, 2, 7)


def bad_mask(*arguments, **keywords):
    return lambda x: softmax(x, mask=torch.ones(*arguments, **keywords))


BAD = {
    "no tensor": (lambda x: softmax(None), TypeError, "x: given NoneType"),
    "integer x": (lambda x: softmax(x.long()), TypeError, "x: dtype is torch.int64"),
    "scale": (lambda x: softmax(x, INFINITY), ValueError, "scale: given inf; it must be finite"),
    "scale tensor": (lambda x: softmax(x, x[0, 0]), TypeError, "scale: given Tensor"),
    "mask, list": (lambda x: softmax(x, mask=[True]), TypeError, "mask: given list"),
    "mask, dtype": (bad_mask(8, dtype=torch.int32), TypeError, "mask: dtype is torch.int32; allowed are torch.bool"),
    "mask, shape": (bad_mask(7), ValueError, r"mask: shape is \(7,\); it must broadcast to that of x, \(4, 8\)"),
    "mask, dimensions": (bad_mask(1, 4, 8), ValueError, r"mask: shape is \(1, 4, 8\); it must broadcast"),
    "mask, device": (bad_mask(8, device="meta"), ValueError, "mask: device is meta; it must be that of x"),
    "mask, layout": (lambda x: softmax(x, mask=x.to_sparse()), TypeError, "mask: layout is torch.sparse_coo"),
    "level": (lambda x: softmax(x, level="cutlass"), ValueError, "level: given 'cutlass'"),
    "operator, mask": (lambda x: operators.softmax(x, x[:, :3], 1.0), ValueError, r"mask: shape is \(4, 3\)"),
    "operator, dy": (
        lambda x: operators.softmax_backward(x[:2], x, None, 1.0, True, False), ValueError, r"dy: shape is \(2, 8\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input_names_the_argument(name):
    call, error, message = BAD[name]
    with pytest.raises(error, match=message):
        call(torch.ones(4, 8))


# Gradients.


@pytest.mark.parametrize("level", LEVELS)
def test_every_combination_of_inputs_twice(level, device):
    x, mask = make(2, 3, 4, device=device, dtype=torch.float64), make(3, 4, device=device, dtype=torch.float64)
    check_gradient_combinations(lambda x, m: softmax(x, 0.7, m, level=level), [x, mask])
    check_second_derivatives(lambda x, m: softmax(x, 0.7, m, level=level), [x, mask], fast=True)
    check_second_derivatives(lambda x: softmax(x, 0.7, mask > -0.5, level=level), [x], fast=True)
    check_second_derivatives(lambda x: softmax(x, level=level), [x], fast=True)


def test_formula_equals_kernels(device):
    x, mask = make(3, 6, device=device, dtype=torch.float64), make(6, device=device, dtype=torch.float64)
    y = softmax(x, 0.7, mask, level="triton")
    incoming = torch.randn_like(y)
    kernels = torch.autograd.grad(y, (x, mask), incoming, retain_graph=True)
    formula = torch.autograd.grad(y, (x, mask), incoming, create_graph=True)
    for ours, theirs in zip(kernels, formula, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_only_the_result_is_saved(device):
    x, mask = make(4, 8, device=device), torch.ones(8, device=device, dtype=torch.bool)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        y = softmax(x, 0.7, mask, level="triton")
    assert set(saved) == {y.data_ptr()}


# Kernels.


@pytest.mark.parametrize(("columns", "name"), [(40, "_kernel"), (16400, "_long_kernel")])
def test_launches(columns, name, device):
    x, mask = make(3, columns, device=device), make(columns, device=device)
    with count_launches() as forward:
        y = softmax(x, 0.7, mask, level="triton")
    with count_launches() as with_mask:
        torch.autograd.grad(y, (x, mask), torch.ones_like(y))
    y = softmax(x, 0.7, mask.detach(), level="triton")
    with count_launches() as without:
        torch.autograd.grad(y, x, torch.ones_like(y))
    assert forward == [f"_softmax_forward{name}"]
    assert without == [f"_softmax_backward{name}"]
    assert with_mask == [*without, "_mask_gradient_kernel"]


@pytest.mark.parametrize("columns", [1, 300, 16400])
def test_reproducible_and_rows_independent(columns, device):
    x, mask = make(5, columns, device=device), torch.ones(columns, device=device, dtype=torch.bool)
    mask[columns // 3 + 1 :] = False
    check_deterministic(lambda x: softmax(x, 0.7, mask, level="triton"), [x])
    check_rows_independent(lambda x: softmax(x, 0.7, mask, level="triton"), [x])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: 8 GiB of bfloat16")
def test_tensor_past_2_to_the_31(device):
    x = torch.randn(2**19 + 3, 4096, device=device, dtype=torch.bfloat16)
    torch.testing.assert_close(softmax(x, level="triton")[-5:], softmax(x[-5:], level="reference"))


# Operators.


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # opcheck's own, torch 2.15
def test_opcheck(device):
    x, mask = make(3, 4, 8, device=device), make(4, 8, device=device)
    x = x.detach().transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    dy, y = torch.randn_like(x, requires_grad=True), torch.softmax(x.detach(), -1).requires_grad_()
    cases = [
        (operators.softmax, (x, mask, 0.7)),
        (operators.softmax, (x, mask.detach() > 0, 0.7)),
        (operators.softmax, (x.detach().half(), mask.detach(), 1.0)),
        (operators.softmax_backward, (dy, y, mask.detach(), 0.7, True, True)),
        (operators.softmax_backward, (dy.detach(), y.detach(), mask.detach(), 0.7, False, True)),
        (operators.softmax_backward, (dy.detach(), y.detach(), None, 0.7, True, False)),
    ]
    for operator, given in cases:
        torch.library.opcheck(operator.default, given)


def test_compiled_is_bitwise_eager(device):
    given = [make(2, 6, 40, device=device), make(40, device=device)]
    check_compiled_equals_eager(lambda x, mask: softmax(x, 0.7, mask, level="triton"), given, dynamic=True)


def test_export(device):
    x = make(6, 40, device=device).detach()
    program = check_export(lambda x: softmax(x, 0.7, level="triton"), [x])
    assert sum("kernel_pytorch" in str(node.target) for node in program.graph.nodes) == 1


def test_flop_counter_sees_the_operators(device):
    with FlopCounterMode(display=False) as counter:
        softmax(make(4, 8, device=device), level="triton").sum().backward()
    counts = counter.get_flop_counts()["Global"]
    assert counts[operators.softmax] == 6 * 32
    assert counts[operators.softmax_backward] == 5 * 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_default_under_transforms_and_with_a_mask_of_bools(dtype, device):
    """Whatever the default is: kernels have no rules for vmap, and a mask of bools is no dtype that they refuse."""
    x, mask = torch.randn(3, 4, 8, device=device, dtype=dtype), torch.rand(8, device=device) < 0.9
    expected = softmax(x, mask=mask, level="native")
    torch.testing.assert_close(softmax(x, mask=mask), expected)
    torch.testing.assert_close(torch.func.vmap(lambda rows: softmax(rows, mask=mask))(x), expected)
