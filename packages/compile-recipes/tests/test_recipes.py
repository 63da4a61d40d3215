"""Every recipe computes the same before and after, and its count becomes less; the assistant tells them apart."""

import pytest
import torch

from kernel_pytorch.compile_recipes import CompilerOptimizationAssistant
from kernel_pytorch.compile_recipes.fusion import TECHNIQUES
from kernel_pytorch.compile_recipes.recipes import catalogue, count
from kernel_pytorch.compile_recipes.registry import ADVICE

RECIPES = catalogue()


def skip_before(name):
    since = getattr(RECIPES[name].module, "SINCE", "0")
    if torch.torch_version.TorchVersion(torch.__version__) < since:
        pytest.skip(f"this effect begins with torch {since}")


each = pytest.mark.parametrize("name", RECIPES)


@each
def test_both_compute_the_same(name):
    before, after = RECIPES[name].results()
    torch.testing.assert_close(before, after, rtol=2e-2, atol=2e-2, check_dtype=False)


@each
def test_its_count_becomes_less(name):
    skip_before(name)
    counted = RECIPES[name].counted()
    assert counted
    assert all(after < before for before, after in counted.values()), counted
    if "breaks" in counted:
        assert counted["breaks"][1] == 0


def named(recipe, module, calls):
    (inputs, kwargs), *others = calls
    shapes = [kw or given for given, kw in others][:4]
    report = CompilerOptimizationAssistant().analyze_component(module, *inputs, kwargs=kwargs, shapes=shapes)
    return [f for f in report.findings if f.recipe == recipe.name]


@each
def test_the_assistant_names_it_before_and_not_after(name):
    skip_before(name)
    recipe = RECIPES[name]
    modules, calls = recipe.modules(), recipe.calls()
    found = named(recipe, modules[0], calls[0])
    assert {f.kind for f in found} == {recipe.detector}
    if recipe.detector != "recompile":  # its line is that of the function
        assert any(f.line.startswith(recipe.module.__file__) for f in found) or not found[0].line
    assert bool(named(recipe, modules[1], calls[1])) != recipe.silent


def test_no_two_recipes_are_one():
    seen = [(r.detector, r.counts, r.code("Before")) for r in RECIPES.values()]
    assert len({*seen}) == len(seen) >= 30


def test_what_findings_name_is_in_the_catalogue():
    named_by_patterns = {t.recipe for t in TECHNIQUES.values()} - {""}
    assert named_by_patterns <= {*RECIPES}
    assert {*ADVICE} - {*RECIPES} == {"files", "numpy"}  # advice alone: their breaks are of the same kind


@each
def test_it_says_why_and_when_not(name):
    recipe = RECIPES[name]
    assert recipe.title
    assert recipe.why.endswith(".")
    assert recipe.when_not.endswith(".")


def test_there_is_no_other_quantity():
    with pytest.raises(ValueError, match="must be breaks"):
        count("luck", torch.nn.Linear(2, 2), [((torch.ones(2),), {})])
