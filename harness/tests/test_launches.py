"""Launches of Triton kernels are counted, in the interpreter and on a GPU."""

from __future__ import annotations

import pytest
import torch

from kernel_pytorch.harness.launches import count_launches

triton = pytest.importorskip("triton", reason="counts launches of Triton kernels")
tl = triton.language


@triton.jit
def add_one(x, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + places, tl.load(x + places) + 1.0)


@triton.jit
def double(x, BLOCK: tl.constexpr):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + places, tl.load(x + places) * 2.0)


def test_every_launch_is_counted_by_name_whatever_its_grid(device):
    x = torch.zeros(8, device=device)
    add_one[(1,)](x, BLOCK=8)
    with count_launches() as names:
        add_one[(2,)](x, BLOCK=4)
        double[(1,)](x, BLOCK=8)
        add_one[(1,)](x, BLOCK=8)
    add_one[(1,)](x, BLOCK=8)
    assert names == ["add_one", "double", "add_one"]
    assert x.tolist() == [6.0] * 8


def test_counting_ends_when_the_body_raises(device):
    x = torch.zeros(8, device=device)
    names: list[str] = []

    def failing():
        nonlocal names
        with count_launches() as names:
            double[(1,)](x, BLOCK=8)
            raise RuntimeError("planted")

    with pytest.raises(RuntimeError, match="planted"):
        failing()
    double[(1,)](x, BLOCK=8)
    assert names == ["double"]
