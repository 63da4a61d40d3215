"""The verdicts, on seeded synthetic times whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest

from kernel_pytorch.harness.clock import Verdict, compare_paired, median_interval
from kernel_pytorch.harness.clock.statistics import FEWEST_ROUNDS

ROUNDS = 100


def noisy(generator: np.random.Generator, seconds: float = 1e-3, rounds: int = ROUNDS) -> np.ndarray:
    """Times with 1.5 % of noise and a rare long interruption."""
    times = seconds * generator.lognormal(0.0, 0.015, rounds)
    times[generator.random(rounds) < 0.05] *= 5.0
    return times


@pytest.mark.parametrize("seed", range(10))
def test_two_draws_of_one_distribution_are_the_same(seed: int) -> None:
    generator = np.random.default_rng(seed)
    comparison = compare_paired(noisy(generator), noisy(generator))
    assert comparison.verdict is Verdict.SAME
    assert comparison.speedup.low < 1.0 < comparison.speedup.high


@pytest.mark.parametrize("seed", range(10))
def test_ten_percent_is_seen_in_both_directions(seed: int) -> None:
    generator = np.random.default_rng(seed)
    fast, slow = noisy(generator), noisy(generator, 1.1e-3)
    assert compare_paired(fast, slow).verdict is Verdict.SLOWER
    assert compare_paired(slow, fast).verdict is Verdict.FASTER


def test_exchanging_the_arguments_inverts_the_speedup() -> None:
    generator = np.random.default_rng(0)
    one, other = noisy(generator), noisy(generator, 1.3e-3)
    there, back = compare_paired(one, other).speedup, compare_paired(other, one).speedup
    assert (there.median, there.low, there.high) == pytest.approx((1 / back.median, 1 / back.high, 1 / back.low))


def test_drift_that_both_share_cancels() -> None:
    generator = np.random.default_rng(0)
    drift = np.linspace(1.0, 3.0, ROUNDS)
    assert compare_paired(drift * noisy(generator), drift * noisy(generator)).verdict is Verdict.SAME


@pytest.mark.parametrize("tail", ["student-t", "spikes"])
def test_heavy_tails_never_give_a_false_faster(tail: str) -> None:
    generator = np.random.default_rng(0)

    def draw() -> np.ndarray:
        if tail == "student-t":
            return 1e-3 * np.exp(0.03 * generator.standard_t(2.0, ROUNDS))
        times = 1e-3 * generator.lognormal(0.0, 0.05, ROUNDS)
        spikes = 1.0 + generator.lognormal(1.0, 1.0, ROUNDS)
        return np.where(generator.random(ROUNDS) < 0.2, times * spikes, times)

    verdicts = [compare_paired(draw(), draw(), seed=number).verdict for number in range(200)]
    assert Verdict.FASTER not in verdicts
    assert Verdict.SLOWER not in verdicts


def test_noise_wider_than_the_band_is_unsure() -> None:
    generator = np.random.default_rng(1)
    wild = [generator.lognormal(0.0, 0.5, FEWEST_ROUNDS) for _ in range(2)]
    assert compare_paired(*wild).verdict is Verdict.UNSURE


def test_a_difference_inside_the_band_is_the_same() -> None:
    assert compare_paired([1.01] * 8, [1.0] * 8).verdict is Verdict.SAME
    assert compare_paired([1.01] * 8, [1.0] * 8, band=0.005).verdict is Verdict.FASTER


@pytest.mark.parametrize("rounds", [8, 9, 30])
def test_the_interval_misses_the_true_median_no_more_often_than_it_says(rounds: int) -> None:
    generator = np.random.default_rng(0)
    intervals = [median_interval(generator.standard_t(2.0, rounds), resamples=300) for _ in range(1000)]
    missed = np.mean([not interval.low <= 0.0 <= interval.high for interval in intervals])
    assert missed <= 0.01 + 2 * (0.01 / 1000) ** 0.5


def test_the_interval_is_not_wider_than_needed() -> None:
    generator = np.random.default_rng(0)
    intervals = [median_interval(generator.lognormal(0.0, 0.3, ROUNDS), confidence=0.9) for _ in range(300)]
    assert np.mean([interval.low <= 1.0 <= interval.high for interval in intervals]) <= 0.96
    assert median_interval(generator.lognormal(0.0, 0.3, 3000)).high < 1.03


def test_the_interval_is_reproducible() -> None:
    generator = np.random.default_rng(0)
    draws = [noisy(generator) for _ in range(50)]
    assert [median_interval(samples) for samples in draws] == [median_interval(samples) for samples in draws]


def test_the_interval_holds_the_median_and_grows_with_the_confidence() -> None:
    samples = noisy(np.random.default_rng(0))
    interval = median_interval(samples)
    assert interval.median == np.median(samples)
    assert interval.low < interval.median < interval.high
    wider = median_interval(samples, confidence=0.999)
    assert wider.high - wider.low > interval.high - interval.low


GOOD = [1.0] * FEWEST_ROUNDS


@pytest.mark.parametrize(
    ("baseline", "candidate", "named"),
    [
        (GOOD, [*GOOD, 1.0], "candidate has 9"),
        ([], [], "baseline has shape"),
        (GOOD, [*GOOD[1:], float("nan")], "candidate holds nan"),
        ([*GOOD[1:], float("inf")], GOOD, "baseline holds inf"),
        ([*GOOD[1:], 0.0], GOOD, "baseline holds 0.0"),
        (GOOD, [*GOOD[1:], -1.0], "candidate holds -1.0"),
        (GOOD[1:], GOOD[1:], "baseline has 7 rounds"),
        ([GOOD], [GOOD], "baseline has shape"),
    ],
)
def test_bad_samples_are_named(baseline: list, candidate: list, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        compare_paired(baseline, candidate)


@pytest.mark.parametrize(
    "option", [{"confidence": 0.0}, {"confidence": 1.0}, {"resamples": 0}, {"band": 0.0}, {"band": float("nan")}]
)
def test_bad_options_are_named(option: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(option))):
        compare_paired(GOOD, GOOD, **option)
