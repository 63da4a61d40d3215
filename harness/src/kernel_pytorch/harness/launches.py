"""What a call runs on the device: its kernels, counted, and whether torch.compile compiled it.

Counting catches a fused operation that runs the unfused pair instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.autograd import DeviceType

from kernel_pytorch.harness.oracle import ErrorCheck, failed
from kernel_pytorch.harness.technique import Case, Direction, Implementation, Level, Operation
from kernel_pytorch.harness.tensors import as_tuple, leaves, wanting


def is_counted(level: Level, device: torch.device) -> bool:
    """Whether the kernels of a level can be seen there: on a CPU only those of Triton's interpreter."""
    return level is Level.TRITON or (level is Level.CUDA and device.type == "cuda")


@contextlib.contextmanager
def count_launches() -> Iterator[list[str]]:
    """Collect the names of the Triton kernels launched in the body, on a GPU or in the interpreter."""
    import triton
    from triton.runtime.interpreter import GridExecutor

    names: list[str] = []

    def counting(run: Callable[..., Any]) -> Callable[..., Any]:
        def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not kwargs.get("warmup"):
                names.append(self.fn.__name__)
            return run(self, *args, **kwargs)

        return counted

    def watch(metadata: Any) -> None:
        """Do nothing: a launcher that bypasses the JITFunction does not if there is a hook."""

    triton.knobs.runtime.launch_enter_hook.add(watch)
    try:
        with (
            mock.patch.object(triton.JITFunction, "run", counting(triton.JITFunction.run)),
            mock.patch.object(GridExecutor, "__call__", counting(GridExecutor.__call__)),
        ):
            yield names
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(watch)


@contextlib.contextmanager
def watch_device(device: torch.device) -> Iterator[list[str]]:
    """Collect the names of all kernels that the body runs on a GPU, by any launcher, without copies.

    In the interpreter it sees only Triton's own kernels.
    """
    if device.type != "cuda":
        with count_launches() as names:
            yield names
        return
    names = []
    # Without `acc_events` the profiler warns that it forgets them at the end of a cycle.
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profiler:
        yield names
        torch.cuda.synchronize(device)
    for event in profiler.key_averages():  # the host's calls of the driver are among them
        if event.device_type == DeviceType.CUDA and "memcpy" not in event.key.lower():
            names += [event.key] * event.count


def judge_launches(
    operation: Operation,
    implementation: Implementation,
    case: Case,
    arguments: list[Any],
    incoming: list[Tensor],
    device: torch.device,
) -> ErrorCheck:
    """Compare the kernels of a forward, and of a backward if there is one, with what the operation's cost declares.

    Args:
        operation: its `cost` says how many launches a direction takes; if it says nothing, any number is right.
        implementation: of a level with custom kernels; it launches at least one.
        case: what the arguments were made for.
        arguments: by position.
        incoming: gradients of the outputs; unused for an operation without gradients.
        device: of the arguments.
    """
    backward = operation.differentiable
    own = leaves(arguments, backward)
    call, wanted = implementation.bound_to(own), wanting(own)
    outputs = as_tuple(call())  # compiles and launches what is launched only once
    if backward:
        torch.autograd.grad(outputs, wanted, incoming, allow_unused=True)
    with watch_device(device) as launched:
        outputs = as_tuple(call())
    problems = _problem(operation, case, Direction.FORWARD, launched)
    if backward:
        with watch_device(device) as launched:
            torch.autograd.grad(outputs, wanted, incoming, allow_unused=True)
        problems += _problem(operation, case, Direction.BACKWARD, launched)
    return failed("launches", "; ".join(problems)) if problems else ErrorCheck("launches", True)


def _problem(operation: Operation, case: Case, direction: Direction, launched: list[str]) -> list[str]:
    declared = operation.cost(case, direction).launches
    kernels = ", ".join(launched)
    if not launched:
        return [f"the {direction.value} launches no kernel of its own: something else computes the result"]
    if declared is not None and len(launched) > declared:
        return [f"the {direction.value} launches {len(launched)} kernels ({kernels}) where {declared} are declared"]
    return []


@contextlib.contextmanager
def watch_compiler() -> Iterator[Callable[[], str]]:
    """Watch Dynamo while the body calls something for the first time since `torch._dynamo.reset`.

    Yields a function that says why the time of the call would not be that of compiled code, or "": torch.compile may
    return to eager PyTorch without a message. A function that was compiled too often raises inside the body.
    """
    from torch._dynamo import config
    from torch._dynamo.utils import counters

    def compiled() -> int:
        """Count the graphs that reached a compiler; the backend "eager" runs what Dynamo captured."""
        return sum(counters["aot_autograd"].values())

    before, breaks_before = compiled(), dict(counters["graph_break"])

    def problem() -> str:
        found = (reason for reason, count in counters["graph_break"].items() if count > breaks_before.get(reason, 0))
        breaks = sorted({next(iter(reason.strip().splitlines()), "") for reason in found})
        if breaks:
            return f"is not compiled as a whole, graph breaks: {'; '.join(breaks)}"
        return "is not compiled: no graph reached a compiler and the call ran eagerly" if compiled() == before else ""

    with config.patch(fail_on_recompile_limit_hit=True):
        yield problem
