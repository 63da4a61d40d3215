"""Medians of noisy times with their intervals, and the comparison of two of them.

Times on a shared machine are skewed, have rare huge spikes and drift with clock speed and neighbours. The median
ignores the spikes; the ratio of two times taken in the same round cancels the drift; the bootstrap assumes no shape.
With a few dozen samples the bootstrap interval of a median is too narrow (tried: an interval of 99 % missed 2 to 3 % of
the time), so it is widened at least to the exact interval between two order statistics.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated

import numpy as np
from pydantic import BeforeValidator, ConfigDict, PlainSerializer

from kernel_pytorch.harness.records import Amount

FEWEST_ROUNDS = 8
"""The widest interval that n samples can give, smallest to largest, covers the median with probability 1 - 2 * 0.5**n:
99.2 % at 8, and less than 99 % below."""


@dataclass(frozen=True)
class Interval:
    """A median and the bootstrap interval around it, in the unit of the samples; records refuse negative ones."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    median: Amount
    low: Amount
    high: Amount


class Verdict(enum.Enum):
    """Result of the comparison of a candidate with its baseline."""

    FASTER = "faster"
    SLOWER = "slower"
    SAME = "no difference"
    UNSURE = "unsure"


_Named = Annotated[
    Verdict,
    BeforeValidator(lambda found: Verdict[found] if isinstance(found, str) and found in Verdict.__members__ else found),
    PlainSerializer(lambda verdict: verdict.name),
]
"""A verdict that records write by its name."""


@dataclass(frozen=True)
class Comparison:
    """Comparison of a candidate with its baseline.

    Attributes:
        speedup: baseline time over candidate time, without unit; above 1 the candidate is faster.
        verdict: follows from the interval of `speedup`.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    speedup: Interval
    verdict: _Named


def median_interval(
    samples: Sequence[float], *, confidence: float = 0.99, resamples: int = 2000, seed: int = 0
) -> Interval:
    """Return the median of `samples` and its percentile-bootstrap interval, widened to the exact one if that is wider.

    Args:
        samples: one figure per round, in any unit; a list, a tuple or a one-dimensional array.
        confidence: probability that the interval is meant to cover the true median with, between 0 and 1. The default
            needs `FEWEST_ROUNDS` samples.
        resamples: how many times the samples are drawn, with replacement.
        seed: of the draws, so that the same samples always give the same interval.

    Raises:
        ValueError: `samples` is empty or not finite, or `confidence` or `resamples` is out of range.
    """
    values = _checked("samples", samples)
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence is {confidence}; allowed is between 0 and 1, both excluded")
    if resamples < 1:
        raise ValueError(f"resamples is {resamples}; allowed is 1 or more")
    generator = np.random.default_rng(seed)
    medians = np.median(values[generator.integers(0, values.size, size=(resamples, values.size))], axis=1)
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(medians, [tail, 1.0 - tail])
    exact_low, exact_high = _order_statistics(values, tail)
    return Interval(float(np.median(values)), min(float(low), exact_low), max(float(high), exact_high))


def compare_paired(
    baseline: Sequence[float],
    candidate: Sequence[float],
    *,
    band: float = 0.02,
    confidence: float = 0.99,
    resamples: int = 2000,
    seed: int = 0,
) -> Comparison:
    """Compare two subjects that were timed side by side, round by round.

    The ratio is taken per round, so that disturbances of a round cancel. The interval is computed on logarithms, which
    makes the comparison symmetric: exchanging the arguments inverts the speedup and its interval.

    Args:
        baseline: seconds per call, one per round.
        candidate: seconds per call, in the same rounds.
        band: relative difference that does not matter; an interval inside it means "same".
        confidence: see `median_interval`.
        resamples: see `median_interval`.
        seed: see `median_interval`.

    Returns:
        FASTER if the whole interval lies above `1 + band`, SLOWER if it lies below `1 / (1 + band)`, SAME if it lies
        between the two, UNSURE if it crosses one of them.

    Raises:
        ValueError: lengths differ, there are fewer than `FEWEST_ROUNDS` rounds, or a time is not finite and positive.
    """
    before, after = _checked("baseline", baseline), _checked("candidate", candidate)
    if before.size != after.size:
        raise ValueError(
            f"candidate has {after.size} samples and baseline {before.size}; they are paired by round and must agree"
        )
    if before.size < FEWEST_ROUNDS:
        raise ValueError(
            f"baseline has {before.size} rounds; a {confidence:.0%} interval needs {FEWEST_ROUNDS} or more"
        )
    for name, values in (("baseline", before), ("candidate", after)):
        if not np.all(values > 0.0):
            raise ValueError(f"{name} holds {values.min()} seconds; every time must be above 0")
    if not band > 0.0:
        raise ValueError(f"band is {band}; allowed is above 0")
    logs = median_interval(np.log(before / after), confidence=confidence, resamples=resamples, seed=seed)
    speedup = Interval(*(float(np.exp(value)) for value in (logs.median, logs.low, logs.high)))
    return Comparison(speedup, _verdict(speedup, band))


def compare_intervals(baseline: Interval, candidate: Interval, *, band: float = 0.02) -> Comparison:
    """Compare two subjects that were timed apart, from their intervals alone.

    The speedup lies between the least and the most that the two intervals allow: wider than what paired rounds give,
    because nothing cancels.

    Args:
        baseline: median time and its interval, above 0.
        candidate: the same, in the same unit.
        band: as in `compare_paired`, also for the verdict.
    """
    if not (baseline.low > 0.0 and candidate.low > 0.0):
        raise ValueError(f"baseline and candidate must be above 0; their ends are {baseline.low} and {candidate.low}")
    speedup = Interval(baseline.median / candidate.median, baseline.low / candidate.high, baseline.high / candidate.low)
    return Comparison(speedup, _verdict(speedup, band))


def _order_statistics(values: np.ndarray, tail: float) -> tuple[float, float]:
    """The k-th smallest and the k-th largest sample, with k as large as `tail` allows, and at least 1.

    Each sample lies below the true median with probability one half, whatever the distribution. The k-th smallest is
    above the median if fewer than k samples are below it, which the binomial distribution gives the probability of.
    """
    count, rank = values.size, 0
    # In whole numbers, out of 2**count: as floats the coefficients of a thousand samples overflow.
    allowed = int(Fraction(tail) * 2**count)
    fewer_than_next_rank = 1
    while fewer_than_next_rank <= allowed:
        rank += 1
        fewer_than_next_rank += math.comb(count, rank)
    ordered = np.sort(values)
    index = max(rank - 1, 0)
    return float(ordered[index]), float(ordered[-1 - index])


def _verdict(speedup: Interval, band: float) -> Verdict:
    if speedup.low > 1.0 + band:
        return Verdict.FASTER
    if speedup.high < 1.0 / (1.0 + band):
        return Verdict.SLOWER
    if speedup.low >= 1.0 / (1.0 + band) and speedup.high <= 1.0 + band:
        return Verdict.SAME
    return Verdict.UNSURE


def _checked(name: str, samples: Sequence[float]) -> np.ndarray:
    values = np.asarray(samples, dtype=np.float64)
    if values.ndim != 1 or values.size == 0:
        raise ValueError(f"{name} has shape {values.shape}; it must be a sequence of at least one number")
    if not np.all(np.isfinite(values)):
        raise ValueError(f"{name} holds {values[~np.isfinite(values)][0]}; every sample must be finite")
    return values
