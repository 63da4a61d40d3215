"""Timing that can be trusted: cold inputs, interleaved rounds, medians of paired ratios with an interval."""

from __future__ import annotations

from kernel_pytorch.harness.clock.cuda import on_clock_stream
from kernel_pytorch.harness.clock.interleave import measure
from kernel_pytorch.harness.clock.sampling import Subject, Timing, cold_pool_bytes, last_level_cache_bytes, sets_needed
from kernel_pytorch.harness.clock.statistics import (
    Comparison,
    Interval,
    Verdict,
    compare_intervals,
    compare_paired,
    median_interval,
)

__all__ = [
    "Comparison",
    "Interval",
    "Subject",
    "Timing",
    "Verdict",
    "cold_pool_bytes",
    "compare_intervals",
    "compare_paired",
    "last_level_cache_bytes",
    "measure",
    "median_interval",
    "on_clock_stream",
    "sets_needed",
]
