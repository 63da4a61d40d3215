"""Overheads of a call beside its device time: host time, memory, compilation and launches."""

from __future__ import annotations

import contextlib
import functools
import time
from dataclasses import dataclass
from typing import Any

import torch

from kernel_pytorch.harness.availability import why_unavailable
from kernel_pytorch.harness.clock.cuda import graph_of
from kernel_pytorch.harness.clock.wall import host_seconds, wait_for
from kernel_pytorch.harness.discovery import discover
from kernel_pytorch.harness.exemptions import NO_GRADIENT
from kernel_pytorch.harness.interpreter import is_interpreting
from kernel_pytorch.harness.isolation import Worker, set_environment
from kernel_pytorch.harness.launches import watch_device
from kernel_pytorch.harness.memory import peak, profile_memory
from kernel_pytorch.harness.oracle import random_like, run
from kernel_pytorch.harness.results import CaseRecord, WholeCost
from kernel_pytorch.harness.scratch import scratch_folder
from kernel_pytorch.harness.technique import Case, Implementation, Level, Operation, Technique

INTERPRETED = "Triton's interpreter replaces the device"
STARTS = ("cold_start", "warm_start")
TIMEOUT = 300.0

FIGURES = tuple(name for name, field in WholeCost.model_fields.items() if field.default is None)
"""Fields of a `WholeCost` that hold a measured figure, or None."""


@dataclass(frozen=True)
class Call:
    """A call whose overheads are measured.

    Attributes:
        technique: installed, so that child processes find it.
        operation: of the technique.
        implementation: of the operation.
        case: of its bench grid; on a small one the host takes longer than the device and its time shows.
        device: where.
    """

    technique: Technique
    operation: Operation
    implementation: Implementation
    case: Case
    device: torch.device

    @classmethod
    def named(cls, technique: str, operation: str, implementation: str, case: Case, device: torch.device) -> Call:
        """The call of installed techniques that has these `names`."""
        found = discover().get(technique)
        declared = found.operation(operation)
        return cls(found, declared, declared.implementation(implementation), case, device)

    @property
    def names(self) -> tuple[str, str, str, Case, torch.device]:
        """Names the call in another process."""
        return self.technique.name, self.operation.name, self.implementation.name, self.case, self.device

    def cost(self) -> WholeCost:
        """Measure the overheads of a call that is not the first, and say of the other figures why they are missing."""
        device, implementation = self.device, self.implementation
        reason = why_unavailable(self.technique, implementation, device, self.case.dtype)
        if reason is not None:
            return self.no_cost(reason)
        is_triton, on_cuda = implementation.level is Level.TRITON, device.type == "cuda"
        figures: dict[str, Any] = {}
        missing = {"compiled": "torch.compile(fullgraph=True) cannot trace it"}
        missing |= {"graph": "it cannot be captured" if on_cuda else "no CUDA", "launches": "no CUDA"}
        if is_triton and not on_cuda and is_interpreting():
            missing |= dict.fromkeys(("eager", "compiled", "graph", *STARTS), INTERPRETED)
        else:
            figures |= self.host_time()
        arguments = self.arguments()
        call = implementation.bound_to(arguments)
        if self.operation.differentiable:
            figures |= profile_memory(implementation.load(), *arguments)._asdict()
        else:
            missing |= dict.fromkeys(("training_peak", "saved_for_backward"), NO_GRADIENT)
        with torch.no_grad():
            if not self.operation.differentiable:
                figures["forward_peak"] = peak(call, device)
            if on_cuda or is_triton:
                call()
                with watch_device(device) as launched:
                    call()
                figures["launches"] = len(launched)
        missing = {name: why for name, why in missing.items() if name not in figures}
        return self.no_cost().model_copy(update={**figures, "missing": missing})

    def no_cost(self, reason: str = "") -> WholeCost:
        """Return a record without any figure; `reason` says why."""
        missing = dict.fromkeys(FIGURES, reason) if reason else {}
        operation, implementation, case = self.operation.name, self.implementation.name, CaseRecord.of(self.case)
        return WholeCost(operation=operation, implementation=implementation, case=case, missing=missing)

    def with_starts(self, cost: WholeCost) -> WholeCost:
        """Add the cost of the first call, measured in separate processes."""
        if set(STARTS) <= set(cost.missing):
            return cost
        compiles = self.implementation.level in (Level.COMPILE, Level.TRITON)
        figures, reason = self.first_calls() if compiles else ({}, "nothing is compiled at the first call")
        missing = dict.fromkeys(STARTS, reason) if reason else {}
        return cost.model_copy(update={**figures, "missing": cost.missing | missing})

    def host_time(self) -> dict[str, float]:
        """Measure the host time of a call, whose case is so small that the device is faster than the host.

        Returns:
            Seconds per call: "eager", called from Python; "compiled", from a function under
            `torch.compile(fullgraph=True)`, if it can be traced; "graph", the replay of a CUDA graph, if one can hold
            it. On a CPU there is no device to launch on, and they are those of the whole call.
        """
        arguments = self.arguments()
        function, call = self.implementation.load(), self.implementation.bound_to(arguments)
        calls = {"eager": call}
        torch._dynamo.reset()
        with torch.no_grad():
            with contextlib.suppress(Exception):  # TorchScript functions, and others that are not traced as one graph
                traced = functools.partial(torch.compile(lambda *a: function(*a), fullgraph=True), *arguments)
                traced()
                calls["compiled"] = traced
            if self.device.type == "cuda":
                with contextlib.suppress(RuntimeError):  # a call that waits for the device cannot be captured
                    calls["graph"] = graph_of(call)[0].replay
            return host_seconds(calls, self.device)

    def first_calls(self) -> tuple[dict[str, float], str]:
        """Measure the first call in two processes, the first with empty caches on disk, the second with its caches.

        Returns:
            Seconds that the first forward and backward take longer than the second, by `STARTS`; why there are none,
            or "".
        """
        seconds: dict[str, float] = {}
        with scratch_folder() as folder:
            caches = dict.fromkeys(("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"), folder)
            for start in STARTS:
                with Worker(TIMEOUT, functools.partial(set_environment, caches)) as worker:
                    outcome = worker.call(first_call, *self.names)
                if outcome.failure:
                    return {}, outcome.failure
                seconds[start] = outcome.value
        return seconds, ""

    def arguments(self) -> tuple[Any, ...]:
        """Arguments of the call, the same each time."""
        return self.operation.arguments(self.case, torch.Generator(self.device).manual_seed(0))


def cost_in_child(*names: Any) -> WholeCost:
    """In a child: the cost of the call of these names; the last argument announces."""
    return Call.named(*names[:-1]).cost()


def first_call(*names: Any) -> float:
    """In a child: seconds of the first forward and any backward beyond those of the second, as `cost_in_child`."""
    *given, announce = names
    call = Call.named(*given)
    function, arguments, incoming = call.implementation.load(), call.arguments(), []
    signature = call.operation.signature()
    if call.operation.differentiable:
        outputs = run(call.operation.reference.load(), signature, arguments).outputs
        incoming = random_like(outputs, torch.Generator(call.device).manual_seed(1))
    seconds = []
    for turn in ("first call", "second call"):
        announce(turn)
        begin = time.perf_counter()
        run(function, signature, arguments, incoming)
        wait_for(call.device)
        seconds.append(time.perf_counter() - begin)
    return max(0.0, seconds[0] - seconds[1])
