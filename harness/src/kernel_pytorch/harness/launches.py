"""Which kernels a call launches: a fused operation that quietly runs the unfused pair is caught by counting."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import DeviceType

from kernel_pytorch.harness.oracle import Judgement
from kernel_pytorch.harness.technique import Case, Direction, Implementation, Level, Operation


def is_counted(level: Level, device: torch.device) -> bool:
    """Whether the kernels of a level can be seen there: on a CPU only those of Triton's interpreter."""
    return level is Level.TRITON or (level is Level.CUDA and device.type == "cuda")


@contextlib.contextmanager
def count_launches() -> Iterator[list[str]]:
    """Collect the names of the Triton kernels launched in the body, on a GPU or in the interpreter."""
    import triton
    from triton.runtime.interpreter import GridExecutor

    names: list[str] = []
    run_compiled, run_interpreted = triton.JITFunction.run, GridExecutor.__call__

    def counted_compiled(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("warmup"):
            names.append(self.fn.__name__)
        return run_compiled(self, *args, **kwargs)

    def counted_interpreted(self: Any, *args: Any, **kwargs: Any) -> Any:
        names.append(self.fn.__name__)
        return run_interpreted(self, *args, **kwargs)

    def watch(metadata: Any) -> None:
        """Nothing: a launcher that goes past the JITFunction takes the long way where there is a hook."""

    triton.JITFunction.run, GridExecutor.__call__ = counted_compiled, counted_interpreted
    triton.knobs.runtime.launch_enter_hook.add(watch)
    try:
        yield names
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(watch)
        triton.JITFunction.run, GridExecutor.__call__ = run_compiled, run_interpreted


@contextlib.contextmanager
def watch_device(device: torch.device) -> Iterator[list[str]]:
    """Collect the names of all kernels that the body runs on a GPU, whoever launched them; copies are left out.

    In the interpreter only Triton's own kernels are seen.
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
) -> Judgement:
    """Hold the kernels of a forward, and of a backward if there is one, against what the operation's cost declares.

    Args:
        operation: whose `cost` says how many launches a direction takes; where it says nothing, any number is right.
        implementation: of a level that has kernels of its own, and launches one at least.
        case: what the arguments were made for.
        arguments: by position.
        incoming: gradients of the outputs; unused for an operation without gradients.
        device: where they lie.
    """
    backward = operation.differentiable
    leaves = [
        a.detach().requires_grad_(backward) if isinstance(a, Tensor) and a.is_floating_point() else a for a in arguments
    ]
    call = implementation.call(leaves)
    wanted = [a for a in leaves if isinstance(a, Tensor) and a.requires_grad]
    problems = []

    def forward() -> tuple[Tensor, ...]:
        outputs = call()
        return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)

    outputs = forward()  # what is launched once only, compilation too
    if backward:
        torch.autograd.grad(outputs, wanted, incoming, allow_unused=True)
    with watch_device(device) as launched:
        outputs = forward()
    problems += _problem(operation, case, Direction.FORWARD, launched)
    if backward:
        with watch_device(device) as launched:
            torch.autograd.grad(outputs, wanted, incoming, allow_unused=True)
        problems += _problem(operation, case, Direction.BACKWARD, launched)
    return Judgement("launches", not problems, error_over_budget=float("inf") if problems else 0.0,
                     message="; ".join(problems))  # fmt: skip


def _problem(operation: Operation, case: Case, direction: Direction, launched: list[str]) -> list[str]:
    declared = operation.cost(case, direction).launches
    kernels = ", ".join(launched)
    if not launched:
        return [f"the {direction.value} launches no kernel of its own: something else computes the result"]
    if declared is not None and len(launched) > declared:
        return [f"the {direction.value} launches {len(launched)} kernels ({kernels}) where {declared} are declared"]
    return []
