"""How time grows: the power of recorded times, and what `scaling` accepts, records and draws."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kernel_pytorch.harness.clock.statistics import FEWEST_ROUNDS
from kernel_pytorch.harness.quick import comparison, fit_growth, scaling

SIZES = [2**k for k in range(4, 14)]


def times(power, noise=0.0):
    """Seconds that grow with a power of the size, with a relative error of that size."""
    generator = np.random.default_rng(0)
    return [1e-9 * n**power * math.exp(noise * generator.standard_normal()) for n in SIZES]


@pytest.mark.parametrize("power", [0.5, 1, 2, 3])
def test_the_exponent_is_that_of_the_power(power):
    exact = fit_growth(SIZES, times(power))
    assert exact.exponent == pytest.approx(power)
    assert exact.factor == pytest.approx(1e-9)
    assert exact.r_squared == pytest.approx(1.0)
    noisy = fit_growth(SIZES, times(power, 0.1))
    assert noisy.exponent == pytest.approx(power, abs=0.1)
    assert 0.9 < noisy.r_squared < 1.0
    assert noisy.verdict == f"time grows as size^{noisy.exponent:.2f} (R² {noisy.r_squared:.3f})"


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_times_that_do_not_grow_have_no_exponent_and_no_share(noise):
    found = fit_growth(SIZES, times(0, noise))
    assert found.exponent == pytest.approx(0.0, abs=0.05)
    assert found.r_squared < 0.5


def test_times_that_follow_no_power_are_told_so():
    assert fit_growth(SIZES, [1.0, 50.0, 2.0, 80.0, 1.0, 60.0, 3.0, 90.0, 1.0, 70.0]).r_squared < 0.5


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([1, 2, 3, 4], "sizes are 4 different ones; allowed are 5 or more"),
        ([1, 1, 2, 2, 3, 3], "sizes are 3 different ones"),
        ([0, 1, 2, 3, 4], "sizes hold 0; allowed are whole numbers from 1 on"),
        ([1, 2, 3, 4, 5.5], "sizes hold 5.5; allowed are whole numbers from 1 on"),
    ],
)
def test_sizes_that_say_nothing_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        scaling(lambda n: lambda: None, sizes)


def test_what_is_prepared_must_be_callable():
    with pytest.raises(TypeError, match="for size 1; it must return what is timed"):
        scaling(lambda n: torch.ones(n), [1, 2, 3, 4, 5], rounds=FEWEST_ROUNDS)


def test_sizes_are_timed_and_the_record_is_whole(monkeypatch, tmp_path):
    monkeypatch.setattr(comparison, "sets_for", lambda *arguments, **options: 2)
    made, called = [], []

    def prepare(n):
        made.append(n)
        if n % 2:
            return lambda: called.append(n)
        return lambda x: called.append(len(x)), torch.ones(n)

    found = scaling(prepare, [5, 1, 2, 4, 3, 3], rounds=FEWEST_ROUNDS)
    assert made == [1, 2, 3, 4, 5]
    assert set(called) == {1, 2, 3, 4, 5}
    assert [point.size for point in found.points] == [1, 2, 3, 4, 5]
    assert found.name == "prepare"
    assert type(found).model_validate_json(found.to_json()) == found
    printed = str(found.table())
    assert found.growth.verdict in printed
