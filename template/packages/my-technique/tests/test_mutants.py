"""Planted faults: `kernel-pytorch verify` must turn red on each, naming level, case and quantity."""

import pytest
import torch

from kernel_pytorch.harness.mutants import failures_of
from kernel_pytorch.my_technique.levels import reference
from kernel_pytorch.my_technique.technique import technique

OPERATION = technique.operations[0]
right = getattr(reference, OPERATION.name)


def one_percent_too_large(x, beta):
    return right(x, beta) * 1.01


def parameter_ignored(x, beta):
    return right(x, 1.0)


def last_element_skipped(x, beta):
    y = right(x, beta)
    return torch.cat([y[..., :-1], torch.zeros_like(y[..., -1:])], -1)


def not_a_number(x, beta):
    y = right(x, beta)
    return y.masked_fill(torch.arange(y.shape[-1]) == y.shape[-1] // 2, float("nan"))


def gradient_too_small(x, beta):
    y = right(x, beta)
    return y.detach() + 0.99 * (y - y.detach())


def gradient_dropped(x, beta):
    return right(x.detach(), beta) + 0 * x.detach().requires_grad_()


MUTANTS = {
    one_percent_too_large: "output is off by",
    parameter_ignored: "output is off by",
    last_element_skipped: "output is off by",
    not_a_number: "NaN or infinite",
    gradient_too_small: "gradient of x is off by",
    gradient_dropped: "gradient of x is missing",
}


def test_an_unchanged_copy_is_right():
    assert failures_of(technique, OPERATION.name, right) == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_mutant_is_found(mutant):
    found = failures_of(technique, OPERATION.name, mutant)
    assert any(f"{OPERATION.name} level 'native', case " in line and MUTANTS[mutant] in line for line in found), found
