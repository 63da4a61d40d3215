"""Shares of a made-up machine whose limits are round numbers."""

from __future__ import annotations

import itertools

import pytest

from kernel_pytorch.harness.machine import Attained, BandwidthPoint, Ceilings, attain, ceiling_for, faster_than_physics

MIB = 2**20


def point(mib: float, rate: float, memory: str = "cache") -> BandwidthPoint:
    return BandwidthPoint(bytes=int(mib * MIB), bytes_per_second=rate, peak_bytes_per_second=1.5 * rate, memory=memory)


CEILINGS = Ceilings(
    # The smallest copy is held up by its launch, as on every real machine.
    bandwidth=(point(1, 50e9), point(8, 200e9), point(32, 100e9), point(128, 40e9, "DRAM"), point(512, 38e9, "DRAM")),
    matmul_flops_per_second={"float32": 200e9},
    launch_overhead_seconds=1e-6,
)


@pytest.mark.parametrize(
    ("mib", "rate", "memory"),
    [
        (0.01, 200e9, "cache"),
        (1, 200e9, "cache"),
        (8, 200e9, "cache"),
        (16, (200e9 * 100e9) ** 0.5, "cache"),
        (32, 100e9, "cache"),
        (64, (100e9 * 40e9) ** 0.5, "DRAM"),
        (128, 40e9, "DRAM"),
        (4096, 38e9, "DRAM"),
    ],
)
def test_the_ceiling_is_that_of_the_memory_that_holds_the_pool(mib: float, rate: float, memory: str) -> None:
    found = ceiling_for(CEILINGS, int(mib * MIB))
    assert found.bytes_per_second == pytest.approx(rate)
    assert found.peak_bytes_per_second == pytest.approx(1.5 * rate)
    assert found.memory == memory


def test_the_ceiling_never_rises_with_the_pool_and_ignores_the_order_of_points() -> None:
    pools = range(1024, 600 * MIB, 997 * 1024)
    rates = [ceiling_for(CEILINGS, pool).bytes_per_second for pool in pools]
    assert all(larger <= smaller * (1 + 1e-9) for smaller, larger in itertools.pairwise(rates))
    reversed_points = CEILINGS.model_copy(update={"bandwidth": CEILINGS.bandwidth[::-1]})
    assert rates == [ceiling_for(reversed_points, pool).bytes_per_second for pool in pools]


def test_a_machine_without_points_is_named() -> None:
    with pytest.raises(ValueError, match="bandwidth is empty"):
        ceiling_for(CEILINGS.model_copy(update={"bandwidth": ()}), 1)


def attained(cost_bytes: int, flops: int, seconds: float, dtype_name: str = "float32") -> Attained:
    return attain(cost_bytes, flops, seconds, CEILINGS, 128 * MIB, dtype_name)


def test_shares_are_rates_over_limits() -> None:
    found = attained(20 * 10**9, 50 * 10**9, 1.0)
    assert found.bytes_per_second == 20e9
    assert found.flops_per_second == 50e9
    assert found.share_of_copy == pytest.approx(0.5)
    assert found.share_of_peak == pytest.approx(1 / 3)
    assert found.share_of_matmul == pytest.approx(0.25)
    assert found.bound == "memory"


def test_the_bound_is_the_limit_that_is_nearer() -> None:
    assert attained(10**9, 50 * 10**9, 1.0).bound == "compute"
    assert attained(10**9, 0, 1.0).bound == "memory"
    unmeasured = attained(10**9, 50 * 10**9, 1.0, "float64")
    assert unmeasured.share_of_matmul is None
    assert unmeasured.bound == "memory"


@pytest.mark.parametrize(
    ("cost_bytes", "flops", "seconds", "named"),
    [(1, 1, 0.0, "seconds"), (1, 1, float("nan"), "seconds"), (-1, 1, 1.0, "cost_bytes"), (1, -1, 1.0, "flops")],
)
def test_bad_figures_are_named(cost_bytes: int, flops: int, seconds: float, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        attained(cost_bytes, flops, seconds)


def test_only_what_exceeds_the_fastest_stream_is_impossible() -> None:
    assert faster_than_physics(attained(39 * 10**9, 199 * 10**9, 1.0)) is None
    # A read-mostly or in-place stream: faster than the copy, within the peak of 60 GB/s.
    assert faster_than_physics(attained(59 * 10**9, 0, 1.0)) is None
    assert faster_than_physics(attained(65 * 10**9, 0, 1.0)) is None
    reason = faster_than_physics(attained(67 * 10**9, 0, 1.0))
    assert reason is not None
    assert "67.0 GB/s is 1.12 times the fastest stream" in reason
    assert faster_than_physics(attained(67 * 10**9, 0, 1.0), tolerance=0.2) is None
    reason = faster_than_physics(attained(0, 230 * 10**9, 1.0))
    assert reason is not None
    assert reason.startswith("arithmetic")
    assert faster_than_physics(attained(0, 230 * 10**9, 1.0, "float64")) is None
