"""Input sets: as many as it takes, laid out as the given arguments are, with values that were never there before."""

from __future__ import annotations

import pytest
import torch

from kernel_pytorch.harness.clock.statistics import FEWEST_ROUNDS
from kernel_pytorch.harness.quick import comparison, quick_benchmark
from kernel_pytorch.harness.quick.comparison import REPEATED, sets_for
from kernel_pytorch.harness.quick.inputs import LARGEST_FACTOR, SMALLEST_FACTOR, Arguments, Pool

CPU = torch.device("cpu")
X = torch.randn(32, 48)


def test_integers_stay_as_they_are_and_a_repeated_input_is_told(machine, monkeypatch):
    monkeypatch.setattr(comparison, "sets_for", lambda *arguments, **options: 3)
    table, rows = torch.randn(10, 4), torch.tensor([1, 9])
    pool = Pool(Arguments((table, rows), {}), 3)
    assert all(torch.equal(leaves[1], rows) for leaves in pool.sets)
    found = quick_benchmark(torch.bincount, rows, rounds=FEWEST_ROUNDS, machine=machine)
    assert found.notes == (REPEATED,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.float64])
def test_each_refresh_brings_values_that_were_never_there(dtype):
    x = torch.randn(64, 96).to(dtype)
    pool = Pool(Arguments((x, x.t(), x[:, ::2], x[0].expand(3, 96)), {}), 4)
    seen = []
    for _ in range(10):
        pool.refresh()
        for leaves in pool.sets:
            assert [t.stride() for t in leaves] == [(96, 1), (1, 96), (96, 2), (0, 1)]
            assert torch.equal(leaves[3][0], leaves[3][2])
            ratio = (leaves[0] / x).abs().float()
            assert ratio.min() > SMALLEST_FACTOR - 0.01
            assert ratio.max() < LARGEST_FACTOR + 0.01
            assert not any(torch.equal(leaves[0], old) for old in seen)
            seen.append(leaves[0].clone())
    memory = {t.data_ptr() for leaves in pool.sets for t in leaves}
    assert len(memory) == 16
    assert all(address % 64 == 0 for address in memory)


def test_a_tensor_given_twice_stays_one_tensor():
    pool = Pool(Arguments((X, {"again": X}), {"mask": None}), 2)
    assert pool.sets[0][0] is pool.sets[0][1]
    assert Arguments((X, [X, {"k": X}]), {"scale": 2.0}).names == [
        "argument 0", "argument 1[0]", "argument 1[1]['k']", "scale",
    ]  # fmt: skip


def test_infinite_masks_and_zeros_stay():
    mask = torch.tensor([0.0, float("-inf"), 3.0])
    (leaf,) = Pool(Arguments((mask,), {}), 1).sets[0]
    assert leaf[0] == 0.0
    assert leaf[1] == float("-inf")


def test_sets_are_enough_to_be_cold_and_for_a_sample_but_not_for_ever():
    assert sets_for(2**30, 0.1, CPU, 2**31) == 2
    assert 2000 <= sets_for(1, 1e-6, CPU, 2**31) <= 2001
    assert sets_for(1, 1e-9, CPU, 2**31) == 2048
    assert sets_for(2**10, 0.5, CPU, 2**31) == 2
    assert sets_for(2**20, 1e-6, CPU, 8 * 2**20) == 8
