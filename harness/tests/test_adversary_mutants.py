"""NaN, infinities and a common offset each find a planted defect that random inputs pass over."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernel_pytorch.harness.mutants import failures_of
from kernel_pytorch.harness.technique import Implementation, Level


def log_softmax(x, weight, factor):
    """Rows of `x`, the largest taken off first."""
    z = x.to(torch.promote_types(x.dtype, torch.float32))
    return (torch.log_softmax(z, -1) * weight.to(z.dtype) * factor).to(x.dtype)


def offset_loses_digits(x, weight, factor):
    """The logarithm of the sum under the name of one number."""
    z = x.to(torch.promote_types(x.dtype, torch.float32))
    return ((z - z.logsumexp(-1, keepdim=True)) * weight.to(z.dtype) * factor).to(x.dtype)


def nan_is_dropped(x, weight, factor):
    """As by a maximum: `fmax(NaN, 0)` is 0."""
    return log_softmax(torch.where(x.isnan(), 0.0, x), weight, factor)


def minus_infinity_is_the_smallest_number(x, weight, factor):
    return log_softmax(torch.where(x == -float("inf"), torch.finfo(x.dtype).min, x), weight, factor)


def other_rows_are_poisoned(x, weight, factor):
    return log_softmax(x, weight, factor) + 0.0 * x.mean(0, keepdim=True)


@pytest.fixture
def shifted(toy):
    """The toy's technique, of a log-softmax."""
    toy.log_softmax = log_softmax
    reference = Implementation("reference", Level.REFERENCE, "toy:log_softmax")
    operation = dataclasses.replace(toy.gate, levels=[reference], roles={"data": ("x",), "shift invariant": ("x",)})
    return dataclasses.replace(toy.technique, operations=[operation])


def adversaries_that_find(technique, function):
    """Their names; "" stands for random inputs."""
    lines = failures_of(technique, "gate", function)
    return {line.partition("] float")[2].partition(":")[0][2:].strip(" ,") for line in lines}


def test_what_is_right_is_found_by_none(shifted):
    assert adversaries_that_find(shifted, log_softmax) == set()


@pytest.mark.parametrize(("mutant", "adversaries"), [
    (offset_loses_digits, {"common offset", "large mean", "infinities"}),
    (nan_is_dropped, {"NaN"}),
    (minus_infinity_is_the_smallest_number, {"infinities"}),
    (other_rows_are_poisoned, {"NaN", "infinities"}),
], ids=lambda value: getattr(value, "__name__", ""))  # fmt: skip
def test_mutant_is_found_by_its_adversaries_and_not_by_random_inputs(shifted, mutant, adversaries):
    assert adversaries_that_find(shifted, mutant) == adversaries


def test_a_definition_that_loses_digits_to_an_offset_is_wrong_itself(shifted, toy):
    """Its own error is no budget: that is taken without the offset."""
    toy.log_softmax = offset_loses_digits
    assert adversaries_that_find(shifted, offset_loses_digits) == {"common offset"}
    assert "common offset" not in adversaries_that_find(shifted, log_softmax)
