"""`patch` and `unpatch`: what stays as it is, what is refused, and that patches do not know of each other."""

import contextlib
import copy
import functools
import types

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kernel_pytorch.rmsnorm._core import adoption, measured, patching
from kernel_pytorch.rmsnorm._core.levels import Default
from kernel_pytorch.rmsnorm._core.patching import Found
from kernel_pytorch.rmsnorm._core.stock import owner_of


def doubled(self, x):
    return 2.0 * patching.forward_of_class(self)(self, x)


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
    with pytest.warns(UserWarning, match="patches of a stay in 0, whose forward was wrapped"):
        patching.unpatch(ours, "a")
    assert "forward" in vars(ours[0])
    assert not torch.equal(ours(X), wrapped)  # the other layer came off


def offloaded(module):
    """As accelerate's `add_hook_to_module`, which moves weights around the forward that it keeps."""
    module._old_forward = old = module.forward
    module.forward = functools.update_wrapper(functools.partial(lambda self, x: self._old_forward(x), module), old)


def test_a_patch_that_accelerate_wrapped_comes_off():
    ours = model()
    stock = ours(X)
    patching.patch(ours, "a", [linears])
    for module in ours:
        offloaded(module)
    assert patching.patch(ours, "a", [linears]).replaced == {"0": "a, patched before", "2": "a, patched before"}
    assert not torch.equal(ours(X), stock)
    patching.unpatch(ours, "a")
    assert torch.equal(ours(X), stock)
    for module in ours:  # as accelerate takes its own off
        module.forward = module._old_forward
        del module._old_forward
    assert torch.equal(ours(X), stock)
    assert patching.patch(ours, "a", [linears]).replaced == {"0": "doubled", "2": "doubled"}


@pytest.mark.parametrize("default", ["device", "mode", "fake", "autocast"])
def test_modules_are_tried_on_the_cpu_in_no_mode(default):
    """Whatever the user has made the default, or has switched on."""
    seen = []

    def find(module):
        x = torch.ones(2)
        seen.append((x.device.type, type(x), torch.is_autocast_enabled("cpu")))

    ours = model()
    with contextlib.ExitStack() as stack:
        if default == "device":
            torch.set_default_device("meta")
            stack.callback(torch.set_default_device, None)
        else:
            modes = {"mode": torch.device("meta"), "fake": FakeTensorMode(), "autocast": torch.autocast("cpu")}
            stack.enter_context(modes[default])
        patching.patch(ours, "a", [find])
    assert set(seen) == {("cpu", torch.Tensor, False)}


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
    """No hook is called, of any module in it or of all modules, and no forward but those of their classes."""

    def called(*given):
        pytest.fail("something of the original was called")

    act = torch.nn.Sequential(torch.nn.ReLU())
    original = torch.nn.Sequential(torch.nn.Linear(4, 4), act)
    for module in original.modules():
        module.register_forward_hook(called)
        module.register_forward_pre_hook(called)
    act[0].forward = called
    handle = torch.nn.modules.module.register_module_forward_hook(called)
    try:
        probe = patching.stand_in(original, {"0": torch.nn.Identity()})
        assert torch.equal(probe(X), X.relu())
    finally:
        handle.remove()
    assert type(original[0]) is torch.nn.Linear
    assert act[0].forward is called


def test_the_first_line_is_about_a_device_that_was_not_measured(monkeypatch):
    known = patching.patch(model(), "a", [linears])
    monkeypatch.setattr(adoption, "device_name", lambda device: "AMD EPYC")
    assert patching.patch(model(), "a", [linears]).unmeasured == ()
    monkeypatch.setattr(adoption, "device_name", lambda device: "Some other CPU")
    report = patching.patch(model(), "a", [linears])
    first, *others = str(report).splitlines()
    assert "Some other CPU" in first
    assert "`kernel-pytorch adopt rmsnorm`" in first
    assert measured.DURATION in first
    assert others == str(known).splitlines()[-len(others) :]
    assert patching.patch(model().to("meta"), "a", [linears]).unmeasured == ()


def test_a_report_says_that_nothing_was_replaced():
    assert "no module replaced" in str(patching.patch(torch.nn.Sequential(torch.nn.ReLU()), "a", [linears]))
    assert "no module replaced" not in str(patching.patch(model(), "a", [linears]))


@pytest.mark.parametrize(("capability", "is_measured"), [((9, 0), True), ((8, 0), False), ((8, 9), False)])
def test_a_gpu_is_measured_by_its_compute_capability(capability, is_measured, monkeypatch):
    monkeypatch.setattr(measured, "compute_capability", lambda device: capability)
    monkeypatch.setattr(adoption, "device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(measured.find_ladder(), "unavailable", lambda *given: None)
    note = measured.why_not_measured(torch.device("cuda", 0))
    assert (note is None) == is_measured
    if not is_measured:
        assert note.startswith(
            "Not measured on this device (NVIDIA A100, compute capability {}.{})".format(*capability)
        )


def test_what_a_user_adopted_is_measured(monkeypatch):
    row = Default("cuda", "defaults.json", "cpu", ("rms_norm",), device_name="Some other CPU")
    monkeypatch.setattr(adoption, "device_name", lambda device: "Some other CPU")
    assert measured.why_not_measured(torch.device("cpu"))
    monkeypatch.setitem(vars(measured.find_ladder()), "adopted", (row,))
    assert measured.why_not_measured(torch.device("cpu")) is None


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
