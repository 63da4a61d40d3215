"""`patch` and `unpatch`: what stays as it is, what is refused, and that patches do not know of each other."""

import copy
import functools
import types

import pytest
import torch

from kernel_pytorch.rmsnorm._core import patching
from kernel_pytorch.rmsnorm._core.patching import Found
from kernel_pytorch.rmsnorm._core.stock import owner_of


def doubled(self, x):
    return 2.0 * patching.stock(self)(self, x)


def linears(module):
    return Found(doubled_forward(), "doubled") if type(module) is torch.nn.Linear else None


def doubled_forward():
    return lambda self, x: doubled(self, x)


def relus(module):
    if isinstance(module, torch.nn.ReLU):
        return "it is inplace" if module.inplace else Found(lambda self, x: x.clamp(min=0.5), "clamped")
    return None


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4), torch.nn.ReLU(inplace=True)
    )


X = torch.linspace(-1.0, 1.0, 8).view(2, 4)


def test_only_the_forward_changes():
    ours = model()
    before = copy.deepcopy(ours)
    parameters, classes = list(ours.parameters()), [type(m) for m in ours.modules()]
    report = patching.patch(ours, "a", [linears, relus])
    assert report.replaced == {"0": "doubled", "1": "clamped", "2": "doubled"}
    assert report.left == {"3": "it is inplace"}
    assert "3: left alone, it is inplace" in str(report)
    assert [type(m) for m in ours.modules()] == classes
    assert all(a is b for a, b in zip(ours.parameters(), parameters, strict=True))
    assert list(ours.state_dict()) == list(before.state_dict())
    assert not torch.equal(ours(X), before(X))
    patching.unpatch(ours, "a")
    assert torch.equal(ours(X), before(X))
    assert all("forward" not in vars(m) for m in ours.modules())


def test_patches_commute_and_come_off_in_any_order():
    one, two = model(), model()
    patching.patch(one, "a", [linears])
    patching.patch(one, "b", [relus])
    patching.patch(two, "b", [relus])
    patching.patch(two, "a", [linears])
    assert torch.equal(one(X), two(X))
    patching.unpatch(one, "a")
    patching.unpatch(one, "b")
    patching.unpatch(two, "a")
    assert "forward" in vars(two[1])
    patching.unpatch(two, "b")
    assert torch.equal(one(X), model()(X))
    assert torch.equal(two(X), model()(X))


def test_patched_twice_is_patched_once():
    ours = model()
    patching.patch(ours, "a", [linears])
    once = ours(X)
    report = patching.patch(ours, "a", [linears])
    assert report.replaced == {"0": "a, patched before", "2": "a, patched before"}
    assert torch.equal(ours(X), once)


def test_what_others_replaced_is_left_alone():
    ours = model()
    patching.patch(ours, "a", [linears])
    ours[1].forward = lambda x: x
    report = patching.patch(ours, "b", [linears, relus])
    assert report.left["0"] == "its forward was replaced before, by a"
    assert "its forward was replaced before, by" in report.left["1"]
    patching.unpatch(ours, "b")
    assert "forward" in vars(ours[1])
    assert owner_of(ours[0]) == "a"


def test_hooks_are_called():
    ours, seen = model(), []
    ours[0].register_forward_hook(lambda module, inputs, y: seen.append(y))
    patching.patch(ours, "a", [linears])
    ours(X)
    assert torch.equal(seen[0], 2.0 * torch.nn.functional.linear(X, ours[0].weight, ours[0].bias))


def test_a_deep_copy_computes_with_its_own_parameters():
    ours = model()
    patching.patch(ours, "a", [linears])
    other = copy.deepcopy(ours)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert not torch.equal(ours(X), other(X))
    patching.unpatch(other, "a")
    assert "forward" in vars(ours[0])


def test_what_others_wrap_around_a_patch_is_theirs():
    """As accelerate does; wrappers copy the attributes of what they wrap."""
    ours = model()
    patching.patch(ours, "a", [linears])
    inner = ours[0].forward.__func__
    ours[0].forward = types.MethodType(functools.wraps(inner)(lambda self, x: 3.0 * inner(self, x)), ours[0])
    assert owner_of(ours[0]) is None
    wrapped = ours(X)
    patching.unpatch(ours, "a")
    assert "forward" in vars(ours[0])
    assert not torch.equal(ours(X), wrapped)  # the other layer came off


def test_a_pickled_model_comes_back_unpatched_and_is_patched_again(tmp_path):
    ours = model()
    stock = ours(X)
    patching.patch(ours, "a", [linears])
    torch.save(ours, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(loaded(X), stock)
    assert patching.patch(loaded, "a", [linears]).replaced == {"0": "doubled", "2": "doubled"}
    assert torch.equal(loaded(X), ours(X))


def test_what_differs_in_training_or_fails_is_not_known():
    x = torch.ones(4, 8)
    assert torch.equal(patching.tried(torch.nn.ReLU(), x), x)
    assert patching.tried(torch.nn.Dropout(0.5), x) is None
    assert patching.tried(torch.nn.Linear(3, 3), x) is None


def test_rows_are_held_one_by_one():
    stock = torch.tensor([[1.0, 1.0], [1e-6, 1e-6]])
    assert patching.agree(stock * (1.0 + 1e-7), stock, 1e-6)
    assert not patching.agree(torch.tensor([[1.0, 1.0], [2e-6, 1e-6]]), stock, 1e-6)


def test_a_stand_in_leaves_the_original_alone():
    original = torch.nn.Sequential(torch.nn.Linear(4, 4))
    original.register_forward_hook(lambda *given: pytest.fail("a hook of the original was called"))
    probe = patching.stand_in(original, {"0": torch.nn.Identity()})
    assert torch.equal(probe(X), X)
    assert type(original[0]) is torch.nn.Linear


@pytest.mark.parametrize(
    "given", [None, torch.compile(model()), torch.jit.trace(model(), X)], ids=["none", "compiled", "traced"]
)
def test_what_cannot_be_patched_is_refused_by_name(given):
    for act in (lambda: patching.patch(given, "a", []), lambda: patching.unpatch(given, "a")):
        with pytest.raises(TypeError, match="model: given"):
            act()


def test_compiled_after_it_was_patched():
    ours = model()
    patching.patch(ours, "a", [linears, relus])
    torch.testing.assert_close(torch.compile(ours, fullgraph=True, backend="eager")(X), ours(X))
