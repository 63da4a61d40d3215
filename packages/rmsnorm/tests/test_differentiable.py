"""`differentiable` gives what `Function.apply` gives, and does less beside it."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.autograd import forward_ad

from kernel_pytorch.rmsnorm.differentiable import differentiable, is_transformed


class Affine(torch.autograd.Function):
    """`factor * x + offset`; it keeps what it was given."""

    inputs: tuple = ()

    @staticmethod
    def forward(x, factor, offset=1.0):
        return factor * x + offset

    @staticmethod
    def setup_context(ctx, inputs, output):
        Affine.inputs = inputs
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx, dy):
        return ctx.factor * dy, None, None


run = differentiable(Affine)


@pytest.fixture(autouse=True)
def forgetful():
    Affine.inputs = ()


@pytest.mark.parametrize("arguments", [(3.0,), (3.0, 2.0)], ids=["offset left out", "all given"])
def test_values_and_gradients_are_those_of_apply(arguments):
    x = torch.arange(4.0, requires_grad=True)
    found, wanted = run(x, *arguments), Affine.apply(x, *arguments)
    assert torch.equal(found, wanted)
    assert torch.equal(*(torch.autograd.grad(y.sum(), x)[0] for y in (found, wanted)))


def test_what_is_left_out_reaches_the_context():
    x = torch.arange(4.0, requires_grad=True)
    run(x, 3.0)
    assert Affine.inputs[1:] == (3.0, 1.0)


def test_without_a_gradient_to_take_there_is_no_context():
    x = torch.arange(4.0)
    assert run(x, 3.0).grad_fn is None
    with torch.no_grad():
        assert run(x.requires_grad_(), 3.0).grad_fn is None
    assert Affine.inputs == ()
    assert run(x, 3.0).grad_fn is not None


def test_the_signature_is_read_once(monkeypatch):
    x = torch.arange(4.0, requires_grad=True)

    def refuse(*arguments, **keywords):
        raise AssertionError("a signature was read")

    monkeypatch.setattr(inspect, "signature", refuse)
    with pytest.raises(AssertionError, match="a signature was read"):
        Affine.apply(x, 3.0)
    run(x, 3.0).sum().backward()
    assert torch.equal(x.grad, torch.full((4,), 3.0))


def test_transforms_are_refused_as_apply_refuses_them():
    assert not is_transformed()
    seen = []

    def transformed(x):
        seen.append(is_transformed())
        return run(x, 3.0)

    x = torch.arange(4.0)
    with pytest.raises(RuntimeError, match="vmap"):
        torch.func.vmap(transformed)(x)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="jvp"):
        transformed(forward_ad.make_dual(x, torch.ones(4)))
    assert seen == [True, True]
    assert torch.equal(torch.func.grad(lambda x: run(x, 3.0).sum())(x), torch.full((4,), 3.0))


def test_what_outlives_a_transform_is_an_ordinary_tensor():
    outlived = []

    def keep(x):
        outlived.append(x.exp())
        return outlived[0].sum()

    x = torch.arange(4.0)
    torch.func.grad(keep)(x)
    offset = torch.zeros(4, requires_grad=True)
    for apply in (Affine.apply, run):
        y = apply(outlived[0], 3.0)
        assert not y.requires_grad
        assert torch.equal(y, 3.0 * x.exp() + 1.0)
        (y + offset).sum().backward()


@pytest.mark.filterwarnings("ignore:.torch.jit.*deprecated")
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_trace_holds_one_node(requires_grad):
    x = torch.arange(4.0, requires_grad=requires_grad)
    traced = torch.jit.trace(lambda x: run(x, 3.0), (x,), check_trace=False)
    assert [node.kind() for node in traced.graph.nodes() if node.outputsSize()].count("prim::PythonOp") == 1
    assert not traced.graph.findNode("aten::mul")


def test_what_is_missing_is_named():
    with pytest.raises(TypeError, match="missing a required argument: 'factor'"):
        run(torch.arange(4.0))
