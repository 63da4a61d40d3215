"""The gradients that a loss computed with itself: scaled where they are, and only where nobody comes back for them."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernel_pytorch.linear_cross_entropy import linear_cross_entropy, operators

LEVELS = ["native", "triton"]


def problem(device, dtype=torch.float32):
    """Hidden states, weight and bias, whose gradients are wanted, and targets."""
    torch.manual_seed(0)
    tensors = (torch.randn(shape, device=device) / 4 for shape in ((37, 24), (70, 24), (70,)))
    return *(t.to(dtype).requires_grad_() for t in tensors), torch.randint(70, (37,), device=device)


def loss_of(level, hidden, weight, bias, target):
    return linear_cross_entropy(hidden, weight, target, bias=bias, level=level)


def check(found, factor, hidden, weight, bias, target):
    """Gradients of a loss times a factor, beside those in float64."""
    own = [t.detach().double().requires_grad_() for t in (hidden, weight, bias)]
    expected = torch.autograd.grad(loss_of("reference", *own, target) * factor, own)
    for ours, truth in zip(found, expected, strict=False):
        assert (ours.double() - truth).abs().max() <= 3e-6 * truth.abs().max()


@pytest.mark.parametrize("level", LEVELS)
def test_the_last_backward_writes_over_the_gradients(level, device, monkeypatch):
    """The gradient of the weight is as large as the weight: a second one would be the peak of a model's memory."""
    tensors = problem(device)
    made = []
    _note_results(monkeypatch, made)
    for factor in (2.0, -0.5):
        loss = loss_of(level, *tensors)
        made.clear()
        found = torch.autograd.grad(loss, tensors[:3], torch.full_like(loss, factor))
        assert [a.data_ptr() == b.data_ptr() for a, b in made] == [True] * 3
        check(found, factor, *tensors)
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            torch.autograd.grad(loss, tensors[:3])


def _note_results(monkeypatch, made):
    """Each gradient that comes to be scaled, and what it becomes."""
    original = operators.launcher

    def noted(name, level):
        launch = original(name, level)

        def run(gradient, *others):
            made.append((gradient, launch(gradient, *others)))
            return made[-1][1]

        return run if name == "scale_gradient" else launch

    monkeypatch.setattr(operators, "launcher", noted)


@pytest.mark.parametrize("level", LEVELS)
def test_hooks_of_saved_tensors_do_not_see_what_is_written_over(level, device):
    """One that keeps each tensor, and gives it back twice, would find a gradient that was scaled before."""
    tensors = problem(device)
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (seen.append(t), t)[1], lambda t: t):
        loss = loss_of(level, *tensors)
    kept = [t.clone() for t in seen]
    check(torch.autograd.grad(loss, tensors[:3], torch.full_like(loss, 3.0)), 3.0, *tensors)
    assert all(torch.equal(a, b) for a, b in zip(seen, kept, strict=True))


@pytest.mark.parametrize("level", LEVELS)
def test_a_backward_that_failed_says_so_the_second_time(level, device):
    """After a hook that raised, the graph is still there; what was written over is not scaled again."""
    loss = loss_of(level, *problem(device))
    loss.grad_fn.register_hook(_fail)
    for message in ("no more", "backward through the graph a second time"):
        with pytest.raises(RuntimeError, match=message):
            loss.backward(torch.full_like(loss, 2.0))


def _fail(*gradients):
    raise RuntimeError("no more")


@pytest.mark.parametrize("level", LEVELS)
def test_many_gradients_at_once(level, device):
    """A batch of incoming gradients shares what was computed."""
    tensors = problem(device)
    loss = loss_of(level, *tensors)
    factors = torch.tensor([1.0, -2.0, 0.5], device=device)
    found = torch.autograd.grad(loss, tensors[:2], factors, is_grads_batched=True)
    for index, factor in enumerate(factors.tolist()):
        check([gradient[index] for gradient in found], factor, *tensors)


@pytest.mark.parametrize("level", LEVELS)
def test_what_a_cuda_graph_records_is_not_written_over(level, device, monkeypatch):
    """A recorded backward is replayed."""
    for name in ("is_initialized", "is_current_stream_capturing"):
        monkeypatch.setattr(torch.cuda, name, lambda: True)
    tensors = problem(device)
    made = []
    _note_results(monkeypatch, made)
    loss = loss_of(level, *tensors)
    for factor in (2.0, 3.0):
        found = torch.autograd.grad(loss, tensors[:3], torch.full_like(loss, factor), retain_graph=factor == 2.0)
        check(found, factor, *tensors)
    assert not made


@pytest.mark.parametrize("factor", [1.0, 1.0 + 2**-23, -1.0, 0.0, float("nan"), float("inf")])
@pytest.mark.parametrize("in_place", [True, False])
def test_only_a_factor_of_exactly_one_may_be_left_out(in_place, factor, device):
    """5000 elements: one program takes 4096."""
    gradient, factor = torch.randn(5000, device=device), torch.tensor(factor, device=device)
    expected = gradient * factor
    found = operators.launcher("scale_gradient", "triton")(gradient, factor, gradient, in_place)
    assert (found is gradient) == in_place
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


class Interrupts(TorchDispatchMode):
    """Frees the graph by another backward, in the middle of the first one."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.done = inner, False

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        if "scale_gradient" in str(function) and not self.done:
            self.done = True
            self.inner()
        return function(*arguments, **(keywords or {}))


def test_a_backward_within_another_of_the_same_graph(device):
    """As two threads do it: what one still reads, the other does not write over."""
    tensors = problem(device)
    loss = loss_of("native", *tensors)
    inner = []
    with Interrupts(lambda: inner.extend(torch.autograd.grad(loss, tensors[:3], torch.full_like(loss, 10.0)))) as mode:
        outer = torch.autograd.grad(loss, tensors[:3], retain_graph=True)
    assert mode.done
    check(outer, 1.0, *tensors)
    check(inner, 10.0, *tensors)


@pytest.mark.parametrize("level", LEVELS)
def test_numbers_that_are_still_to_be_negated(level, device):
    """As those of `z.conj().imag` are: kernels read memory."""
    hidden, weight, bias, target = problem(device)
    negated = torch._neg_view(-hidden.detach()).requires_grad_()
    loss = loss_of(level, negated, weight, bias, target)
    found = torch.autograd.grad(loss, (negated, weight, bias), torch._neg_view(torch.full_like(loss, -3.0)))
    check(found, 3.0, hidden, weight, bias, target)
