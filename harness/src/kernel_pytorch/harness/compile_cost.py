"""What a user pays before and around the kernel: seconds of the first call, microseconds of host time of every call."""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernel_pytorch.harness.clock.capture import captured, waiting_is_an_error
from kernel_pytorch.harness.discovery import discover
from kernel_pytorch.harness.isolation import Announce, Worker, set_environment
from kernel_pytorch.harness.oracle import random_like, run
from kernel_pytorch.harness.scratch import scratch_folder
from kernel_pytorch.harness.technique import Case, Operation

CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
TIMEOUT = 300.0


@dataclass(frozen=True)
class CompileCost:
    """Seconds that the first call takes longer than the second one, forward and backward, in a fresh process.

    Attributes:
        cold: with empty caches on disk, as on a machine that never ran it.
        warm: with the caches that the cold run left.
        failure: why there is no figure, empty if there is.
    """

    cold: float | None
    warm: float | None
    failure: str = ""


@dataclass(frozen=True)
class HostTime:
    """Seconds of host time per call, launches only: the device is not waited for.

    Attributes:
        eager: called from Python.
        compiled: called from a function under `torch.compile(fullgraph=True)`; None where that cannot be.
        graph: replay of a CUDA graph that holds the call; None without CUDA.
    """

    eager: float
    compiled: float | None
    graph: float | None


def compile_cost(technique: str, operation: str, implementation: str, case: Case, device: torch.device) -> CompileCost:
    """Measure the first call twice, each time in a process of its own: with empty caches, and with those it left."""
    seconds: list[float] = []
    with scratch_folder() as folder:
        prepare = functools.partial(set_environment, dict.fromkeys(CACHES, folder))
        for _ in ("cold", "warm"):
            with Worker(TIMEOUT, prepare) as worker:
                outcome = worker.call(_first_call, technique, operation, implementation, case, str(device))
            if outcome.failure:
                return CompileCost(None, None, outcome.failure)
            seconds.append(outcome.value)
    cold, warm = seconds
    return CompileCost(cold, warm)


def host_time(operation: Operation, implementation: str, case: Case, device: torch.device) -> HostTime:
    """Measure the host's share of a call on a case that is small enough for the device to be faster.

    On a CPU there is no device to launch on: the figures are those of the whole call.
    """
    chosen = operation.implementation(implementation)
    arguments = operation.arguments(case, torch.Generator(device).manual_seed(0))
    function, call = chosen.load(), chosen.call(arguments)
    torch._dynamo.reset()
    compiled: float | None = None
    with contextlib.suppress(Exception):  # TorchScript functions, and whatever else cannot be traced as one graph
        traced = torch.compile(lambda *a: function(*a), fullgraph=True)
        compiled = _seconds_per_call(lambda: traced(*arguments), device)
    graph = None
    if device.type == "cuda":
        with contextlib.suppress(RuntimeError):  # what waits for the device cannot be captured
            graph = _seconds_per_call(_captured(call), device)
    return HostTime(_seconds_per_call(call, device), compiled, graph)


def _seconds_per_call(call: Callable[[], object], device: torch.device, calls: int = 50, rounds: int = 15) -> float:
    """The median of a few rounds; the queue is emptied between them, so that it never fills up and blocks the host."""
    samples = []
    with torch.no_grad():
        for _ in range(5):
            call()
        for _ in range(rounds):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            begin = time.perf_counter()
            for _ in range(calls):
                call()
            samples.append((time.perf_counter() - begin) / calls)
    return statistics.median(samples)


def _captured(call: Callable[[], object]) -> Callable[[], object]:
    stream = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        call()
        with waiting_is_an_error():
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with captured(graph, stream):
            call()
    return graph.replay


def _first_call(
    technique: str, operation_name: str, implementation: str, case: Case, device: str, announce: Announce
) -> float:
    """In the child: seconds of the first forward and any backward beyond those of the second."""
    operation = discover().get(technique).operation(operation_name)
    function, names = operation.implementation(implementation).load(), operation.signature()
    generator = torch.Generator(device).manual_seed(0)
    arguments = operation.arguments(case, generator)
    incoming = []
    if operation.differentiable:
        incoming = random_like(run(operation.reference.load(), names, arguments).outputs, generator)
    seconds = []
    for turn in ("first call", "second call"):
        announce(turn)
        begin = time.perf_counter()
        run(function, names, arguments, incoming)
        if torch.device(device).type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return max(0.0, seconds[0] - seconds[1])
