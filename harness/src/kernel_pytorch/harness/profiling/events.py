"""Reader of torch.profiler's events: calls that count no time twice.

An operator calls operators. The unit here is the outermost one that has its own kernel: `aten::linear` is PyTorch
code that calls `aten::addmm`, so the unit is `aten::addmm`, with all that happens inside. What lies above the units
(Python, autograd, composite operators) counts with its self time alone.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils._pytree import tree_leaves

Kind = Literal["operator", "function", "kernel", "host"]

STEP = "Python outside of operators"
INDUCTOR_CPU_KERNEL = "cpp_fused"
_OPERATOR_NAME = re.compile(r"\w+::\w+")


@dataclass(frozen=True)
class TensorUse:
    """A tensor that a call was given.

    Attributes:
        shape: its sizes.
        strides: in elements.
        dtype: its dtype.
        identity: the same for the same tensor, within one profile.
        strided: whether sizes and strides say which memory it covers; False for sparse tensors.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    identity: int
    strided: bool = True

    @property
    def bytes(self) -> int:
        """Bytes of its distinct elements."""
        return distinct_bytes(self.shape, self.strides, self.dtype)

    @property
    def label(self) -> str:
        """Dtype and shape, for tables."""
        return tensor_label(self.dtype, self.shape)


@dataclass(frozen=True)
class Call:
    """One call of an operator, or what remains of something that calls operators.

    Attributes:
        name: as the profiler prints it.
        overload: of an operator, "" for the default.
        kind: "operator": a unit, with all that it calls. "function": launched kernels itself without being an operator
            (an `autograd.Function`, TorchInductor's generated code). "kernel": ran on the GPU, launched by none of
            these (a CUDA graph). "host": the self time of what calls operators.
        arguments: `TensorUse`s, lists of them, and plain values; None where nothing was recorded.
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
    def tensors(self) -> tuple[TensorUse, ...]:
        """The tensors among its arguments, those in lists too."""
        return tuple(t for t in tree_leaves(self.arguments) if isinstance(t, TensorUse))


def tensor_label(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """Dtype and shape, as tables print them: "float32 64x128"."""
    return f"{str(dtype).removeprefix('torch.')} {'x'.join(map(str, shape)) or 'scalar'}"


def distinct_bytes(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of the elements that lie at different places: along a stride of 0 they are all the same one."""
    elements = 1
    for size, stride in zip(shape, strides, strict=True):
        elements *= size if stride != 0 or size == 0 else 1
    return elements * dtype.itemsize


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


def read(finished: torch.profiler.profile, device: torch.device) -> tuple[tuple[Call, ...], float | None]:
    """The calls of a finished profile that `profiler` made, in the order in which they began.

    Also returns how long the GPU had work, in seconds, overlapping kernels counted once; None on a CPU.

    Args:
        finished: after its `with` block.
        device: whose time is counted.
    """
    results = finished.profiler.kineto_results  # type: ignore[union-attr]
    reader = _Reader(device, results)
    for root in _operations(results.experimental_event_tree()):
        reader.visit(root)
    return reader.recording()


class _Reader:
    """Walks the tree of events from the outside in, and stops at every unit."""

    def __init__(self, device: torch.device, results: Any) -> None:
        self._device = device
        self._calls: list[tuple[int, Call]] = []
        self._lists: dict[int, list[Any]] = {}
        self._launched: dict[int, list[Any]] = {}
        self._device_events: list[Any] = []
        for event in results.events():
            on_cpu = event.device_type() == torch.autograd.DeviceType.CPU
            # Neither allocations there nor annotations around several kernels.
            if not on_cpu and event.name() != "[memory]" and not event.is_user_annotation():
                self._launched.setdefault(event.linked_correlation_id(), []).append(event)
                self._device_events.append(event)
            elif event.concrete_inputs():
                # The tree has no lists of numbers; paddings and strides are such lists.
                self._lists[event.correlation_id()] = event.concrete_inputs()

    def visit(self, root: Any) -> None:
        stack = [root]
        while stack:
            event = stack.pop()
            called = resolve(event.name, event.overload_name)
            if called is not None and not is_composite(called, self._device.type):
                inside = list(_subtree(event))
                kernels = [k for e in inside if e.tag.name == "TorchOp" for k in self._take_kernels(e)]
                self._add(event, "operator", event.duration_time_ns, kernels, self._held(inside))
                continue
            children = list(_operations(event.children))
            kernels = self._take_kernels(event)
            rest = event.duration_time_ns - sum(child.duration_time_ns for child in children)
            kind: Kind = "function" if kernels or INDUCTOR_CPU_KERNEL in event.name else "host"
            self._add(event, kind, max(rest, 0), kernels, self._held(list(_subtree(event))) if kernels else 0)
            stack += children

    def recording(self) -> tuple[tuple[Call, ...], float | None]:
        """Everything found, with the kernels whose launch was not recorded."""
        for event in (event for events in self._launched.values() for event in events):
            seconds = event.duration_ns() * 1e-9
            call = Call(event.name(), "", "kernel", (), seconds, ((event.name(), seconds),))
            self._calls.append((event.start_ns(), call))
        calls = tuple(call for _, call in sorted(self._calls, key=lambda item: item[0]))
        return calls, self._busy() if self._device.type == "cuda" else None

    def _add(self, event: Any, kind: Kind, host_nanoseconds: int, kernels: list[Any], allocated: int) -> None:
        pairs = tuple((k.name(), k.duration_ns() * 1e-9) for k in kernels)
        seconds = sum(s for _, s in pairs) if self._device.type == "cuda" else host_nanoseconds * 1e-9
        arguments = () if kind == "host" else self._arguments(event)
        name = event.name.removeprefix("autograd::engine::evaluate_function: ")
        call = Call(name, event.overload_name, kind, arguments, seconds, pairs, allocated)
        self._calls.append((event.start_time_ns, call))

    def _take_kernels(self, event: Any) -> list[Any]:
        return sorted(self._launched.pop(event.correlation_id, []), key=lambda kernel: kernel.start_ns())

    def _arguments(self, event: Any) -> tuple[Any, ...]:
        lists = self._lists.get(event.correlation_id) or []
        recorded = [_argument(value) for value in event.extra_fields.inputs]
        return tuple(
            lists[i] if value is None and i < len(lists) and isinstance(lists[i], list) else value
            for i, value in enumerate(recorded)
        )

    def _held(self, inside: list[Any]) -> int:
        """Bytes allocated by these events and not released by them."""
        held: dict[int, int] = {}
        for event in sorted(inside, key=lambda e: e.start_time_ns):
            if event.tag.name != "Allocation" or event.extra_fields.device.type != self._device.type:
                continue
            if event.extra_fields.alloc_size > 0:
                held[event.extra_fields.ptr] = event.extra_fields.alloc_size
            else:
                held.pop(event.extra_fields.ptr, None)
        return sum(held.values())

    def _busy(self) -> float:
        busy = end = 0
        for event in sorted(self._device_events, key=lambda e: e.start_ns()):
            busy += max(0, event.end_ns() - max(event.start_ns(), end))
            end = max(end, event.end_ns())
        return busy * 1e-9


@functools.cache
def resolve(name: str, overload: str) -> Any:
    """The operator of that name in `torch.ops`, or None."""
    if not _OPERATOR_NAME.fullmatch(name):
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


def _subtree(event: Any) -> Iterator[Any]:
    stack = [event]
    while stack:
        found = stack.pop()
        yield found
        stack += found.children


def _argument(value: Any) -> Any:
    if isinstance(value, list):
        return [_argument(item) for item in value]
    if not hasattr(value, "sizes"):
        return value
    strided = value.layout == torch.strided
    strides = tuple(value.strides) if strided else (1,) * len(value.sizes)
    return TensorUse(tuple(value.sizes), strides, value.dtype, value.impl_ptr or 0, strided)
