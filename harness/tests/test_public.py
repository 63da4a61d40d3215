"""Levels of a public function: called as users call it, held against the definition and not against itself."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from kernel_pytorch.harness.exemptions import NO_FORMULA, unsupported_rows
from kernel_pytorch.harness.technique import Cost, Exemption, Level, Operation, grid, point

NAMES = ("made_up", "made_up.functional", "made_up.levels", "made_up.levels.reference", "made_up.levels.native")


def scaled(x, power, scale):
    return x**power * scale


@pytest.fixture
def calls(monkeypatch):
    """A package with a public function; what it was called with."""
    seen = []

    def gate(x, power=2, *, scale=3.0, level=None):
        seen.append({"power": power, "scale": scale, "level": level})
        return scaled(x, power, scale)

    for name in NAMES:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    gate.__module__, gate.__name__ = "made_up.functional", "gate"
    sys.modules["made_up"].gate = gate
    sys.modules["made_up.levels.reference"].gate = scaled
    return seen


def operation(inputs=lambda case, generator: ((torch.ones(2),), {"scale": 5.0}), **fields):
    cases = grid(point("plain", core=True), dtypes=(torch.float32,))
    given = {"function": "made_up:gate", "levels": ("reference", "native", "compile")} | fields
    cost = lambda case, direction: Cost(0)  # noqa: E731
    return Operation(name="gate", inputs=inputs, cost=cost, test_grid=cases, bench_grid=cases, **given)


def arguments(declared):
    return declared.arguments(next(iter(declared.test_grid)), torch.Generator())


def test_arguments_are_kept_in_the_order_of_the_public_function(calls):
    declared = operation()
    assert declared.signature() == ["x", "power", "scale"]
    assert arguments(declared)[1:] == (2, 5.0)
    assert [i.name for i in declared.implementations] == ["reference", "native", "compile"]


@pytest.mark.parametrize("way", ["load", "bound_to"])
def test_a_level_is_the_public_function_called_by_name(calls, way):
    declared = operation()
    native, given = declared.implementation("native"), arguments(declared)
    y = native.load()(*given) if way == "load" else native.bound_to(given)()
    assert calls == [{"power": 2, "scale": 5.0, "level": "native"}]
    torch.testing.assert_close(y, torch.full((2,), 5.0))


def test_the_definition_is_the_level_itself(calls):
    declared = operation()
    torch.testing.assert_close(declared.reference.definition()(*arguments(declared)), torch.full((2,), 5.0))
    assert calls == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            (torch.ones(2), 5.0),
            r"gate: inputs must return \(args, kwargs\) of made_up:gate\(x, power=2, \*, scale=3.0\)",
        ),
        (((torch.ones(2),), {"factor": 5.0}), "unexpected keyword argument 'factor'"),
        (((torch.ones(2),), {"level": "native"}), "unexpected keyword argument 'level'"),
        (((), {}), "missing a required argument: 'x'"),
    ],
)
def test_inputs_that_do_not_fit_are_told_of(calls, given, message):
    with pytest.raises(TypeError, match=message):
        arguments(operation(inputs=lambda case, generator: given))


def test_budgets_and_reasons_are_given_by_level(calls):
    declared = operation(
        budgets={"native": (3.0, "adds in another order")},
        exemptions=[
            Exemption(("opcheck",), None, ("native",)),
            Exemption(("export",), "on purpose", ("native",), devices=("cpu", "cuda")),
            Exemption(("double backward",), "another", ("compile",)),
        ],
    )
    native, compiled = declared.implementation("native"), declared.implementation("compile")
    assert (native.budget_factor, native.budget_reason) == (3.0, "adds in another order")
    on_purpose = {"export on cpu": "on purpose", "export on cuda": "on purpose"}
    assert native.unsupported == {"FLOP counter": NO_FORMULA, **on_purpose}
    assert compiled.unsupported == {**unsupported_rows(Level.COMPILE, ()), "double backward": "another"}
    assert declared.reference.budget_factor == 2.0


def test_what_torch_cannot_do_is_no_exemption_of_our_kernels():
    assert unsupported_rows(Level.TRITON, ()) == {}
    assert set(unsupported_rows(Level.COMPILE, ())) > {"opcheck", "FLOP counter", "double backward"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"function": ""}, "gate: levels names 'reference', which is a level of function, and none is given"),
        ({"budgets": {"triton": (4.0, "why")}}, "gate: budgets names triton; levels are reference, native, compile"),
        ({"levels": ("reference", "assembler")}, "'assembler' is not a valid Level"),
    ],
)
def test_a_declaration_that_cannot_be_right_is_refused(calls, fields, message):
    with pytest.raises(ValueError, match=message):
        operation(**fields)
