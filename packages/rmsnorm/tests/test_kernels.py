"""What the Triton kernels promise besides being right: launches, reproducibility, independence of rows."""

import pytest
import torch

from kernel_pytorch.harness.checks import check_deterministic, check_rows_independent
from kernel_pytorch.harness.launches import count_launches
from kernel_pytorch.rmsnorm import add_rms_norm, head_rms_norm, rms_norm
from kernel_pytorch.rmsnorm._core.plans import forget_plans
from kernel_pytorch.rmsnorm._core.sizes import exceeds_int32
from kernel_pytorch.rmsnorm.levels import LADDER

pytest.importorskip("triton")
kernels = pytest.importorskip("kernel_pytorch.rmsnorm.kernels.forward")


def calls(device, columns):
    x = torch.randn(21, columns, device=device, requires_grad=True)
    weight = torch.randn(columns, device=device, requires_grad=True)
    residual = torch.randn_like(x).requires_grad_()
    return {
        "rms_norm": (lambda x, w: rms_norm(x, w, level="triton"), [x, weight]),
        "add_rms_norm": (lambda x, r, w: add_rms_norm(x, r, w, level="triton"), [x, residual, weight]),
    }


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm"])
@pytest.mark.parametrize(
    ("columns", "backward"),
    [
        (40, ["_backward_kernel", "_add_shares_kernel"]),
        (8200, ["_backward_long_kernel", "_weight_shares_kernel", "_add_shares_kernel"]),
    ],
    ids=["one block", "long rows"],
)
def test_launches(name, columns, backward, device):
    function, arguments = calls(device, columns)[name]
    with count_launches() as forward:
        outputs = function(*arguments)
    assert len(forward) == 1, forward
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    with count_launches() as launched:
        torch.autograd.backward(outputs, [torch.ones_like(o) for o in outputs])
    assert launched == backward


def test_only_what_is_needed_is_launched(device):
    function, (x, weight) = calls(device, 40)["rms_norm"]
    y = function(x, weight.detach())
    with count_launches() as launched:
        y.sum().backward()
    assert launched == ["_backward_kernel"]


@pytest.mark.parametrize("columns", [40, 16400])
@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "head_rms_norm"])
def test_without_a_gradient_the_same_and_no_statistics(name, columns, device, monkeypatch):
    x, residual = (torch.randn(5, 2, columns, device=device) for _ in range(2))
    weight = torch.randn((2, columns) if name == "head_rms_norm" else columns, device=device)
    function, given = {
        "rms_norm": (rms_norm, (x, weight)),
        "add_rms_norm": (add_rms_norm, (x, residual, weight)),
        "head_rms_norm": (head_rms_norm, (x, weight)),
    }[name]
    LADDER.forget()
    forget_plans()
    monkeypatch.setattr(LADDER, "default", lambda *_: "triton")  # calls that name the level are not bound on a CPU
    allocated, real = [], kernels.allocator

    def counting(*given, **keywords):
        make = real(*given, **keywords)
        return lambda: allocated.append(1) or make()

    monkeypatch.setattr(kernels, "allocator", counting)
    expected = function(*(t.clone().requires_grad_() for t in given))
    for _ in range(2):
        allocated.clear()
        found = function(*given)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        assert len(allocated) == (2 if name.startswith("add_") else 1)
    LADDER.forget()
    forget_plans()


@pytest.mark.parametrize("columns", [1, 16, 300, 8200])
def test_bitwise_reproducible(columns, device):
    function, arguments = calls(device, columns)["rms_norm"]
    check_deterministic(function, arguments)


@pytest.mark.parametrize("columns", [1, 16, 300, pytest.param(16400, marks=pytest.mark.slow)])
def test_row_does_not_depend_on_the_number_of_rows(columns, device):
    for function, arguments in calls(device, columns).values():
        check_rows_independent(function, arguments)
    x, weight = torch.randn(9, 3, columns, device=device), torch.randn(3, columns, device=device)
    check_rows_independent(lambda x: head_rms_norm(x, weight, level="triton"), [x])


@pytest.mark.parametrize(
    ("shape", "stride", "expected"),
    [
        ((2, 1, 8), (2**31, 8, 1), True),
        ((2**20, 1, 4096), (4096, 4096, 1), True),
        ((2**18, 1, 4096), (4096, 4096, 1), False),
        ((1, 1, 8), (2**40, 8, 1), False),
    ],
    ids=["large stride", "large tensor", "half of the limit", "stride of a single row"],
)
def test_wide_offsets_where_they_are_needed(shape, stride, expected):
    assert exceeds_int32(torch.empty_strided(shape, stride, device="meta")) is expected


def test_gradients_of_expanded_views_have_offsets_of_their_own(monkeypatch, device):
    """x and dy are small views of huge shapes; dx is not, so its offsets decide."""
    from kernel_pytorch.rmsnorm.kernels import backward

    asked = []
    monkeypatch.setattr(backward, "exceeds_int32", lambda *tensors: asked.extend(tensors))
    x = torch.randn(1, 8, device=device).expand(5, 8)
    backward.rms_norm_backward(x, None, x, None, torch.ones(5, device=device), 1e-6, 0.0, True, False)
    assert any(t.shape == x.shape and t.is_contiguous() for t in asked)


def test_statistics_may_have_any_strides(device):
    """Whoever calls the operator directly: they were read beyond the end of what an expanded tensor holds."""
    backward = torch.ops.kernel_pytorch.rms_norm_backward
    x, rstd = torch.randn(5, 8, device=device), torch.full((1,), 0.5, device=device)
    found = backward(x, None, x, None, rstd.expand(5), 1e-6, 0.0, True, False)[0]
    assert torch.equal(found, backward(x, None, x, None, rstd.repeat(5), 1e-6, 0.0, True, False)[0])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device: 8 GiB of bfloat16")
def test_tensor_past_2_to_the_31(device):
    x = torch.randn(2**19 + 3, 4096, device=device, dtype=torch.bfloat16)
    y = rms_norm(x, level="triton")
    torch.testing.assert_close(y[-5:], rms_norm(x[-5:], level="reference"))
