"""What was found out about a call holds for calls of its kind, and for no others."""

from __future__ import annotations

import gc
import math
import sys
import threading
import weakref

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from kernel_pytorch.rmsnorm import add_rms_norm, functional, rms_norm
from kernel_pytorch.rmsnorm._core import call as module
from kernel_pytorch.rmsnorm._core.call import AGAIN, FAST, Bound, CachedCall
from kernel_pytorch.rmsnorm._core.operation import Operation
from kernel_pytorch.rmsnorm._core.operator import declare
from kernel_pytorch.rmsnorm._core.plans import Planned, forget_plans
from kernel_pytorch.rmsnorm.functional import ADD_RMS_NORM
from kernel_pytorch.rmsnorm.levels import LADDER


class Noted(CachedCall):
    """A function that returns the number of its arguments, and notes for which calls it asked and computed how."""

    def __init__(self):
        super().__init__()
        self.bound, self.without = [], []

    def bind(self, arguments, again):
        self.bound.append(again)
        return Bound(lambda *given: len(given))

    def uncached(self, *arguments):
        self.without.append(arguments)
        return len(arguments)

    def knows(self, *arguments):
        """Whether such a call is computed by what was found out earlier."""
        asked = len(self.bound), len(self.without)
        assert self(*arguments) == len(arguments)
        return (len(self.bound), len(self.without)) == asked


def numbers(*shape, **options):
    return torch.zeros(shape or (4, 8), **options)


def kept(*arguments):
    """A function that was called in this way often enough that guards compare such calls."""
    noted = Noted()
    for _ in range(3):
        noted(*arguments)
    return noted


def misaligned():
    return numbers(33)[1:].view(4, 8)


def freed():
    x = numbers()
    x.untyped_storage().resize_(0)
    return x


OTHERS = {
    "dtype": (numbers(dtype=torch.float64), None, 1.0, "a"),
    "shape": (numbers(8, 4), None, 1.0, "a"),
    "strides": (numbers(8, 4).t(), None, 1.0, "a"),
    "device": (numbers(device="meta"), None, 1.0, "a"),
    "requires_grad": (numbers(requires_grad=True), None, 1.0, "a"),
    "negative bit": (numbers()._neg_view(), None, 1.0, "a"),
    "misaligned": (misaligned(), None, 1.0, "a"),
    "freed": (freed(), None, 1.0, "a"),
    "a tensor for None": (numbers(), numbers(), 1.0, "a"),
    "a tensor for a number": (numbers(), None, torch.tensor(1.0), "a"),
    "an integer": (numbers(), None, 1, "a"),
    "a bool": (numbers(), None, True, "a"),
    "another number": (numbers(), None, 2.0, "a"),
    "another string": (numbers(), None, 1.0, "b"),
    "fewer": (numbers(), None, 1.0),
    "more": (numbers(), None, 1.0, "a", None),
}


def test_calls_that_are_alike_are_found():
    assert kept(numbers(), None, 1.0, "a").knows(torch.ones(4, 8), None, 1.0, "a")
    assert kept(numbers(), None, 1.0, "a").bound == [False, True]
    with torch.no_grad():
        assert kept(numbers(), None, 1.0, "a").knows(torch.ones(4, 8), None, 1.0, "a")


@pytest.mark.parametrize("name", OTHERS)
def test_other_calls_are_not(name):
    assert not kept(numbers(), None, 1.0, "a").knows(*OTHERS[name])


def test_a_gradient_is_wanted_or_not():
    x = numbers(requires_grad=True)
    noted = kept(x)
    with torch.no_grad():
        assert not noted.knows(x)
        noted(x)
        assert noted.knows(x)
    assert noted.knows(x)


def test_one_tensor_given_twice_is_a_call_like_others():
    x, y, w = numbers(), numbers(), numbers()
    noted = kept(x, x, w)
    entries = noted._entries
    assert noted.knows(y, y, w)
    assert noted._entries == entries  # guards compared it
    assert not noted.knows(x, y, w)
    for _ in range(3):
        noted(x, y, w)
    assert noted.knows(x, x, w)
    assert noted.knows(x, y, w)


def test_one_tensor_given_twice_takes_as_many_functions_as_two():
    """It took 142 instead of 19, and paused the cache for all."""
    x, residual, weight = torch.randn(4, 8), torch.randn(4, 8), torch.ones(8)
    for _ in range(2 * AGAIN):
        once, twice = (functions(add_rms_norm, x, other, weight, level="native") for other in (residual, x))
    assert twice == once
    y, h = add_rms_norm(x, x, weight, level="native")
    torch.testing.assert_close((y, h), add_rms_norm(x, x.clone(), weight, level="reference"))
    y, h = add_rms_norm(x, residual, weight, level="native")
    assert torch.equal(h, x + residual)


def functions(function, *arguments, **keywords):
    """The names of the functions of Python that a call runs."""
    found = []
    sys.setprofile(lambda frame, event, argument: found.append(frame.f_code.co_name) if event == "call" else None)
    try:
        function(*arguments, **keywords)
    finally:
        sys.setprofile(None)
    return found


WITHOUT_STRIDES = {
    "sparse": lambda: numbers().to_sparse(),
    "rows": lambda: numbers().to_sparse_csr(),
    "oneDNN": lambda: numbers().to_mkldnn(),
    "nested": lambda: torch.nested.nested_tensor([numbers(), numbers(2, 8)]),
    "jagged": lambda: torch.nested.nested_tensor([numbers(), numbers(2, 8)], layout=torch.jagged),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize("name", WITHOUT_STRIDES)
def test_tensors_without_strides_are_other_calls(name):
    given = WITHOUT_STRIDES[name](), None, 1.0, "a"
    assert not kept(numbers(), None, 1.0, "a").knows(*given)
    assert not kept(*given).knows(*given)


def test_guards_do_not_compare_what_they_do_not_see():
    noted = kept(misaligned())
    assert not noted._entries
    assert noted.knows(misaligned())


@pytest.mark.parametrize(("own", "other"), [(0.0, -0.0), (-0.0, 0.0), (0.0, math.nan), (math.nan, 0.0)])
def test_zeros_of_another_sign_and_nan_are_other_numbers(own, other):
    assert not kept(numbers(), own).knows(numbers(), other)
    assert kept(numbers(), own).knows(numbers(), own)


def test_transforms_and_modes_make_other_calls():
    noted, x, found = kept(numbers()), numbers(), []

    def look(x):
        found.append(noted.knows(x))
        return x.sum()

    torch.func.grad(look)(x)
    torch.func.vmap(look)(numbers(3, 4, 8))
    torch.func.vmap(lambda _: look(x))(numbers(3))
    with torch.inference_mode():
        look(x)
    with torch.autocast("cpu"):
        look(x)
    assert found == [False] * 5
    assert noted.knows(x)


def test_more_kinds_than_guards_compare_are_known():
    noted = Noted()
    for columns in range(1, 3 * FAST):
        noted(numbers(4, columns))
    for _ in range(3 * AGAIN):
        for columns in range(1, 3 * FAST):
            assert noted(numbers(4, columns)) == 1
    assert len(noted.bound) == 2 * (3 * FAST - 1)
    assert len(noted._entries) == FAST
    noted.clear()
    assert not noted.knows(numbers(4, 1))


def test_kinds_are_forgotten_before_they_fill_the_memory(monkeypatch):
    monkeypatch.setattr(module, "MOST", 3)
    noted = Noted()
    for columns in range(1, 9):
        noted(numbers(4, columns))
        assert len(noted._kinds) <= 3


def test_what_guards_compare_is_kept_by_the_dictionary_without_them(monkeypatch):
    monkeypatch.setattr(module, "TensorGuards", None)
    noted = kept(numbers())
    assert not noted._entries
    assert noted.knows(numbers())


def test_nothing_keeps_a_tensor():
    x, weight = torch.randn(4, 8, requires_grad=True), torch.ones(8)
    for level in ("native", "reference"):
        for _ in range(4):
            add_rms_norm(x, x, weight, level=level)[0].sum().backward()
    gone = weakref.ref(x), weakref.ref(weight)
    x = weight = None
    gc.collect()
    assert [reference() for reference in gone] == [None, None]
    assert ADD_RMS_NORM._kinds


def test_calls_in_several_threads():
    errors = []

    def call(columns):
        try:
            for _ in range(200):
                x = torch.full((2, columns), 2.0)
                y, h = add_rms_norm(x, x, None, eps=0.0, level="native")
                assert y.shape == h.shape == x.shape
                assert torch.equal(h, 2 * x)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=call, args=(columns,)) for columns in range(1, 3 * FAST)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


WRONG = {
    "x": ({"x": torch.zeros(4, 0)}, ValueError, "x: shape"),
    "weight": ({"weight": torch.ones(7)}, ValueError, "weight: shape"),
    "dtype": ({"x": torch.zeros(4, 8, dtype=torch.int64)}, TypeError, "x: dtype"),
    "eps": ({"eps": -1.0}, ValueError, "eps: given"),
    "infinite": ({"eps": math.inf}, ValueError, "eps: given"),
    "bool": ({"offset": True}, TypeError, "offset: given bool"),
    "tensor": ({"eps": torch.tensor(1e-6)}, TypeError, "eps: given Tensor"),
    "freed": ({"x": freed()}, ValueError, "x: shape is .* it was freed"),
    "casting": ({"casting": "x"}, ValueError, "casting: given"),
    "level": ({"level": "x"}, ValueError, "level: given"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("level", [None, "native"])
def test_a_wrong_call_is_refused_after_a_right_one(name, level):
    right = {"x": numbers(), "weight": torch.ones(8), "eps": 1e-6, "offset": 0.0, "casting": "llama", "level": level}
    changed, error, message = WRONG[name]
    for _ in range(3):
        rms_norm(right["x"], right["weight"], **{k: v for k, v in right.items() if k not in ("x", "weight")})
    wrong = right | changed
    with pytest.raises(error, match=message):
        rms_norm(wrong["x"], wrong["weight"], **{k: v for k, v in wrong.items() if k not in ("x", "weight")})


@pytest.fixture
def checked():
    """`rms_norm` with a check that notes shapes, and what it noted."""
    seen = []
    yield Operation(LADDER, "rms_norm", lambda x, *others: seen.append(tuple(x.shape))), seen
    LADDER.operations["rms_norm"] = functional.RMS_NORM


def test_checks_run_for_the_first_two_calls_of_a_kind(checked):
    operation, seen = checked
    for x in (numbers(), numbers(), numbers(), numbers(2, 8), numbers()):
        operation(x, None, 0.25, 0.5, "none", "native")
    assert seen == [(4, 8), (4, 8), (2, 8)]


def test_a_plan_that_rests_on_a_switch_is_asked_about_it():
    switch, run = ["a"], declared("switched", lambda x: switch[0])
    x, wanted = numbers(), numbers(requires_grad=True)
    for given in (x, wanted):
        for value in ("a", "b", "a"):
            switch[0] = value
            assert run(given)[1].numel() == ord(value)


def test_plans_that_are_forgotten_are_made_anew():
    made, run = [], declared("forgotten", None, made=lambda: made.append(1))
    for _ in range(4):
        run(numbers())
    assert len(made) == 1
    forget_plans()
    run(numbers())
    assert len(made) == 2


def declared(name, state, made=lambda: None):
    """An operator whose plan returns as many numbers as its switch says."""

    def plan(x):
        made()
        count = ord(state(x)) if state else 1
        return lambda x: (x.clone(), x.new_empty(count))

    return declare(
        f"test_cache_{name}(Tensor x) -> (Tensor y, Tensor switch)",
        launch=lambda: Planned(plan, state),
        fake=lambda x: (x.new_empty(x.shape), x.new_empty((1,))),
        gradient=lambda dy: (dy,),
    )


def test_another_function_in_a_level_s_place_is_called():
    x = numbers()
    for _ in range(2):
        rms_norm(x, level="native")
    with LADDER.replaced("rms_norm", "native", lambda x, *others: x + 7.0):
        assert torch.equal(rms_norm(x, level="native"), x + 7.0)
    assert torch.equal(rms_norm(x, level="native"), x)


def test_forward_mode_asks_anew(checked):
    operation, seen = checked
    for _ in range(4):
        operation(numbers(), None, 0.125, 0.0, "none", None)
    seen.clear()
    with forward_ad.dual_level():
        operation(numbers(), None, 0.125, 0.0, "none", None)
    assert seen


def test_the_environment_says_whether_triton_is_interpreted(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(LADDER, "function", lambda function, level: lambda *arguments: None)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for _ in range(3):
        rms_norm(numbers(), level="triton")
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"):
        rms_norm(numbers(), level="triton")


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_traces_through_the_cache(mode):
    """FakeTensors have no address, and with symbolic shapes no sizes that could be compared."""
    x, weight = torch.randn(4, 8), torch.randn(8)
    rms_norm(x, weight, level="native")
    traced = make_fx(lambda x, weight: rms_norm(x, weight, level="native"), tracing_mode=mode)(x, weight)
    torch.testing.assert_close(traced(x, weight), rms_norm(x, weight, level="native"))


def test_subclasses_are_not_cached():
    fake = FakeTensorMode().from_tensor(numbers())
    assert not kept(fake).knows(fake)


def test_lists_are_not_cached():
    given = numbers(), [1, 2]
    noted = kept(*given)
    given[1].append(3)
    assert not noted.knows(*given)
