"""Launchers that plan once for a geometry: what a plan must not keep, and when there is another."""

import gc
import sys
import weakref

import pytest
import torch

from kernel_pytorch.linear_cross_entropy import cross_entropy, linear_cross_entropy

launcher = pytest.importorskip("kernel_pytorch.linear_cross_entropy._core.launch")

LEVELS = ["native", "triton"]


def problem(device):
    torch.manual_seed(0)
    hidden, weight = torch.randn(6, 16, device=device), torch.randn(70, 16, device=device) / 4
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(70, (6,), device=device)


def results(hidden, weight, target, level, **options):
    """Losses of a layer and of its logits, and their gradients."""
    logits = (hidden @ weight.t()).detach().requires_grad_()
    options |= {"reduction": "none", "level": level}
    loss, own = linear_cross_entropy(hidden, weight, target, **options), cross_entropy(logits, target, **options)
    gradients = torch.autograd.grad(loss.sin().sum(), (hidden, weight))
    return [loss, own, *gradients, *torch.autograd.grad(own.sin().sum(), logits)]


@pytest.mark.parametrize("level", LEVELS)
def test_plans_keep_no_tensors(level, device):
    tensors = problem(device)
    held = results(*tensors, level)
    watched = [weakref.ref(tensor) for tensor in (*tensors, *held)]
    del tensors, held
    gc.collect()
    assert not any(reference() is not None for reference in watched)


@pytest.mark.parametrize("level", LEVELS)
def test_another_geometry_has_a_plan_of_its_own(level, device):
    hidden, weight, target = problem(device)
    rows = hidden.detach()
    shifted = torch.cat([rows[:, :1], rows], 1)[:, 1:]
    for x in (
        rows,
        rows.t().contiguous().t(),
        shifted,
        rows[:1].expand(6, 16),
        rows[:3],
        rows.view(2, 3, 16),
        rows[:0],
    ):
        own = target[: x.shape[0]].view(x.shape[:-1]) if x.dim() == 2 else target.view(2, 3)
        for given in (own, own.int(), own[:1].expand(own.shape)):
            layer = x.detach().requires_grad_(), weight, given
            for ours, theirs in zip(results(*layer, level), results(*layer, "reference"), strict=True):
                torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "options", [{"ignore_index": 5}, {"ignore_index": 1}, {"softcap": 2.0}, {"z_loss": 0.1}, {"label_smoothing": 0.1}]
)
def test_scalars_belong_to_a_plan(level, options, device):
    hidden, weight, target = problem(device)
    target[0], target[1] = 1, 5
    for given in ({}, options, {}):
        found, expected = (results(hidden, weight, target, name, **given) for name in (level, "reference"))
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("level", LEVELS)
def test_freed_memory_is_refused_although_there_is_a_plan(level, device):
    tensors = [tensor.detach() for tensor in problem(device)]
    linear_cross_entropy(*tensors, level=level, reduction="none")
    for position in range(2):
        given = [tensor.clone() for tensor in tensors]
        given[position].untyped_storage().resize_(0)
        with pytest.raises(ValueError, match="holds nothing"):
            linear_cross_entropy(*given, level=level, reduction="none")


def test_the_switch_of_float32_belongs_to_a_plan(device, monkeypatch):
    """What tensor cores round float32 to is decided by PyTorch's switch, which may be moved between two calls."""
    matmul = pytest.importorskip("kernel_pytorch.linear_cross_entropy.kernels.matmul")
    asked, plain = [], matmul.precision_of
    monkeypatch.setattr(matmul, "precision_of", lambda dtype: asked.append(plain(dtype)) or plain(dtype))
    hidden, weight, target = (tensor.detach() for tensor in problem(device))
    switch = torch.backends.cuda.matmul
    before = switch.fp32_precision
    try:
        for switch.fp32_precision in ("ieee", "tf32", "ieee", "tf32"):
            linear_cross_entropy(hidden, weight, target, level="triton", z_loss=0.375)
    finally:
        switch.fp32_precision = before
    assert asked == [("ieee", True), ("tf32", False)]


def test_few_functions_stand_between_a_call_and_its_launch(device, monkeypatch):
    """Level, operator, plan and what it returned, the reduction's caller, and the join of shares."""
    hidden, weight, target = (tensor.detach() for tensor in problem(device))
    found = []

    def count(launch, *arguments):
        frame, between = sys._getframe(1), 0
        while frame.f_code.co_filename != __file__:
            frame, between = frame.f_back, between + 1
        found.append(between - 1)  # the public function

    for function, tensors in (
        (linear_cross_entropy, (hidden, weight, target)),
        (cross_entropy, (weight[:6], target % 16)),
    ):
        with monkeypatch.context() as patched:
            for _ in range(3):  # a kind of calls is compared by guards from its third call on
                function(*tensors, level="triton")
            patched.setattr(launcher.Launch, "__call__", count)
            function(*tensors, level="triton")
    assert len(found) == 4
    assert max(found) <= 7
