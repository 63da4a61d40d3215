"""Launches past `JITFunction.run` hand over what it does, and plans are made once for a geometry."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from kernel_pytorch.rmsnorm._core import plans
from kernel_pytorch.rmsnorm._core.launch import bind
from kernel_pytorch.rmsnorm._core.plans import Planned, forget_plans
from kernel_pytorch.rmsnorm.kernels.forward import _forward_kernel


@pytest.mark.parametrize("program", ["launches", pytest.param("group_launches", marks=pytest.mark.slow)])
def test_what_is_handed_to_cuda_is_what_triton_hands_over(program, tmp_path):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(Path(__file__).with_name(f"{program}.py"))]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=900)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def doubled():
    """A launcher that doubles, and the shapes that it was planned for."""
    asked = []

    @Planned
    def double(x, factor):
        if x.data_ptr() == 0 and x.numel() > 0:
            raise ValueError("x: its storage holds nothing")
        asked.append((tuple(x.shape), factor))
        return lambda x, factor: 2 * x

    return double, asked


def test_a_plan_is_made_once_for_a_geometry(doubled):
    double, asked = doubled
    x = torch.arange(6.0).view(2, 3)
    for _ in range(2):
        assert torch.equal(double(x, 1.0), 2 * x)
    assert torch.equal(double(x + 1, 1.0), 2 * x + 2)
    assert len(asked) == 1
    for other in (x.t(), x.double(), x.reshape(3, 2), x.new_empty(0, 3)):
        double(other, 1.0)
    double(x, 2.0)
    assert len(asked) == 6
    shifted = torch.arange(7.0)[1:].view(2, 3)  # memory that begins elsewhere than at a multiple of 16 bytes
    assert torch.equal(double(shifted, 1.0), 2 * shifted)
    assert len(asked) == 7


def test_scalars_that_compare_otherwise_than_they_are(doubled):
    """NaN is never equal to itself, and -0.0 is equal to 0.0."""
    double, asked = doubled
    x = torch.arange(6.0)
    for _ in range(3):
        for factor in (float("nan"), -float("nan"), 0.0, -0.0, float("inf")):
            double(x, factor)
    assert [repr(factor) for _, factor in asked] == ["nan", "0.0", "-0.0", "inf"]


def test_what_a_plan_rests_on_beside_its_arguments():
    switch, asked = [True], []

    @functools.partial(Planned, state=lambda x: switch[0])
    def double(x):
        asked.append(switch[0])
        return lambda x: 2 * x

    for switch[0] in (True, True, False, True, False):
        double(torch.ones(2))
    assert asked == [True, False]
    forget_plans()
    double(torch.ones(2))
    assert asked == [True, False, False]


def test_memory_that_was_freed_is_seen_although_there_is_a_plan(doubled):
    double, _ = doubled
    x = torch.arange(6.0)
    double(x, 1.0)
    freed = torch.arange(6.0)
    freed.untyped_storage().resize_(0)
    for _ in range(2):
        with pytest.raises(ValueError, match="holds nothing"):
            double(freed, 1.0)


def test_plans_are_forgotten_before_they_fill_the_memory(doubled, monkeypatch):
    double, asked = doubled
    monkeypatch.setattr(plans, "MOST", 2)
    for size in (1, 2, 3, 1):
        double(torch.ones(size), 1.0)
    assert len(asked) == 4


def test_constants_end_a_signature():
    with pytest.raises(TypeError, match="_forward_kernel: rows, POLICY must end its signature"):
        bind(_forward_kernel, (1,), rows=3, POLICY="")
