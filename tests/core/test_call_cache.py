"""The call cache returns a result for matching calls and for no others."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from kernel_pytorch.rmsnorm import rms_norm
from kernel_pytorch.rmsnorm._core import call_cache as module
from kernel_pytorch.rmsnorm._core.call_cache import PATIENCE, PAUSE, SIZE, CallCache
from kernel_pytorch.rmsnorm._core.operator import declare
from kernel_pytorch.rmsnorm._core.plans import forget_plans, planned
from kernel_pytorch.rmsnorm.levels import LADDER


@pytest.fixture(autouse=True)
def patient():
    """Let caches that other tests made pause, by calls that never repeat, cache again."""
    for cache in module._caches:
        cache._patience, cache._pause = PATIENCE, 0


def numbers(*shape, **options):
    return torch.zeros(shape or (4, 8), **options)


def kept(*arguments):
    cache = CallCache()
    cache.store(arguments, "found")
    return cache


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
    "class": (torch.nn.Parameter(numbers(), requires_grad=False), None, 1.0, "a"),
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
    assert kept(numbers(), None, 1.0, "a").lookup((torch.ones(4, 8), None, 1.0, "a")) == "found"
    with torch.no_grad():
        assert kept(numbers(), None, 1.0, "a").lookup((torch.ones(4, 8), None, 1.0, "a")) == "found"


@pytest.mark.parametrize("name", OTHERS)
def test_other_calls_are_not(name):
    assert kept(numbers(), None, 1.0, "a").lookup(OTHERS[name]) is None


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
    assert kept(numbers(), None, 1.0, "a").lookup(given) is None
    assert kept(*given).lookup(given) is None


@pytest.mark.parametrize("name", ["misaligned", "freed"])
def test_what_plans_tell_apart_by_addresses_is_not_kept(name):
    assert kept(*OTHERS[name]).lookup(OTHERS[name]) is None


@pytest.mark.parametrize(("own", "other"), [(0.0, -0.0), (-0.0, 0.0), (-0.0, -0.0), (math.nan, float("nan"))])
def test_zeros_of_another_sign_and_nan_are_other_numbers(own, other):
    assert kept(numbers(), own).lookup((numbers(), other)) is None


def test_zero_is_found():
    assert kept(numbers(), 0.0).lookup((numbers(), 0.0)) == "found"


def test_transforms_and_modes_make_other_calls():
    cache, x, found = kept(numbers()), numbers(), []

    def look(x):
        found.append(cache.lookup((x,)))
        return x.sum()

    torch.func.grad(look)(x)
    torch.func.vmap(look)(numbers(3, 4, 8))
    torch.func.vmap(lambda _: look(x))(numbers(3))
    with torch.inference_mode():
        look(x)
    with torch.autocast("cpu"):
        look(x)
    assert found == [None] * 5
    assert cache.lookup((x,)) == "found"


def test_the_last_kinds_of_calls_are_cached():
    cache = CallCache()
    for columns in range(1, SIZE + 2):
        cache.store((numbers(4, columns),), columns)
    assert [cache.lookup((numbers(4, columns),)) for columns in range(1, SIZE + 2)] == [None, *range(2, SIZE + 2)]
    cache.clear()
    assert cache.lookup((numbers(4, SIZE),)) is None


def test_the_cache_pauses_if_no_call_repeats():
    cache = CallCache()
    for columns in range(1, PATIENCE + 1):
        assert cache.lookup((numbers(1, columns),)) is None
        cache.store((numbers(1, columns),), columns)
    last = (numbers(1, PATIENCE - 1),)
    for _ in range(PAUSE - 1):
        assert cache.lookup(last) is None
        cache.store(last, "stored during the pause")
    assert cache.lookup(last) is None
    assert cache.lookup(last) == PATIENCE - 1


def test_hits_prevent_a_pause():
    cache = kept(numbers())
    for columns in range(1, 2 * PATIENCE):
        cache.store((numbers(4, columns),), columns)
        cache.store((numbers(),), "found")
        assert cache.lookup((numbers(),)) == "found"


def test_without_guards_nothing_is_cached(monkeypatch):
    monkeypatch.setattr(module, "TensorGuards", None)
    assert kept(numbers()).lookup((numbers(),)) is None


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


def test_checks_run_once_for_calls_that_are_alike():
    checked = []

    def check(x, *others):
        checked.append(tuple(x.shape))

    for x in (numbers(), numbers(), numbers(2, 8), numbers()):
        LADDER.checked("rms_norm", "native", check, 2, x, None, 0.25, 0.5, "none")
    assert checked == [(4, 8), (2, 8)]


def test_what_cannot_be_found_pushes_nothing_out():
    cache = kept(numbers())
    for _ in range(2 * SIZE):
        cache.store((misaligned(),), "misaligned")
    assert cache.lookup((numbers(),)) == "found"


def test_a_plan_that_rests_on_a_switch_is_asked_about_it():
    switch, run = ["a"], declared("switched", lambda x: switch[0])
    x, wanted = numbers(), numbers(requires_grad=True)
    for given in (x, wanted):
        for value in ("a", "b", "a"):
            switch[0] = value
            assert run(given)[1].numel() == ord(value)


def test_plans_that_are_forgotten_are_made_anew():
    made, run = [], declared("forgotten", None, made=lambda: made.append(1))
    for _ in range(3):
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
        launch=lambda: planned(plan, state),
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


def test_forward_mode_asks_anew():
    x = numbers()
    for _ in range(2):
        LADDER.checked("rms_norm", None, lambda *given: None, 2, x, None, 0.125, 0.0, "none")
    checked = []
    with forward_ad.dual_level():
        LADDER.checked("rms_norm", None, lambda *given: checked.append(given), 2, x, None, 0.125, 0.0, "none")
    assert checked


def test_the_environment_says_whether_triton_is_interpreted(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for _ in range(2):
        LADDER.checked("rms_norm", "triton", lambda *given: None, 2, numbers(), None, 0.125, 0.0, "none")
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"):
        LADDER.checked("rms_norm", "triton", lambda *given: None, 2, numbers(), None, 0.125, 0.0, "none")


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_traces_through_the_cache(mode):
    """FakeTensors have no address, and with symbolic shapes no sizes that could be compared."""
    x, weight = torch.randn(4, 8), torch.randn(8)
    rms_norm(x, weight, level="native")
    traced = make_fx(lambda x, weight: rms_norm(x, weight, level="native"), tracing_mode=mode)(x, weight)
    torch.testing.assert_close(traced(x, weight), rms_norm(x, weight, level="native"))


def test_subclasses_are_not_cached():
    fake = FakeTensorMode().from_tensor(numbers())
    assert kept(fake).lookup((fake,)) is None


def test_lists_are_not_cached():
    given = numbers(), [1, 2]
    cache = kept(*given)
    given[1].append(3)
    assert cache.lookup(given) is None
