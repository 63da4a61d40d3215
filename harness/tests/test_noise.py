"""The watcher of clocks, against a recorded trace of a card that heats up."""

import time

import pytest

from kernel_pytorch.harness.noise import CpuReader, Reader, Reading, Trace, marked, throttle_names, watching

# A GPU under matrix products: 1980 MHz, then the power cap takes the clock down to 1590 MHz within 60 ms.
CLOCKS = [1980, 1980, 1980, 1980, 1950, 1845, 1740, 1635, 1590, 1590, 1590, 1590]
RECORDED = Trace(
    tuple(
        Reading(0.02 * i, 1e6 * clock, 480.0 + 20 * min(i, 11), ("power cap",) if i >= 4 else ())
        for i, clock in enumerate(CLOCKS)
    )
)


@pytest.mark.parametrize(
    ("begin", "end", "expected"),
    [
        (0.001, 0.005, False),
        (0.001, 0.055, False),
        (0.061, 0.075, False),  # 1980 to 1950: less than the tolerance of 2%
        (0.081, 0.095, True),
        (0.05, 0.19, True),
        (0.181, 0.21, False),
        (0.30, 0.40, False),  # after the last reading: nothing is known to have moved
    ],
)
def test_a_sample_is_marked_if_the_clock_moved_around_it(begin, end, expected):
    assert RECORDED.moved(begin, end) is expected


def test_samples_of_a_run_are_marked_one_by_one():
    spans = [(0.02 * i + 0.001, 0.02 * i + 0.015) for i in range(11)]
    assert marked(RECORDED, spans) == (False,) * 4 + (True,) * 4 + (False,) * 3


def test_what_the_trace_tells():
    assert RECORDED.throttle_reasons() == ("power cap",)
    assert RECORDED.range_of("clock_hz") == (1590e6, 1792.5e6, 1980e6)
    assert RECORDED.range_of("load") is None


def test_a_machine_that_tells_no_clock_marks_nothing():
    silent = Trace(tuple(Reading(float(i)) for i in range(5)))
    assert silent.moved(0.0, 5.0) is False


def test_throttle_bits():
    assert throttle_names(0x0001 | 0x0002) == ()  # idle, applications clocks: not throttled
    assert throttle_names(0x0004 | 0x0040) == ("power cap", "thermal slowdown (hardware)")


def test_readings_are_collected_while_the_body_runs():
    class Fast(Reader):
        interval = 0.001

    with watching(Fast()) as readings:
        time.sleep(0.05)
    assert len(readings) >= 3
    assert [r.seconds for r in readings] == sorted(r.seconds for r in readings)


def test_the_thread_ends_when_the_body_raises():
    with pytest.raises(ValueError, match="planted"), watching(Reader()) as readings:
        raise ValueError("planted")
    count = len(readings)
    time.sleep(0.01)
    assert len(readings) == count == 2


def test_cpu_frequency_is_the_mean_of_the_cores(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1}, raising=False)
    for core, kilohertz in ((0, 2_000_000), (1, 3_000_000)):
        file = tmp_path / f"cpu{core}" / "cpufreq" / "scaling_cur_freq"
        file.parent.mkdir(parents=True)
        file.write_text(f"{kilohertz}\n")
    reading = CpuReader(tmp_path).read()
    assert reading.clock_hz == 2.5e9
    assert reading.load is not None
