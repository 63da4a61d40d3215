"""Planted faults: `kernel-pytorch verify` must turn red on each, naming level, case and quantity."""

import pytest
import torch

from kernel_pytorch.harness.mutants import failures_of
from kernel_pytorch.rmsnorm.levels import reference
from kernel_pytorch.rmsnorm.technique import technique


def missing_weight(x, weight, eps, offset, casting):
    y = reference.rms_norm(x, None, eps, offset, casting)
    return y if weight is None else y.to(reference.rms_norm(x, weight, eps, offset, casting).dtype) + 0 * weight


def last_column_skipped(x, weight, eps, offset, casting):
    y = reference.rms_norm(x, weight, eps, offset, casting)
    return torch.cat([y[..., :-1], torch.zeros_like(y[..., -1:])], -1)


def eps_too_large(x, weight, eps, offset, casting):
    return reference.rms_norm(x, weight, 10 * eps, offset, casting)


def divisor_one_less(x, weight, eps, offset, casting):
    columns = x.shape[-1]
    return reference.rms_norm(x, weight, eps, offset, casting) * max(1, columns - 1) ** 0.5 / columns**0.5


def not_a_number(x, weight, eps, offset, casting):
    y = reference.rms_norm(x, weight, eps, offset, casting)
    return y.masked_fill(torch.arange(y.shape[-1]) == y.shape[-1] // 2, float("nan"))


def one_percent_too_large(x, weight, eps, offset, casting):
    return reference.rms_norm(x, weight, eps, offset, casting) * 1.01


def weight_gradient_dropped(x, weight, eps, offset, casting):
    return reference.rms_norm(x, None if weight is None else weight.detach(), eps, offset, casting)


class _WriteIncoming(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, dy):
        before = dy.clone()
        dy.mul_(0.5)
        return before


def incoming_gradient_written(x, weight, eps, offset, casting):
    return _WriteIncoming.apply(reference.rms_norm(x, weight, eps, offset, casting))


MUTANTS = {
    missing_weight: "output is off by",
    last_column_skipped: "output is off by",
    eps_too_large: "output is off by",
    divisor_one_less: "output is off by",
    not_a_number: "NaN or infinite",
    one_percent_too_large: "output is off by",
    weight_gradient_dropped: "gradient of weight is missing",
    incoming_gradient_written: "gradient of output 0 was written into",
}


def test_an_unchanged_copy_is_right():
    assert failures_of(technique, "rms_norm", reference.rms_norm) == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_mutant_is_found(mutant):
    found = failures_of(technique, "rms_norm", mutant)
    assert any("rms_norm level 'native', case " in line and MUTANTS[mutant] in line for line in found), found
