"""Profiling of a module: steps on the clock without the profiler, steps under it, one step with its memory."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from kernel_pytorch.harness.clock import median_interval
from kernel_pytorch.harness.clock.statistics import FEWEST_ROUNDS
from kernel_pytorch.harness.clock.wall import step_seconds, wait_for
from kernel_pytorch.harness.environment import now
from kernel_pytorch.harness.machine import Machine
from kernel_pytorch.harness.memory import allocations
from kernel_pytorch.harness.profiling.cost import local_machine, operator_uses
from kernel_pytorch.harness.profiling.events import STEP, Call, profiler, read, tensor_label
from kernel_pytorch.harness.profiling.records import PeakMemory, Profile

STEPS = 5


def profile_module(
    module: torch.nn.Module,
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    backward: bool = False,
    steps: int = STEPS,
    compile: bool = False,
    machine: Machine | None = None,
    trace: Path | str | None = None,
    snapshot: Path | str | None = None,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> Profile:
    """Profile the time and the memory of a module by operator, on its device.

    The module keeps its mode (train or eval) and its gradients; other state that its forward changes (running
    statistics, random generators) is changed.

    Args:
        module: any module, its tensors on one device.
        *inputs: what it is called with, by position.
        kwargs: what it is called with, by name.
        backward: a step is the forward and its backward, with standard normal gradients coming in at every output that
            requires one: no loss is computed. Otherwise it is the forward without gradients.
        steps: how many are profiled.
        compile: run `torch.compile(module)`.
        machine: the limits that shares are of; measured now, once per process, if None.
        trace: where to write the trace of the profiled steps, a file for https://ui.perfetto.dev; `.json` or
            `.json.gz`. It holds the allocations too.
        snapshot: where to write PyTorch's memory snapshot of one step, a `.pickle` for
            https://docs.pytorch.org/memory_viz; on CUDA only.
        on_stage: called with the name of each stage before it begins.

    Raises:
        ValueError: `steps` below 1, tensors on several devices or on one that is neither cpu nor cuda, `backward`
            where no output requires a gradient, or `snapshot` on a CPU.
    """
    if steps < 1:
        raise ValueError(f"steps is {steps}; allowed is 1 or more")
    named = dict(kwargs or {})
    device = device_of(module, (inputs, named))
    if snapshot is not None and device.type != "cuda":
        raise ValueError(f"snapshot: PyTorch takes memory snapshots on CUDA only; the module is on {device}")
    if machine is None:
        on_stage("measuring what the machine can do")
        machine = local_machine(str(device))
    function = torch.compile(module) if compile else module
    on_stage("timing without the profiler")
    with _named_kernels(compile, device), _step(module, function, (inputs, named), backward) as step:
        samples, _ = step_seconds({"": step}, device, max(steps, FEWEST_ROUNDS))[""]
        on_stage("profiling")
        calls, busy, wall = _record(step, device, steps, trace)
        on_stage("recording memory")
        memory, device_peak = _memory(step, device, snapshot)
    return Profile(
        module=type(module).__name__,
        inputs=tuple(tensor_label(t) for t in tree_leaves((inputs, named)) if isinstance(t, Tensor)),
        direction="both" if backward else "forward",
        compiled=compile,
        created=now(),
        machine=machine,
        steps=steps,
        step=median_interval(samples),
        profiled_seconds=wall,
        busy_seconds=busy,
        operators=operator_uses(calls, machine.ceilings),
        memory=memory,
        device_peak=device_peak,
    )


def device_of(module: torch.nn.Module, arguments: Any) -> torch.device:
    """The one device of all parameters, buffers and inputs; numbers in tensors (no dimensions) may be elsewhere.

    Raises:
        ValueError: there are several, or one that is neither cpu nor cuda.
    """
    tensors = [*module.parameters(), *module.buffers(), *tree_leaves(arguments)]
    devices = {str(t.device): t.device for t in tensors if isinstance(t, Tensor) and t.dim() > 0}
    if len(devices) > 1:
        raise ValueError(f"the module and its inputs are on {' and '.join(sorted(devices))}; move all to one device")
    device = next(iter(devices.values()), torch.device("cpu"))
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"the module is on {device}; allowed are cpu and cuda")
    return device


@contextlib.contextmanager
def _step(
    module: torch.nn.Module, function: Callable[..., Any], arguments: Any, backward: bool
) -> Iterator[Callable[[], None]]:
    """One step, which leaves no gradient; at the end the gradients of before are there again."""
    tensors = [t for t in (*module.parameters(), *tree_leaves(arguments)) if isinstance(t, Tensor) and t.is_leaf]
    before = [t.grad for t in tensors]

    def outputs() -> list[Tensor]:
        with torch.set_grad_enabled(backward):
            result = function(*arguments[0], **arguments[1])
        return [t for t in tree_leaves(result) if isinstance(t, Tensor) and t.requires_grad]

    def set_gradients(gradients: list[Tensor | None]) -> None:
        for tensor, gradient in zip(tensors, gradients, strict=True):
            tensor.grad = gradient

    def step() -> None:
        found = outputs()
        if backward:
            torch.autograd.backward(found, incoming)
            set_gradients([None] * len(tensors))

    incoming = [torch.randn_like(output) for output in outputs()] if backward else []
    if backward and not incoming:
        raise ValueError("backward: no output of the module requires a gradient; profile the forward alone")
    set_gradients([None] * len(tensors))
    try:
        yield step
    finally:
        set_gradients(before)


def _named_kernels(compile: bool, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Have TorchInductor announce its kernels to the profiler, which it does by itself on a GPU only."""
    if not compile or device.type != "cpu":
        return contextlib.nullcontext()
    from torch._inductor import config

    return config.patch({"cpp.enable_kernel_profile": True})


def _record(
    step: Callable[[], None], device: torch.device, steps: int, trace: Path | str | None
) -> tuple[list[Call], float | None, float]:
    """The calls of all steps, how long the GPU had work, and the wall clock around the steps."""
    wait_for(device)
    with profiler(device) as running:
        begin = time.perf_counter()
        for _ in range(steps):
            with torch.profiler.record_function(STEP):
                step()
            wait_for(device)
        wall = time.perf_counter() - begin
    if trace is not None:
        running.export_chrome_trace(str(trace))
    return *read(running, device), wall


def _memory(
    step: Callable[[], None], device: torch.device, snapshot: Path | str | None
) -> tuple[PeakMemory, int | None]:
    if device.type != "cuda":
        return peak_memory(step, device), None
    torch.cuda.reset_peak_memory_stats(device)
    found, peak = peak_memory(step, device), torch.cuda.max_memory_allocated(device)
    if snapshot is not None:
        torch.cuda.memory._record_memory_history()
        try:
            step()
            torch.cuda.memory._dump_snapshot(str(snapshot))
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)
    return found, peak


TOTAL, OTHER = "allocated", "other"
CATEGORIES = {
    "PARAMETER": "parameters",
    "OPTIMIZER_STATE": "optimizer state",
    "INPUT": "inputs",
    "TEMPORARY": "temporaries",
    "ACTIVATION": "activations",
    "GRADIENT": "gradients",
    "AUTOGRAD_DETAIL": "autograd",
}
"""Names of the profiler's categories in tables."""


def peak_memory(call: Callable[[], object], device: torch.device) -> PeakMemory:
    """Run a call once and record every allocation on a device, split by purpose where the profiler knows it.

    The profiler tells parameters, gradients and activations apart by what happens to them in a backward. A call
    without a backward is not split, nor is one that the profiler cannot analyse; the note says so.

    Args:
        call: what to run; run it before, so that caches of libraries are not counted.
        device: the device whose memory is measured.
    """
    wait_for(device)
    with profiler(device, with_stack=True) as recorded:
        call()
        wait_for(device)
    try:
        changes = list(_categorised(recorded, device))
        split = any(category == "gradients" for category, _ in changes)
        note = "" if split else "not split: the profiler saw no gradient"
    except Exception as error:  # torch does not promise to keep this part of the profiler
        note = f"not split: the profiler failed on it ({type(error).__name__}: {error})"
    if note:
        changes = [(TOTAL, change) for change in allocations(recorded, device)]
    held: Counter[str] = Counter()
    at_peak: Counter[str] = Counter()
    for category, change in changes:
        held[category] += change
        if held.total() > at_peak.total():
            at_peak = Counter({name: count for name, count in held.items() if count})
    return PeakMemory(peak=at_peak.total(), at_peak=dict(at_peak), note=note)


def _categorised(recorded: Any, device: torch.device) -> Iterator[tuple[str, int]]:
    """Category and change in bytes, in the order of time, with tensors from before the call first."""
    found = recorded._memory_profile()
    for _, action, (key, version), size in found.timeline:
        if key.device.type != device.type:
            continue
        now, next_one = (
            CATEGORIES.get(getattr(found._categories.get(key, each), "name", ""), OTHER)
            for each in (version, version + 1)
        )
        if action.name in ("PREEXISTING", "CREATE"):
            yield now, size
            continue
        yield now, -size
        if action.name != "DESTROY":  # INCREMENT_VERSION: written in place, may make a gradient of a temporary
            yield next_one, size
