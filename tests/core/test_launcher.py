"""Launches past `JITFunction.run` hand over what it does, and plans are made once for a geometry."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from kernel_pytorch.rmsnorm._core import launcher
from kernel_pytorch.rmsnorm._core.launcher import bind, planned
from kernel_pytorch.rmsnorm.kernels.forward import _forward_kernel


def test_what_is_handed_to_cuda_is_what_triton_hands_over(tmp_path):
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    program = Path(__file__).with_name("launches.py")
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def doubled():
    """A launcher that doubles, and the shapes that it was planned for."""
    asked = []

    @planned
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
    monkeypatch.setattr(launcher, "PLANS", 2)
    for size in (1, 2, 3, 1):
        double(torch.ones(size), 1.0)
    assert len(asked) == 4


def test_constants_end_a_signature():
    with pytest.raises(TypeError, match="_forward_kernel: rows, POLICY must end its signature"):
        bind(_forward_kernel, (1,), rows=3, POLICY="")
