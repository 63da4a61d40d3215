"""Readings of the machine while it measures: clock, power, throttling, load. They are read, never set.

A card that heats up slows down, and another process may take a core. Interleaving keeps that out of ratios; readings
make it visible: the user is warned of a busy machine, `watching` collects readings while the body runs, and `marked`
says during which samples the clock changed.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

CLOCK_TOLERANCE = 0.02
"""Relative change of the clock within one sample above which the sample is marked."""

CPU_FREQUENCY = Path("/sys/devices/system/cpu")

# Bits of NVML's nvmlClocksEventReasons; "idle" and "applications clocks setting" slow nothing down.
THROTTLE_REASONS = {
    0x0004: "power cap",
    0x0008: "hardware slowdown",
    0x0010: "sync boost",
    0x0020: "thermal slowdown (software)",
    0x0040: "thermal slowdown (hardware)",
    0x0080: "power brake",
}


@dataclass(frozen=True)
class Reading:
    """One reading of the machine.

    Attributes:
        seconds: `time.perf_counter()` at the time.
        clock_hz: of the multiprocessors, or the mean of the cores that this process may use; None if unknown.
        power_watts: None if unknown.
        throttled: why the clock is held down; empty if it is not.
        load: runnable processes per core; None on a GPU.
    """

    seconds: float
    clock_hz: float | None = None
    power_watts: float | None = None
    throttled: tuple[str, ...] = ()
    load: float | None = None


class Reader:
    """Reads nothing but the time: a GPU's clock is unknown without nvidia-ml-py. Others read more.

    Attributes:
        interval: seconds between two readings.
    """

    interval = 1.0

    def read(self) -> Reading:
        """Read once."""
        return Reading(time.perf_counter())


@dataclass(frozen=True)
class Trace:
    """Readings in the order of time."""

    readings: tuple[Reading, ...]

    def moved(self, begin: float, end: float, tolerance: float = CLOCK_TOLERANCE) -> bool:
        """Whether the clock changed by more than `tolerance` between the readings around `[begin, end]`."""
        times = [r.seconds for r in self.readings]
        first = max(0, bisect.bisect_right(times, begin) - 1)
        last = bisect.bisect_left(times, end)
        clocks = [r.clock_hz for r in self.readings[first : last + 1] if r.clock_hz is not None]
        return bool(clocks) and max(clocks) - min(clocks) > tolerance * statistics.median(clocks)

    def throttle_reasons(self) -> tuple[str, ...]:
        """Every reason that any reading gave."""
        return tuple(dict.fromkeys(reason for r in self.readings for reason in r.throttled))

    def range_of(self, name: str) -> tuple[float, float, float] | None:
        """Smallest, median and largest value of a field of `Reading`; None if it is unknown."""
        values = [v for r in self.readings if (v := getattr(r, name)) is not None]
        return (min(values), statistics.median(values), max(values)) if values else None


@contextlib.contextmanager
def watching(reader: Reader) -> Iterator[list[Reading]]:
    """Collect readings in a thread while the body runs; the last one is made after it."""
    readings: list[Reading] = [reader.read()]
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(reader.interval):
            readings.append(reader.read())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield readings
    finally:
        stop.set()
        thread.join()
        readings.append(reader.read())


def reader_for(device: torch.device) -> Reader:
    """Return the reader of a device: NVML for a GPU if nvidia-ml-py is installed, the operating system for a CPU."""
    if device.type != "cuda":
        return CpuReader()
    try:
        return NvmlReader(device)
    except ImportError:
        return Reader()


class CpuReader(Reader):
    """Load and, where the system tells it, the frequency of the cores that this process may use."""

    interval = 0.1

    def __init__(self, root: Path = CPU_FREQUENCY) -> None:
        cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
        files = [root / f"cpu{core}" / "cpufreq" / "scaling_cur_freq" for core in cores]
        self._files = [file for file in files if file.is_file()]
        self._cores = len(list(cores))

    def read(self) -> Reading:
        """Read from the operating system."""
        frequencies = [1e3 * int(file.read_text()) for file in self._files]
        load = os.getloadavg()[0] / self._cores if hasattr(os, "getloadavg") else None
        return Reading(time.perf_counter(), statistics.mean(frequencies) if frequencies else None, load=load)


class NvmlReader(Reader):
    """SM clock, power and throttle reasons of a GPU, through nvidia-ml-py.

    Raises:
        ImportError: nvidia-ml-py is not installed.
    """

    interval = 0.005

    def __init__(self, device: torch.device) -> None:
        import pynvml

        self._nvml: Any = pynvml
        pynvml.nvmlInit()
        # CUDA_VISIBLE_DEVICES renumbers devices; the UUID does not change.
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)

    def read(self) -> Reading:
        """Read from the driver."""
        nvml, handle = self._nvml, self._handle
        bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        return Reading(
            time.perf_counter(),
            clock_hz=1e6 * nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            power_watts=1e-3 * nvml.nvmlDeviceGetPowerUsage(handle),
            throttled=throttle_names(bits),
        )


def throttle_names(bits: int) -> tuple[str, ...]:
    """The reasons in NVML's bit field that slow the clock down."""
    return tuple(name for bit, name in THROTTLE_REASONS.items() if bits & bit)


def marked(trace: Trace, spans: Sequence[tuple[float, float]]) -> tuple[bool, ...]:
    """For each sample, between two times, whether the clock changed during it."""
    return tuple(trace.moved(begin, end) for begin, end in spans)
