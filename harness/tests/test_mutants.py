"""Planted faults are found through one function, which cannot pass for want of anything that ran."""

import pytest

from kernel_pytorch.harness.mutants import failures_of
from kernel_pytorch.harness.technique import Level


def too_large(toy):
    return lambda x, weight, factor: toy.reference(x, weight, factor) * 1.01


def test_what_is_right_has_no_failures(toy):
    assert failures_of(toy.technique, "gate", toy.reference) == []


def test_what_is_wrong_is_named_with_level_and_case(toy):
    found = failures_of(toy.technique, "gate", too_large(toy), level=Level.COMPILE)
    assert found
    assert all(line.startswith("toy gate level 'compile', case ") for line in found)
    assert any(": output is off by " in line for line in found)


def test_points_may_be_left_out_and_adversaries_too(toy):
    first = toy.technique.operation("gate").test_grid.points[0]
    every = failures_of(toy.technique, "gate", too_large(toy))
    ordinary = failures_of(toy.technique, "gate", too_large(toy), adversarial=False)
    one = failures_of(
        toy.technique, "gate", too_large(toy), points=lambda p: p if p is first else None, adversarial=False
    )
    assert len(every) > len(ordinary) > len(one) > 0


def test_a_budget_may_be_that_of_what_the_plant_stands_for(toy):
    def off_by_three_roundings(x, weight, factor):
        y = toy.reference(x, weight, factor)
        return y + 3 * (toy.reference(x.double(), weight.double(), factor) - y).abs().max().to(y.dtype)

    ordinary, larger = (
        [
            line
            for line in failures_of(toy.technique, "gate", off_by_three_roundings, budget_factor=factor)
            if "output" in line
        ]
        for factor in (2.0, 4.0)
    )
    assert len(ordinary) > len(larger)
    assert failures_of(toy.technique, "gate", too_large(toy), budget_factor=4.0)


def test_nothing_that_ran_is_an_error(toy):
    with pytest.raises(ValueError, match="gate: test_grid has no float32 case"):
        failures_of(toy.technique, "gate", toy.reference, points=lambda point: None)
    with pytest.raises(ValueError, match="nothing was checked: the toy has no kernel"):
        failures_of(toy.technique, "gate", toy.reference, level=Level.CUDA)
