"""Functions that are one call of an operator: what the ladder calls without a second comparison is the same call."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from kernel_pytorch.rmsnorm import rms_norm
from kernel_pytorch.rmsnorm._core.call import CachedCall
from kernel_pytorch.rmsnorm._core.operation import calls, first
from kernel_pytorch.rmsnorm._core.operator import OperatorCall, declare
from kernel_pytorch.rmsnorm._core.plans import Plan, Planned, forget_plans
from kernel_pytorch.rmsnorm.levels import LADDER

planned_for = []
switch = [1.0]
ran = []


def _plan(x, factor):
    planned_for.append((tuple(x.shape), factor))
    return lambda x, factor: (x.detach() * factor, x.new_empty(x.shape))  # as a kernel: autograd sees nothing


def _plan_of_switch(x, factor):
    value = switch[0]
    return lambda x, factor: (x * factor * value, x.new_empty(x.shape))


def _plan_with_less(x, factor):
    def run(x, factor):
        ran.append("run")
        return x.detach() * factor, x.new_empty(x.shape)

    def alone(x, factor):
        ran.append("alone")
        return x * factor

    return Plan(run, alone)


def _declare(name, launcher):
    return declare(
        f"test_level_function_{name}(Tensor x, float factor) -> (Tensor y, Tensor h)",
        launch=lambda: launcher,
        fake=lambda x, factor: (x.new_empty(x.shape), x.new_empty(x.shape)),
        gradient=lambda dy, factor: (dy * factor,),
    )


scaled = _declare("scaled", Planned(_plan))
switched = _declare("switched", Planned(_plan_of_switch, lambda *given: switch[0]))
lean = _declare("lean", Planned(_plan_with_less))


@calls(scaled, first)
def scale(x, weight, eps, offset, casting):
    return x, offset


@calls(switched, first)
def scale_by_switch(x, weight, eps, offset, casting):
    return x, offset


@calls(lean, first)
def scale_lean(x, weight, eps, offset, casting):
    return x, offset


@pytest.fixture(autouse=True)
def is_native():
    """Let `rms_norm` at level "native" multiply x by its offset."""
    with LADDER.replaced("rms_norm", "native", scale):
        for _ in range(3):
            call(numbers())
            call(numbers().requires_grad_())
        yield


def numbers(*shape):
    return torch.arange(1.0, 13.0).reshape(shape or (3, 4)).clone()


def call(x, factor=3.0):
    return rms_norm(x, eps=0.5, offset=factor, level="native")


def test_a_call_that_matches_is_compared_once(monkeypatch):
    compared, compare = [], CachedCall.__call__
    monkeypatch.setattr(CachedCall, "__call__", lambda self, *given: compared.append(self) or compare(self, *given))
    assert torch.equal(call(numbers()), numbers() * 3.0)
    assert len(compared) == 1
    assert not isinstance(compared[0], OperatorCall)


def test_another_geometry_is_planned_and_compared():
    planned_for.clear()
    for shape in ((2, 6), (3, 4), (2, 6)):
        assert torch.equal(call(numbers(*shape)), numbers(*shape) * 3.0)
    assert torch.equal(call(numbers(), -3.0), numbers() * -3.0)
    assert (3, 4) not in [shape for shape, factor in planned_for if factor == 3.0]


def test_a_gradient_is_computed_where_one_is_wanted():
    x = numbers().requires_grad_()
    y = call(x)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((3, 4), 3.0))
    with torch.no_grad():
        assert not call(x).requires_grad
    assert not call(numbers()).requires_grad
    with torch.inference_mode():
        assert call(x).is_inference()


def test_a_dispatch_mode_sees_the_operator():
    seen = []

    class Sees(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Sees():
        for _ in range(3):  # the mode is part of what is compared, or it is not
            seen.clear()
            call(numbers())
            assert "kernel_pytorch.test_level_function_scaled.default" in seen


def test_a_trace_sees_the_operator():
    graph = make_fx(lambda x: call(x))(numbers())
    assert "test_level_function_scaled" in graph.code


def test_a_plan_that_rests_on_a_switch_follows_it():
    with LADDER.replaced("rms_norm", "native", scale_by_switch):
        for value in (1.0, 2.0, 1.0):
            switch[0] = value
            for _ in range(2):
                assert torch.equal(call(numbers()), numbers() * 3.0 * value)


def test_where_no_gradient_is_wanted_only_what_users_see_is_made():
    wanting = numbers().requires_grad_()
    with LADDER.replaced("rms_norm", "native", scale_lean):
        for _ in range(2):
            for x, way in ((numbers(), "alone"), (wanting, "run"), (wanting.detach(), "alone")):
                ran.clear()
                assert torch.equal(call(x), numbers() * 3.0)
                assert ran == [way]
            with torch.no_grad():
                ran.clear()
                assert torch.equal(call(wanting), numbers() * 3.0)
                assert ran == ["alone"]
        call(wanting).sum().backward()
        assert torch.equal(wanting.grad, torch.full((3, 4), 3.0))
        with FlopCounterMode(display=False):  # a dispatch mode: the operator it is that runs
            ran.clear()
            call(numbers())
            assert ran == ["run"]


def test_plans_that_are_forgotten_are_made_anew():
    planned_for.clear()
    forget_plans()
    call(numbers())
    call(numbers())
    assert len(planned_for) == 1


def test_memory_that_was_freed_is_refused():
    x = numbers()
    x.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="x: "):
        call(x)


def test_a_transform_goes_to_the_autograd_function():
    with pytest.raises((NotImplementedError, RuntimeError), match=r"vmap|setup_context"):
        torch.func.vmap(call)(numbers())


def test_a_tensor_with_a_negative_bit_is_no_plain_one():
    x = torch.complex(numbers(), numbers()).conj().imag.contiguous()  # made real: the same numbers, negated
    lazily = torch.complex(numbers(), numbers()).conj().imag
    assert lazily.is_neg()
    assert torch.equal(call(lazily), call(x))


def test_a_graph_of_its_own_from_the_second_call_on():
    """Nothing that is like the first call is kept in the context any more; the gradients are the same."""
    factors, x = (3.0, -2.0, 0.5), numbers().requires_grad_()
    for factor in (*factors, *factors, *factors):
        y = call(x, factor)
        assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.full((3, 4), factor))
        assert torch.equal(y, numbers() * factor)
    names = [type(call(x, factor).grad_fn) for factor in factors]
    assert len(set(names)) == len(factors)
    assert not hasattr(call(x).grad_fn, "constants")


def test_graphs_of_an_operator_nest():
    x = numbers().requires_grad_()
    for _ in range(3):
        y = call(call(x, 3.0), 2.0)
        (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        assert torch.equal(dx, torch.full((3, 4), 6.0))
