"""Costs beside the kernel's device time: seconds of the first call, and host time of every call."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernel_pytorch.harness.clock.capture import captured, waiting_is_an_error
from kernel_pytorch.harness.clock.wall import host_seconds, wait_for
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
    """Measure the host time of a call, on a case small enough for the device to be faster than the host.

    On a CPU there is no device to launch on: the figures are those of the whole call.
    """
    chosen = operation.implementation(implementation)
    arguments = operation.arguments(case, torch.Generator(device).manual_seed(0))
    function, call = chosen.load(), chosen.call(arguments)
    calls = {"eager": call}
    torch._dynamo.reset()
    with torch.no_grad():
        with contextlib.suppress(Exception):  # TorchScript functions, and others that cannot be traced as one graph
            traced = torch.compile(lambda *a: function(*a), fullgraph=True)
            traced(*arguments)
            calls["compiled"] = lambda: traced(*arguments)
        if device.type == "cuda":
            with contextlib.suppress(RuntimeError):  # a call that waits for the device cannot be captured
                calls["graph"] = _captured(call)
        seconds = host_seconds(calls, device)
    return HostTime(seconds["eager"], seconds.get("compiled"), seconds.get("graph"))


def _captured(call: Callable[[], object]) -> Callable[[], object]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
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
        wait_for(torch.device(device))
        seconds.append(time.perf_counter() - begin)
    return max(0.0, seconds[0] - seconds[1])
