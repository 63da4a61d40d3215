"""How cost grows: laws are found in recorded times, and where the times do not tell them apart it says so."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kernel_pytorch.harness.clock.statistics import FEWEST_ROUNDS
from kernel_pytorch.harness.quick import fit_growth, growth, scaling, timed
from kernel_pytorch.harness.quick.growth import MODELS, Point, Scaling, curve, student_quantile
from kernel_pytorch.harness.results import IntervalRecord

SIZES = [2**k for k in range(4, 14)]
OVERHEAD = 3e-6
PLANTED = {
    "O(1)": lambda n: OVERHEAD,
    "O(n)": lambda n: OVERHEAD + 1e-8 * n,
    "O(n log n)": lambda n: OVERHEAD + 1e-8 * n * math.log2(n),
    "O(n^2)": lambda n: OVERHEAD + 1e-10 * n**2,
    "O(n^3)": lambda n: OVERHEAD + 1e-12 * n**3,
}


def times(law, noise=0.0, seed=0, sizes=SIZES):
    """Seconds that a law gives, with a relative error of that size."""
    generator = np.random.default_rng(seed)
    return [law(n) * math.exp(noise * generator.standard_normal()) for n in sizes]


@pytest.mark.parametrize("noise", [0.0, 0.03])
@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_law_is_found_beneath_overhead_and_noise(planted, noise):
    found = fit_growth(SIZES, times(PLANTED[planted], noise))
    assert (found.model, found.told_apart, found.candidates) == (planted, True, (planted,))
    assert found.verdict.startswith(f"{planted}, off by ")
    assert found.fits[0].error < 0.06
    assert {fit.model for fit in found.fits} == set(MODELS)
    predicted = curve(found.fits[0], SIZES)
    assert predicted == pytest.approx(times(PLANTED[planted]), rel=0.15)


@pytest.mark.parametrize("power", [1, 2, 3])
def test_the_interval_of_the_slope_holds_the_power(power):
    missed = 0
    for seed in range(100):
        slope = fit_growth(SIZES, times(lambda n: 1e-9 * n**power, 0.1, seed)).slope
        assert slope.low < slope.median < slope.high
        missed += not slope.low <= power <= slope.high
    assert missed <= 5  # 1 in 100 is meant to miss


FEW = [64 * 2**k for k in range(6)]


@pytest.mark.parametrize("planted", [lambda n: n, lambda n: n * math.log2(n), lambda n: n + 1000])
def test_a_law_is_seldom_claimed_wrongly(planted):
    """Few sizes, much noise: then most often nothing is claimed."""
    name = "O(n log n)" if planted(2) == 2 and planted(4) == 8 else "O(n)"
    claims = [fit_growth(FEW, times(planted, 0.2, seed, FEW)) for seed in range(100)]
    claims = [claim for claim in claims if claim.told_apart and claim.fits[0].error <= growth.POOR]
    assert sum(claim.model != name for claim in claims) <= 2
    assert len(claims) < 50


def test_a_criterion_that_claims_at_once_claims_wrongly(monkeypatch):
    monkeypatch.setattr(growth, "CLEAR", 1e-9)
    with pytest.raises(AssertionError):
        test_a_law_is_seldom_claimed_wrongly(lambda n: n + 1000)


def test_laws_that_noise_hides_are_not_told_apart():
    found = fit_growth(FEW, times(lambda n: n, 0.2, 1, FEW))
    assert not found.told_apart
    assert {"O(n)", "O(n log n)"} <= set(found.candidates)
    assert found.verdict.startswith("the times do not tell ")


def test_sizes_that_lie_near_each_other_tell_nothing():
    sizes = [100, 120, 140, 160, 180]
    found = fit_growth(sizes, times(lambda n: n, 0.0, sizes=sizes))
    assert not found.told_apart
    assert found.verdict.startswith("sizes that span a factor of 1.8 tell no laws apart")


def test_times_that_follow_no_law_are_told_so():
    found = fit_growth(SIZES, [1.0, 50.0, 2.0, 80.0, 1.0, 60.0, 3.0, 90.0, 1.0, 70.0])
    assert found.verdict.startswith("no law describes these times: ")


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 63.657), (2, 9.925), (3, 5.841), (4, 4.604), (10, 3.169), (30, 2.750)]
)
def test_quantiles_are_those_of_the_tables(freedom, quantile):
    assert student_quantile(0.995, freedom) == pytest.approx(quantile, abs=1e-3)


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


def test_times_that_are_none_are_refused():
    with pytest.raises(ValueError, match="there must be one above 0 for each of 5 sizes"):
        fit_growth([1, 2, 3, 4, 5], [1.0, 1.0, 0.0, 1.0, 1.0])


def test_what_is_prepared_must_be_callable():
    with pytest.raises(TypeError, match="returned Tensor for size 1; it must return what is timed: a function"):
        scaling(lambda n: torch.ones(n), [1, 2, 3, 4, 5], rounds=FEWEST_ROUNDS)


def test_sizes_are_timed_and_the_record_is_whole(monkeypatch, tmp_path):
    monkeypatch.setattr(timed, "sets_for", lambda *arguments, **options: 2)
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
    assert "slope " in printed
    assert found.growth.model in printed


def test_a_recorded_scaling_is_drawn(tmp_path):
    pytest.importorskip("matplotlib", reason="plots need matplotlib")
    seconds = times(PLANTED["O(n^2)"])
    points = [
        Point(size=n, seconds=IntervalRecord(median=t, low=0.9 * t, high=1.2 * t), method="recorded")
        for n, t in zip(SIZES, seconds, strict=True)
    ]
    record = Scaling(name="costs $5", device="none", points=tuple(points), growth=fit_growth(SIZES, seconds))
    for suffix, begin in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        assert record.plot(tmp_path / "new" / f"scaling{suffix}").read_bytes().startswith(begin)
