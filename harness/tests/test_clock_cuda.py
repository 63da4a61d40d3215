"""The CUDA sampler: its logic against a fake device, and the real one where there is a GPU."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from kernel_pytorch.harness.clock import Subject, measure, on_clock_stream
from kernel_pytorch.harness.clock import cuda as cuda_clock
from kernel_pytorch.harness.clock.cuda import CudaSampler
from kernel_pytorch.harness.clock.sampling import SHORTEST_SAMPLE
from kernel_pytorch.harness.clock.statistics import Verdict, compare_paired

CUDA = torch.device("cuda", 0)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class FakeCuda:
    """As much of `torch.cuda` as the sampler uses: a device clock, one capture at a time, no parallelism."""

    def __init__(self) -> None:
        self.device_seconds = 0.0
        self.host_seconds = 0.0
        self.capturing: list[float] | None = None
        self.sync_debug_mode = 0
        self.launches: list[int] = []
        self.broken = False
        self.surrounding = SimpleNamespace(device=CUDA, wait_stream=lambda other: None)
        self.current = self.surrounding
        fake = self

        class Stream:
            device = CUDA

            def __init__(self, device: int) -> None: ...

            def wait_stream(self, other: object) -> None: ...

            def synchronize(self) -> None:
                assert fake.capturing is None

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, stream: object) -> None:
                self.seconds = fake.device_seconds

            def synchronize(self) -> None: ...

            def elapsed_time(self, end: Event) -> float:
                return (end.seconds - self.seconds) * 1e3

        class CUDAGraph:
            nodes: list[float]

            def replay(self) -> None:
                fake.device_seconds += sum(self.nodes)

        self.Stream, self.Event, self.CUDAGraph = Stream, Event, CUDAGraph
        self.generator_state = "capturing"
        set_state = functools.partial(setattr, self, "generator_state")
        self.default_generators = [SimpleNamespace(clone_state=lambda: "copied", graphsafe_set_state=set_state)]

    def launch(self, index: int, seconds: float, *, host: float = 1e-6, waits: bool = False) -> None:
        assert self.current is not self.surrounding, "work was launched outside the clock's stream"
        if waits and self.sync_debug_mode:
            raise RuntimeError("called a synchronizing CUDA operation")
        if self.capturing is not None:
            if self.broken:
                raise RuntimeError("operation not permitted when stream is capturing\nlong explanation")
            self.capturing.append(seconds)
            return
        self.launches.append(index)
        self.host_seconds += host
        # The gap between two launches from Python, which a graph does not have.
        self.device_seconds += max(seconds, host) + 5e-6

    def current_stream(self, device: object) -> object:
        return self.current

    def current_device(self) -> int:
        return 0

    @contextlib.contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def graph(self, graph: object, stream: object) -> Iterator[None]:
        assert stream is self.current
        self.capturing = graph.nodes = []
        try:
            yield
        finally:
            self.capturing = None
            if self.broken:
                raise RuntimeError("capture invalidated")

    def get_sync_debug_mode(self) -> int:
        return self.sync_debug_mode

    def set_sync_debug_mode(self, mode: int | str) -> None:
        self.sync_debug_mode = {"error": 2}.get(mode, mode)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    cuda_clock._stream_of.cache_clear()
    fake = FakeCuda()
    monkeypatch.setattr(cuda_clock, "torch", SimpleNamespace(cuda=fake, device=torch.device))
    monkeypatch.setattr(cuda_clock, "time", SimpleNamespace(perf_counter=lambda: fake.host_seconds))
    yield fake
    cuda_clock._stream_of.cache_clear()


def test_short_calls_are_replayed_from_a_graph_without_launch_gaps(fake: FakeCuda) -> None:
    sampler = CudaSampler(Subject("a", lambda index: fake.launch(index, 20e-6), 8, 1), CUDA)
    assert sampler.warm_up() is True
    assert set(fake.launches) == set(range(8))
    sampler.prepare(short=True)
    launches = len(fake.launches)
    assert sampler.sample(0) == pytest.approx(20e-6)
    assert len(fake.launches) == launches
    assert sampler.calls_per_sample % 8 == 0
    assert sampler.calls_per_sample * 20e-6 >= SHORTEST_SAMPLE
    assert sampler.method == "CUDA graph, cold L2"


def test_long_calls_are_timed_by_events_over_all_sets(fake: FakeCuda) -> None:
    sampler = CudaSampler(Subject("a", lambda index: fake.launch(index, 1e-3), 8, 1), CUDA)
    assert sampler.warm_up() is False
    sampler.prepare(short=False)
    fake.launches.clear()
    assert sampler.sample(0) == pytest.approx(1e-3 + 5e-6)
    # One unmeasured call on the set before keeps the GPU busy while the host queues the rest.
    assert fake.launches == [7, *range(8)]
    assert sampler.method == "CUDA events, cold L2"


def test_a_call_that_keeps_the_gpu_waiting_for_the_host_counts_as_short(fake: FakeCuda) -> None:
    sampler = CudaSampler(Subject("a", lambda index: fake.launch(index, 20e-6, host=300e-6), 8, 1), CUDA)
    assert sampler.warm_up() is True
    sampler.prepare(short=True)
    assert sampler.sample(0) == pytest.approx(20e-6)


def test_a_call_that_waits_is_found_before_any_capture(fake: FakeCuda) -> None:
    sampler = CudaSampler(Subject("a", lambda index: fake.launch(index, 20e-6, waits=True), 8, 1), CUDA)
    fake.graph = None
    assert sampler.warm_up() is True
    sampler.prepare(short=True)
    assert sampler.method == "CUDA events, cold L2 (not capturable: called a synchronizing CUDA operation)"
    assert sampler.sample(0) == pytest.approx(25e-6)
    assert fake.sync_debug_mode == 0


def test_a_failed_capture_falls_back_to_events_and_names_the_first_cause(fake: FakeCuda) -> None:
    fake.broken = True
    sampler = CudaSampler(Subject("a", lambda index: fake.launch(index, 20e-6), 8, 1), CUDA)
    sampler.warm_up()
    sampler.prepare(short=True)
    assert sampler.method.endswith("(not capturable: operation not permitted when stream is capturing)")
    assert sampler.sample(0) == pytest.approx(25e-6)
    assert sampler.calls_per_sample % 8 == 0
    assert gc.isenabled()
    assert fake.current is fake.surrounding
    assert fake.generator_state == "copied"


def test_a_pool_too_slow_for_one_graph_is_timed_by_events(fake: FakeCuda) -> None:
    sampler = CudaSampler(Subject("a", lambda index: fake.launch(index, 10e-3), 64, 1), CUDA)
    sampler.warm_up()
    sampler.prepare(short=True)
    assert sampler.method == "CUDA events, cold L2 (not captured: a pass from Python takes more than 0.5 s)"
    assert sampler.calls_per_sample == 10


@pytest.mark.gpu
@needs_gpu
def test_a_gpu_captures_forward_and_backward_and_reports_a_call_that_waits() -> None:
    data = [torch.randn(64, 64, device="cuda", requires_grad=True) for _ in range(4)]
    with on_clock_stream("cuda"):
        losses = [torch.nn.functional.gelu(tensor) for tensor in data]

    def backward(index: int) -> object:
        return torch.autograd.grad(losses[index], data[index], torch.ones_like(data[index]), retain_graph=True)

    timings = measure(
        [
            Subject("forward", lambda index: torch.nn.functional.gelu(data[index].detach()), 4, 32768),
            Subject("backward", backward, 4, 32768),
            Subject("waits", lambda index: data[index].detach().sum().item(), 4, 16384),
        ],
        "cuda",
        rounds=3,
    )
    assert timings["forward"].method == "CUDA graph, cold L2"
    assert timings["backward"].method == "CUDA graph, cold L2"
    assert "not capturable" in timings["waits"].method
    assert torch.randn(4, device="cuda").isfinite().all()


@pytest.mark.gpu
@needs_gpu
def test_a_graph_keeps_its_workspace_of_cublas() -> None:
    """`torch.compile` clears all of them when it records a graph; others then get the memory.

    With so few rows and columns cuBLAS divides the products among programs, and keeps their sums in a workspace.
    """
    a, b = (torch.randn(size, device="cuda", dtype=torch.bfloat16) for size in ((64, 65536), (65536, 64)))
    graph, y = cuda_clock.graph_of(lambda: a @ b)
    graph.replay()
    expected = y.clone()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    taken = [torch.full((1 << 20,), 7.0, device="cuda") for _ in range(64)]
    graph.replay()
    assert y.equal(expected)
    assert all(bool((each == 7.0).all()) for each in taken)


@pytest.mark.gpu
@needs_gpu
def test_the_clock_of_a_gpu_tells_the_same_from_ten_percent_more() -> None:
    inputs = [torch.randn(8 * 2**20, device="cuda") for _ in range(4)]
    # All subjects write to the same memory: where a buffer lies can change its time by two percent.
    outputs = [torch.empty_like(tensor) for tensor in inputs]

    def run(operations: int, index: int) -> None:
        for _ in range(operations):
            torch.sigmoid(inputs[index], out=outputs[index])

    work = {"baseline": 10, "the same": 10, "ten percent more": 11}
    subjects = [Subject(name, functools.partial(run, count), 4, 2 * inputs[0].nbytes) for name, count in work.items()]
    timings = measure(subjects, "cuda", rounds=100)
    samples = timings["baseline"].samples
    found = [compare_paired(samples, timings[name].samples).verdict for name in list(work)[1:]]
    assert found == [Verdict.SAME, Verdict.SLOWER]
