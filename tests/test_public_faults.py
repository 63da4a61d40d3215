"""Faults planted in what users call, a public function and a module: verification must turn red on each."""

import dataclasses
import functools
import importlib

import pytest
import torch

from kernel_pytorch import rmsnorm
from kernel_pytorch.harness.verification import verify
from kernel_pytorch.rmsnorm import RMSNorm, rms_norm
from kernel_pytorch.rmsnorm.technique import technique

LEVELS = ["reference", "native"]
POINTS = ("typical", "gemma", "none", "no weight")


@pytest.fixture
def verified(monkeypatch):
    """Put a function in the place of `rms_norm`; return what `kernel-pytorch verify` finds wrong, level by level."""

    def check(function):
        monkeypatch.setattr(rmsnorm, "rms_norm", functools.wraps(rms_norm)(function))
        declared = technique.operation("rms_norm")
        few = tuple(point for point in declared.test_grid.points if point.name in POINTS)
        small = dataclasses.replace(declared, test_grid=dataclasses.replace(declared.test_grid, points=few))
        planted = dataclasses.replace(technique, operations=[small])
        found = list(verify(planted, torch.device("cpu"), levels=LEVELS))
        assert all(v.unavailable is None for v in found)
        return [[line for v in found if v.implementation == level for line in v.failures()] for level in LEVELS]

    return check


def test_what_passes_everything_on_is_right(verified):
    assert verified(lambda *args, **kwargs: rms_norm(*args, **kwargs)) == [[], []]


FAULTS = {
    "another eps": lambda x, weight, *, eps, **rest: rms_norm(x, weight, eps=10.0 * eps, **rest),
    "no offset": lambda x, weight, *, offset, **rest: rms_norm(x, weight, **rest),
    "weight is lost": lambda x, weight, **rest: rms_norm(x, None, **rest),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_public_function_that_passes_something_else_on_is_found_at_every_level(verified, fault):
    """At the reference level too: the truth does not go through the public function."""
    for failures in verified(FAULTS[fault]):
        assert any("rms_norm level" in line and "output is" in line for line in failures), fault


def through_module(x, weight=None, *, eps, offset, casting, level):
    """`rms_norm` of the module where it has that casting (in float32 "llama" is "gemma"), else of the function."""
    dtypes = {t.dtype for t in (x, weight) if t is not None}
    if offset != 0.0 or casting == "none" or dtypes != {torch.float32}:
        return rms_norm(x, weight, eps=eps, offset=offset, casting=casting, level=level)
    module = RMSNorm(x.shape[-1], eps, elementwise_affine=weight is not None, level=level)
    return torch.func.functional_call(module, {} if weight is None else {"weight": weight}, (x,))


def test_the_module_is_right(verified):
    assert verified(through_module) == [[], []]


MODULE_FAULTS = {
    "another eps": lambda x, weight, *, eps, **rest: rms_norm(x, weight, eps=10.0 * eps, **rest),
    "an offset": lambda x, weight, **rest: rms_norm(x, weight, offset=1.0, **rest),
}


@pytest.mark.parametrize("fault", MODULE_FAULTS)
def test_a_module_that_passes_a_wrong_keyword_is_found(verified, fault, monkeypatch):
    module = importlib.import_module("kernel_pytorch.rmsnorm.module")
    monkeypatch.setattr(module, "rms_norm", MODULE_FAULTS[fault])
    for failures in verified(through_module):
        assert any("rms_norm level" in line and "float32" in line and "output is" in line for line in failures), fault
