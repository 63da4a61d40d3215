"""Reader of torch.profiler's events: calls that count no time twice.

An operator calls operators. The unit here is the outermost one that has its own kernel: `aten::linear` is PyTorch
code that calls `aten::addmm`, so the unit is `aten::addmm`, with all that happens inside. What lies above the units
(Python, autograd, composite operators) counts with its self time alone.
"""

from __future__ import annotations

import functools
import math
import operator
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

Kind = Literal["operator", "function", "kernel", "host"]

STEP = "Python outside of operators"
INDUCTOR_CPU_KERNEL = "cpp_fused"


class Call(NamedTuple):
    """One call of an operator, or what remains of something that calls operators.

    Attributes:
        name: as the profiler prints it.
        overload: of an operator, "" for the default.
        kind: "operator": a unit, with all that it calls. "function": launched kernels itself without being an operator
            (an `autograd.Function`, TorchInductor's generated code). "kernel": ran on the GPU, launched by none of
            these (a CUDA graph). "host": the self time of what calls operators.
        arguments: tensors on the device "meta", the same object for the same tensor, lists of them, and plain values;
            None where nothing was recorded.
        seconds: on a CPU the time that the call took; on a GPU the time of its kernels.
        kernels: name and seconds of each kernel that it launched, in order.
        allocated: bytes that it allocated and that were still held when it ended: its results.
    """

    name: str
    overload: str
    kind: Kind
    arguments: tuple[Any, ...]
    seconds: float
    kernels: tuple[tuple[str, float], ...] = ()
    allocated: int = 0

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among its arguments, those in lists too."""
        return [t for t in tree_leaves(self.arguments) if isinstance(t, Tensor)]


def tensor_label(tensor: Tensor) -> str:
    """Dtype and shape, as tables print them: "float32 64x128"."""
    return f"{str(tensor.dtype).removeprefix('torch.')} {'x'.join(map(str, tensor.shape)) or 'scalar'}"


def distinct_bytes(tensor: Tensor) -> int:
    """Bytes of the elements that lie at different places: along a stride of 0 they are all the same one."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size if stride != 0 else min(size, 1) for size, stride in sizes) * tensor.dtype.itemsize


def profiler(device: torch.device, *, with_stack: bool = False) -> torch.profiler.profile:
    """A profiler that records what `read` needs, and with stacks what tells categories of memory apart."""
    kinds = torch.profiler.ProfilerActivity
    return torch.profiler.profile(
        activities=[kinds.CPU, kinds.CUDA] if device.type == "cuda" else [kinds.CPU],
        record_shapes=True,
        profile_memory=True,
        with_stack=with_stack,
        acc_events=True,
        # The overload's name tells which argument is which.
        experimental_config=torch._C._profiler._ExperimentalConfig(capture_overload_names=True),
    )


def read(finished: torch.profiler.profile, device: torch.device) -> tuple[list[Call], float | None]:
    """The calls of a finished profile that `profiler` made, in the order in which they began.

    Also returns how long the GPU had work, in seconds, overlapping kernels counted once; None on a CPU.

    Args:
        finished: after its `with` block.
        device: whose time is counted.
    """
    results = finished.profiler.kineto_results  # type: ignore[union-attr]
    busy = end = 0
    launched: dict[int, list[Any]] = defaultdict(list)
    lists: dict[int, list[Any]] = {}
    for event in sorted(results.events(), key=lambda event: event.start_ns()):
        on_cpu = event.device_type() == torch.autograd.DeviceType.CPU
        # Neither allocations there nor annotations around several kernels.
        if not on_cpu and event.name() != "[memory]" and not event.is_user_annotation():
            launched[event.linked_correlation_id()].append(event)
            busy += max(0, event.end_ns() - max(event.start_ns(), end))
            end = max(end, event.end_ns())
        elif event.concrete_inputs():
            # The tree has no lists of numbers; paddings and strides are such lists.
            lists[event.correlation_id()] = event.concrete_inputs()
    begun: list[tuple[int, Call]] = []
    known: dict[Any, Tensor] = {}
    stack = list(_operations(results.experimental_event_tree()))
    while stack:
        event = stack.pop()
        kernels = launched.pop(event.correlation_id, [])
        called, nanoseconds = resolve(event.name, event.overload_name), event.duration_time_ns
        kind: Kind = "operator"
        if called is not None and not is_composite(called, device.type):
            for each in _inside(event):
                kernels += launched.pop(each.correlation_id, []) if each.tag.name == "TorchOp" else []
        else:
            children = list(_operations(event.children))
            stack += children
            nanoseconds = max(0, nanoseconds - sum(child.duration_time_ns for child in children))
            kind = "function" if kernels or INDUCTOR_CPU_KERNEL in event.name else "host"
        arguments = () if kind == "host" else _arguments(event, lists.get(event.correlation_id, []), known)
        allocated = _held(event, device) if kind == "operator" or kernels else 0
        pairs = tuple((k.name(), k.duration_ns() * 1e-9) for k in sorted(kernels, key=lambda k: k.start_ns()))
        seconds = sum(s for _, s in pairs) if device.type == "cuda" else nanoseconds * 1e-9
        name = event.name.removeprefix("autograd::engine::evaluate_function: ")
        call = Call(name, event.overload_name, kind, arguments, seconds, pairs, allocated)
        begun.append((event.start_time_ns, call))
    for event in (event for events in launched.values() for event in events):  # whose launch was not recorded
        pair = (event.name(), event.duration_ns() * 1e-9)
        begun.append((event.start_ns(), Call(pair[0], "", "kernel", (), pair[1], (pair,))))
    calls = [call for _, call in sorted(begun, key=lambda each: each[0])]
    return calls, busy * 1e-9 if device.type == "cuda" else None


@functools.cache
def resolve(name: str, overload: str) -> Any:
    """The operator of that name in `torch.ops`, or None."""
    if not re.fullmatch(r"\w+::\w+", name):
        return None
    try:
        return operator.attrgetter(f"{name.replace('::', '.')}.{overload or 'default'}")(torch.ops)
    except (AttributeError, RuntimeError):
        return None


@functools.cache
def is_composite(called: Any, device_type: str) -> bool:
    """Whether an operator is nothing but calls of other operators on that device."""
    keys, has = torch._C.DispatchKey, called.has_kernel_for_dispatch_key
    return has(keys.CompositeImplicitAutograd) and not has(getattr(keys, device_type.upper()))


def _operations(events: list[Any]) -> Iterator[Any]:
    """The outermost operations among events and what lies beneath them."""
    for event in events:
        if event.tag.name == "TorchOp":
            yield event
        else:
            yield from _operations(event.children)


def _inside(event: Any) -> Iterator[Any]:
    """All events beneath one."""
    for child in event.children:
        yield child
        yield from _inside(child)


def _held(event: Any, device: torch.device) -> int:
    """Bytes allocated inside an event and not released there."""
    held: dict[int, int] = {}
    for each in sorted(_inside(event), key=lambda each: each.start_time_ns):
        if each.tag.name == "Allocation" and each.extra_fields.device.type == device.type:
            fields = each.extra_fields
            held[fields.ptr] = max(0, fields.alloc_size)  # a release is negative
    return sum(held.values())


def _arguments(event: Any, lists: list[Any], known: dict[Any, Tensor]) -> tuple[Any, ...]:
    """The arguments of an event; `lists` are those of the numbers, `known` are the tensors of other events."""

    def argument(value: Any) -> Any:
        if isinstance(value, list):
            return [argument(item) for item in value]
        if not hasattr(value, "sizes"):
            return value
        if value.layout != torch.strided:
            return torch.empty(value.sizes, dtype=value.dtype, layout=torch.sparse_coo, device="meta")
        key = (value.impl_ptr or object(), tuple(value.sizes), tuple(value.strides), value.dtype)
        if key not in known:
            known[key] = torch.empty_strided(value.sizes, value.strides, dtype=value.dtype, device="meta")
        return known[key]

    recorded = [argument(value) for value in event.extra_fields.inputs]
    return tuple(
        lists[i] if value is None and i < len(lists) and isinstance(lists[i], list) else value
        for i, value in enumerate(recorded)
    )
