"""What `declare` makes of a declaration: values, gradients in every combination, refusals, and little beside them."""

from __future__ import annotations

import inspect
import sys

import pytest
import torch
from torch.autograd import forward_ad

from kernel_pytorch.rmsnorm._core import operator as core
from kernel_pytorch.rmsnorm._core import registration

ADDED = {"forward": 0}


def launch():
    def scaled(x, other, factor, offset=1.0):
        ADDED["forward"] += 1
        ADDED["frames"] = frames()
        return (factor * x + offset) if other is None else factor * x * other, x + 0.0

    return scaled


def frames():
    """Of core, between the test and the launcher."""
    frame, found = sys._getframe(2), 0
    while frame.f_code.co_filename != __file__:
        found += "_core" in frame.f_code.co_filename
        frame = frame.f_back
    return found


def fake(x, other, factor, offset=1.0):
    return x.new_empty(x.shape), x.new_empty(x.shape)


def launch_backward():
    return formula


def formula(dy, x, other, factor, need_dx, need_dother):
    nothing = x.new_empty((0,))
    dx = factor * dy * (1.0 if other is None else other)
    return dx if need_dx else nothing, factor * dy * x if need_dother else nothing.clone()


def fake_backward(dy, x, other, factor, need_dx, need_dother):
    return x.new_empty(x.shape if need_dx else (0,)), x.new_empty(x.shape if need_dother else (0,))


def gradient(dy, dcopy, x, other, factor, needs):
    dx, dother = (None, None) if dy is None else scaled_backward(dy, x, other, factor, needs[0], needs[1])
    if dcopy is not None:
        dx = dcopy if dx is None else dx + dcopy
    return dx, dother


scaled = core.declare(
    "test_scaled(Tensor x, Tensor? other, float factor, float offset=1.0) -> (Tensor y, Tensor copy)",
    launch=launch,
    fake=fake,
    gradient=gradient,
    follows={"copy": ["x"]},
    flops=core.per_element(2),
)
scaled_backward = core.declare(
    "test_scaled_backward(Tensor dy, Tensor x, Tensor? other, float factor, bool need_dx, bool need_dother)"
    " -> (Tensor dx, Tensor dother)",
    launch=launch_backward,
    fake=fake_backward,
    formula=formula,
)
without_gradient = core.declare(
    "test_without(Tensor x) -> Tensor", launch=lambda: torch.clone, fake=lambda x: x.new_empty(x.shape)
)


def numbers(requires_grad=True, dtype=torch.float32):
    return torch.arange(1.0, 5.0, dtype=dtype, requires_grad=requires_grad)


@pytest.mark.parametrize("call", [scaled, scaled.operator], ids=["function", "operator"])
@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
def test_every_input_that_needs_a_gradient_gets_it(call, needs):
    x, other = (numbers(need) for need in needs)
    y, copy = call(x, other, 3.0)
    assert copy.requires_grad is needs[0]  # it is made of x alone
    wanted = [t for t in (x, other) if t.requires_grad]
    found = torch.autograd.grad((y * y).sum() + copy.sum(), wanted)
    right = torch.autograd.grad(((3.0 * x * other) ** 2).sum() + x.sum(), wanted)
    torch.testing.assert_close(found, right)


def test_an_output_that_nobody_uses_comes_as_none():
    x = numbers()
    assert torch.equal(torch.autograd.grad(scaled(x, None, 3.0)[1].sum(), x)[0], torch.ones(4))


@pytest.mark.parametrize("call", [scaled, scaled.operator], ids=["function", "operator"])
def test_second_derivatives_follow_the_formula(call):
    inputs = numbers(dtype=torch.float64), numbers(dtype=torch.float64)
    assert torch.autograd.gradgradcheck(lambda x, other: call(x, other, 3.0)[0].square(), inputs)


@pytest.mark.parametrize("call", [scaled, scaled.operator], ids=["function", "operator"])
@pytest.mark.parametrize("arguments", [(3.0,), (3.0, 2.0)], ids=["default", "given"])
def test_defaults_are_those_of_the_schema(call, arguments):
    x = numbers()
    offset = (*arguments, 1.0)[1]
    y = call(x, None, *arguments)[0]
    assert torch.equal(y, 3.0 * x + offset)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.full((4,), 3.0))


def test_without_a_gradient_to_take_there_is_no_graph():
    assert scaled(numbers(False), None, 3.0)[0].grad_fn is None
    with torch.no_grad():
        assert scaled(numbers(), None, 3.0)[0].grad_fn is None
    assert scaled(numbers(), None, 3.0)[0].grad_fn is not None


@pytest.mark.parametrize("requires_grad", [False, True])
def test_few_frames_stand_between_a_call_and_its_launcher(requires_grad):
    for _ in range(3):
        scaled(numbers(requires_grad), None, 3.0)
    assert ADDED["frames"] <= 2


def test_no_signature_is_read_in_a_call(monkeypatch):
    def refuse(*arguments, **keywords):
        raise AssertionError("a signature was read")

    monkeypatch.setattr(inspect, "signature", refuse)
    x = numbers()
    scaled(x, None, 3.0)[0].sum().backward()
    assert torch.equal(x.grad, torch.full((4,), 3.0))


def test_transforms_are_refused_or_right():
    x = numbers(False)
    with pytest.raises(RuntimeError, match="vmap"):
        torch.func.vmap(lambda x: scaled(x, None, 3.0)[0])(x)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="jvp"):
        scaled(forward_ad.make_dual(x, torch.ones(4)), None, 3.0)
    assert torch.equal(torch.func.grad(lambda x: scaled(x, None, 3.0)[0].sum())(x), torch.full((4,), 3.0))
    with pytest.raises(NotImplementedError, match=r"test_scaled: transforms of torch\.func"):
        torch.func.grad(lambda x: scaled.operator(x, None, 3.0)[0].sum())(x)


def test_nested_transforms_are_right():
    def cubes(x):
        return (scaled(x, x, 1.0)[0] * x).sum()

    x = numbers(False)
    found = torch.func.grad(lambda x: torch.func.grad(cubes)(x).sum())(x)
    torch.testing.assert_close(found, 6.0 * x)


def test_what_outlives_a_transform_is_an_ordinary_tensor():
    outlived = []

    def keep(x):
        outlived.append(x.exp())
        return outlived[0].sum()

    x = numbers(False)
    torch.func.grad(keep)(x)
    y = scaled(outlived[0], None, 3.0)[0]
    assert not y.requires_grad
    assert torch.equal(y, 3.0 * x.exp() + 1.0)


def test_batched_gradients_are_those_of_each():
    """A batched tensor is a plain one by its class, and has no memory of its own."""
    x, dy = numbers(), torch.randn(3, 4)
    y = scaled(x, None, 3.0)[0].square()
    (found,) = torch.autograd.grad(y, x, dy, is_grads_batched=True, retain_graph=True)
    wanted = [torch.autograd.grad(y, x, each, retain_graph=True)[0] for each in dy]
    torch.testing.assert_close(found, torch.stack(wanted))


def test_zeros_without_memory_are_computed_with():
    zeros = torch._efficientzerotensor(tuple(numbers(False).shape), dtype=numbers(False).dtype)
    assert torch.equal(scaled(zeros, None, 3.0)[0], torch.ones(zeros.shape, dtype=zeros.dtype))


@pytest.mark.filterwarnings("ignore:.torch.jit.*deprecated")
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_trace_holds_one_node(requires_grad):
    traced = torch.jit.trace(lambda x: scaled(x, None, 3.0)[0], (numbers(requires_grad),), check_trace=False)
    assert not traced.graph.findNode("aten::mul")
    assert traced.graph.findNode("kernel_pytorch::test_scaled") or traced.graph.findNode("prim::PythonOp")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_opcheck():
    torch.library.opcheck(scaled.operator, (numbers(), numbers(), 3.0))
    torch.library.opcheck(scaled_backward.operator, (numbers(), numbers(), None, 3.0, True, False))


def test_a_required_tensor_is_named():
    with pytest.raises(TypeError, match="test_scaled: x: given None; it must be a tensor"):
        scaled.operator(None, None, 3.0)


def test_what_has_no_gradient_says_so():
    assert torch.equal(without_gradient(numbers(False)), numbers(False))
    with pytest.raises(RuntimeError, match=r"kernel_pytorch::test_without has no gradient: call it under torch\.no_"):
        without_gradient(numbers())
    with torch.no_grad():
        without_gradient(numbers())


def test_the_same_operator_may_be_differentiated_in_another_way():
    twice = core.with_gradient(scaled, lambda dy, factor: (2.0 * factor * dy, None))
    x = numbers()
    assert torch.equal(torch.autograd.grad(twice(x, None, 3.0)[0].sum(), x)[0], torch.full((4,), 6.0))
    assert torch.equal(torch.autograd.grad(scaled(x, None, 3.0)[0].sum(), x)[0], torch.full((4,), 3.0))


def test_what_is_saved_may_depend_on_scalars():
    seen = []

    def by_save(dy, saved, dtypes):
        seen.append((saved, dtypes))
        return dy, None

    run = core.with_gradient(scaled, by_save, lambda x, y, factor: (x if factor > 0.0 else None, y))
    for factor in (3.0, -3.0):
        run(numbers(), None, factor)[0].sum().backward()
    assert [saved[0] is None for saved, _ in seen] == [False, True]
    assert seen[0][1] == [torch.float32, None]


def test_a_gradient_in_another_dtype_is_rounded():
    wide = core.with_gradient(scaled, lambda dy: (dy.double(), None))
    x = numbers()
    assert torch.autograd.grad(wide(x, None, 3.0)[0].sum(), x)[0].dtype == torch.float32


def test_a_gradient_that_asks_for_what_there_is_not_is_refused():
    with pytest.raises(TypeError, match=r"test_scaled asks for 'weight', which is in none of \['x', 'other'"):
        core.with_gradient(scaled, lambda dy, weight: (dy, None))


def test_a_library_of_another_version_is_refused_by_name():
    """As the C++ library defines it, and a package that needs another schema."""
    library = torch.library.Library("kernel_pytorch_cuda", "FRAGMENT")
    library.define("test_older(Tensor x) -> Tensor")
    with pytest.raises(ImportError, match=r"needs kernel_pytorch_cuda::test_older\(Tensor x, float eps\)") as caught:
        core.declare("test_older(Tensor x, float eps) -> Tensor", fake=fake)
    assert "installed is kernel_pytorch_cuda::test_older(Tensor x) -> Tensor" in str(caught.value)


def test_tensors_on_several_devices_are_refused():
    with pytest.raises(RuntimeError, match="tensors are on meta and cpu"):
        scaled.operator(numbers().to("meta"), numbers(), 3.0)


def test_a_rule_may_take_all_arguments_as_one_object():
    """By position, by name and by default; keywords of other functions, as PyTorch's FLOP counter has, are left out."""
    schema = torch._C.parse_schema("f(Tensor x, float scale=2.0, bool flag=False) -> Tensor")
    seen = registration.with_arguments(schema, lambda placements, a: (placements, a.x, a.scale, a.flag, *a[1:]))
    assert seen("p", 1, 3.0) == ("p", 1, 3.0, False, 3.0, False)
    assert seen("p", 1, flag=True, out_shape=()) == ("p", 1, 2.0, True, 2.0, True)
    rule = lambda x, scale: x  # noqa: E731
    assert registration.with_arguments(schema, rule) is rule
    assert registration.with_arguments(schema, torch.empty_like) is torch.empty_like
