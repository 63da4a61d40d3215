"""Device time on an NVIDIA GPU, by CUDA events on the clock's stream.

It neither reads nor changes settings of the card, such as clocks and power limit.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kernel_pytorch.harness.clock.sampling import (
    SHORTEST_SAMPLE,
    Sampler,
    Subject,
    calibrate,
    calls_per_sample,
    garbage_collection_paused,
)

EVENTS = "CUDA events, cold L2"
GRAPH = "CUDA graph, cold L2"

SHORT_CALL = 100e-6
"""Seconds. Below this the gaps between launches from Python are a visible part of the time between two events."""

LONGEST_CAPTURED_PASS = 0.5
"""Seconds. More than `LONGEST_PASS`, because it is the time of calls from Python: the host may need 400 microseconds
for work that takes the GPU five, and a pool of small tensors has 256 sets."""

MOST_CALLS_PER_GRAPH = 512
"""With so many calls the launch of the graph does not matter; a graph of many thousand nodes is slow to build."""


def clock_stream(device: torch.device | str) -> torch.cuda.Stream:
    """Return the stream for warm-up, capture and timing: one per device.

    The backward of an autograd graph runs on the stream that its forward ran on, so a backward is only capturable if
    its forward ran on this stream: build such graphs inside `on_clock_stream`.
    """
    device = torch.device(device)
    return _stream_of(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _stream_of(index: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device=index)


@contextlib.contextmanager
def on_clock_stream(device: torch.device | str) -> Iterator[None]:
    """Run the body on the clock's stream, ordered after and before the work of the current one. No effect on a CPU."""
    device = torch.device(device)
    if device.type != "cuda":
        yield
        return
    stream = clock_stream(device)
    surrounding = torch.cuda.current_stream(stream.device)
    stream.wait_stream(surrounding)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        surrounding.wait_stream(stream)


class CudaSampler(Sampler):
    """Times a subject on the GPU: short calls inside a CUDA graph, long ones between two events.

    Before each sample the same work is started once unmeasured. While the GPU is busy with it the host queues the
    measured part, so no launch delay falls between the events, and caches and clocks are in the state that they keep.
    """

    method = EVENTS

    def __init__(self, subject: Subject, device: torch.device) -> None:
        super().__init__(subject, device)
        self._stream = clock_stream(device)
        self._begin = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)
        self._seconds_per_call = 0.0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._replays = 1

    def warm_up(self) -> bool:
        """Call the subject on every set, on the clock's stream, as capture requires.

        Returns:
            True if a call is shorter than `SHORT_CALL`, or if the host needs most of its time to launch it: then the
            GPU waits for the host, and only a graph shows what the GPU itself takes.
        """
        with on_clock_stream(self.device):
            super().warm_up()
            self._stream.synchronize()
            self._seconds_per_call = calibrate(lambda calls: self._elapsed(0, calls))
            calls = min(self.subject.sets, 16)
            begin = time.perf_counter()
            self.run(self.order(0, calls))
            seconds_on_host = (time.perf_counter() - begin) / calls
            self._stream.synchronize()
        return self._seconds_per_call < SHORT_CALL or seconds_on_host > 0.5 * self._seconds_per_call

    def prepare(self, *, short: bool) -> None:
        """Capture the calls into a graph if `short`; otherwise, or where that fails, fix the size of a batch.

        A call that cannot be captured is timed by events, with the gaps between launches, which its users have too.
        """
        with on_clock_stream(self.device):
            if short and self._seconds_per_call * self.subject.sets > LONGEST_CAPTURED_PASS:
                self.method = f"{EVENTS} (not captured: a pass from Python takes more than {LONGEST_CAPTURED_PASS} s)"
            elif short:
                try:
                    self._capture()
                except RuntimeError as error:
                    self.method = f"{EVENTS} (not capturable: {_reason(error)})"
            if self._graph is None:
                self.calls_per_sample = calls_per_sample(self._seconds_per_call, self.subject.sets)

    def sample(self, start: int) -> float:
        """Seconds per call, from set `start` on; a graph always visits every set from the first one on."""
        with on_clock_stream(self.device), garbage_collection_paused():
            if self._graph is not None:
                self._graph.replay()
                replay = functools.partial(_repeat, self._graph.replay, self._replays)
                return self._between_events(replay) / self.calls_per_sample
            self.run(self.order(start - 1, 1))
            return super().sample(start)

    def _elapsed(self, start: int, calls: int) -> float:
        order = self.order(start, calls)
        return self._between_events(lambda: self.run(order))

    def _between_events(self, work: Callable[[], None]) -> float:
        """Seconds that the GPU spends between two events around `work`."""
        self._begin.record(self._stream)
        work()
        self._end.record(self._stream)
        self._end.synchronize()
        return float(self._begin.elapsed_time(self._end)) * 1e-3

    def _capture(self) -> None:
        """Capture passes over all sets. RuntimeError: an operation in the subject cannot be captured."""
        sets = self.subject.sets
        self.release()
        with waiting_is_an_error():
            self.subject.run(0)
        self._stream.synchronize()
        passes = math.ceil(SHORTEST_SAMPLE / (self._seconds_per_call * sets))
        passes = max(1, min(passes, MOST_CALLS_PER_GRAPH // sets))
        graph = torch.cuda.CUDAGraph()
        outputs: list[object] = [None] * sets
        with garbage_collection_paused(), captured(graph, self._stream):
            for _ in range(passes):
                for index in range(sets):
                    outputs[index] = self.subject.run(index)
        graph.replay()
        seconds = calibrate(lambda replays: self._between_events(lambda: _repeat(graph.replay, replays)))
        self._replays = math.ceil(SHORTEST_SAMPLE / seconds)
        self.calls_per_sample = self._replays * passes * sets
        self._graph, self.method = graph, GRAPH


def _repeat(function: Callable[[], object], times: int) -> None:
    for _ in range(times):
        function()


def _reason(error: BaseException) -> str:
    """First line of what went wrong first: closing a broken capture raises a second, vaguer error."""
    while error.__context__ is not None:
        error = error.__context__
    return (str(error) or type(error).__name__).splitlines()[0]


@contextlib.contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Make torch raise RuntimeError where an operation would wait for the GPU: the usual reason of failed captures.

    Call a function inside it before capturing it, so that no capture begins that has to fail.
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # torch announces, once per process, that this mode does not find every wait.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def graph_of(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Capture a call on the current device, after three that compile and allocate; the graph and what it returned.

    Raises:
        RuntimeError: it cannot be captured, because it waits for the GPU for example.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
        with waiting_is_an_error():
            call()
        graph = torch.cuda.CUDAGraph()
        # torch.compile frees all workspaces of cuBLAS when it records a graph: this one gets its own.
        torch._C._cuda_clearCublasWorkspaces()
        with captured(graph, stream):
            result = call()
    torch.cuda.current_stream().wait_stream(stream)
    return graph, result


@contextlib.contextmanager
def captured(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> Iterator[None]:
    """Capture like `torch.cuda.graph`, and restore the random generator if that fails.

    A capture that fails leaves torch's generator of the device in capture mode, and every random number of the process
    is an error from then on. A copy of its state is not in that mode.
    """
    try:
        with torch.cuda.graph(graph, stream=stream):
            yield
    except BaseException:
        generator = torch.cuda.default_generators[stream.device.index]
        generator.graphsafe_set_state(generator.clone_state())
        raise
