"""`patch` of every installed technique in one line, and the way back."""

import functools

import pytest
import torch
from torch import nn

from kernel_pytorch.compile_recipes import patch, techniques, unpatch


def double(module, x):
    return 2 * type(module).forward(module, x)


class Technique:
    """A technique that doubles what linear layers give."""

    name, replacements = "doubling", "somewhere"

    def patch(self, model, *, gpu_bound=False):
        report = type("Patched", (), {"replaced": {}, "left": {}})()
        for path, module in model.named_modules():
            if isinstance(module, nn.Linear):
                module.forward = functools.partial(double, module)
                report.replaced[path] = "double"
            elif isinstance(module, nn.Bilinear):
                report.left[path] = "it has two inputs"
        return report

    def unpatch(self, model):
        for module in model.modules():
            module.__dict__.pop("forward", None)


class Broken(Technique):
    name = "broken"

    def patch(self, model):
        raise TypeError("no")


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(techniques, "able", lambda: {t.name: t for t in (Broken(), Technique())})
    monkeypatch.setattr(techniques, "replacement", lambda technique: technique.patch)


def test_what_was_done_and_what_was_not_is_told(installed):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.other = nn.Bilinear(4, 4, 4)
    patches = patch(model)
    assert patches.replaced == {"doubling 0": "double", "doubling 1": "double"}
    assert str(patches).splitlines() == [
        "doubling: 2 x double",
        "doubling other: left alone, it has two inputs",
        "broken: not applied, no",
    ]


def test_a_package_gets_the_keywords_that_it_has(installed):
    patches = patch(nn.Linear(4, 4), gpu_bound=True)
    assert patches.broken == {"broken": "no"}  # without the keyword
    assert str(patches).splitlines()[-1] == "gpu_bound: passed to doubling"


def test_a_keyword_of_no_package_is_named_with_those_that_there_are(installed):
    model = nn.Linear(4, 4)
    with pytest.raises(TypeError, match=r"given fast; the keywords of the installed packages are doubling: gpu_bound"):
        patch(model, fast=True, gpu_bound=True)
    assert "forward" not in model.__dict__


def test_it_comes_off_again(installed):
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4)
    before = model(x)
    patch(model)
    assert not torch.equal(model(x), before)
    unpatch(model)
    assert torch.equal(model(x), before)


def test_installed_packages_patch_a_model():
    pytest.importorskip("kernel_pytorch.rmsnorm")
    model = nn.Sequential(nn.Linear(16, 16), nn.RMSNorm(16, eps=1e-6))
    if "rmsnorm" not in techniques.able():
        pytest.skip("rmsnorm is not installed")
    assert "rmsnorm 1" not in patch(model).replaced  # PyTorch has a kernel for it
    assert "rmsnorm 1" in patch(model, gpu_bound=True).replaced
    unpatch(model)
    assert "forward" not in model[1].__dict__


@pytest.mark.parametrize("function", [patch, unpatch])
def test_a_compiled_model_is_refused(function):
    with pytest.raises(TypeError, match="before it is compiled"):
        function(torch.compile(nn.Linear(2, 2)))
    with pytest.raises(TypeError, match=r"it must be a torch\.nn\.Module"):
        function(3)
