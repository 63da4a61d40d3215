"""Input sets that are cold and new: copies of the given arguments, rewritten with other values before they are used.

A function that remembers what it computed is fast on inputs that it has seen. A model never sees the same activations
twice, so neither does what is timed here.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, keystr, tree_flatten_with_path, tree_leaves, tree_unflatten

from kernel_pytorch.harness.clock import Subject, sets_needed
from kernel_pytorch.harness.clock.interleave import sampler_for
from kernel_pytorch.harness.clock.sampling import LONGEST_PASS, SHORTEST_SAMPLE, Sampler
from kernel_pytorch.harness.profiling.events import distinct_bytes, tensor_label

ALIGNMENT = 512
"""Bytes. What the CUDA allocator gives; a kernel may choose its loads by it."""

SMALLEST_FACTOR, LARGEST_FACTOR = 0.75, 1.25
"""Fresh values are the given ones times a factor between these: signs, zeros, infinite masks and order are kept."""

MOST_SETS = 2048
MOST_WARM_UP = 1.0  # seconds for one call on every set
REPEATED = "its inputs have no floating-point value to vary: every call saw the same ones"


@dataclass(frozen=True)
class Arguments:
    """How a function is called: tensors and plain values, as a flat list.

    Attributes:
        leaves: tensors and values, in order.
        names: where each stands, for messages: "argument 0", "scale", "argument 1[0]".
        structure: what turns leaves into positional and named arguments again.
    """

    leaves: tuple[Any, ...]
    names: tuple[str, ...]
    structure: TreeSpec

    @classmethod
    def of(cls, positional: Sequence[Any], named: dict[str, Any] | None = None) -> Arguments:
        """Flatten lists, tuples and dictionaries; a tensor that is given twice stays one tensor."""
        found, structure = tree_flatten_with_path((tuple(positional), named or {}))
        plain = {id(leaf): leaf.detach() if isinstance(leaf, Tensor) else leaf for _, leaf in found}
        leaves = tuple(plain[id(leaf)] for _, leaf in found)
        return cls(leaves, tuple(_name(path) for path, _ in found), structure)

    def unflatten(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Other leaves as positional and named arguments."""
        positional, named = tree_unflatten(list(leaves), self.structure)
        return positional, named

    def flat(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, called with leaves by position."""

        def call(*leaves: Any) -> Any:
            positional, named = self.unflatten(leaves)
            return function(*positional, **named)

        return call

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors among the leaves."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Tensor)]

    @property
    def labels(self) -> tuple[str, ...]:
        """Dtype and shape of each tensor, for tables."""
        return tuple(tensor_label(t.dtype, t.shape) for t in self.tensors)

    @property
    def dtype_name(self) -> str:
        """Dtype of the first floating-point tensor, without the `torch.` prefix."""
        return next((str(t.dtype).removeprefix("torch.") for t in self.tensors if t.is_floating_point()), "none")

    @property
    def device(self) -> torch.device:
        """Where the tensors are: CUDA if one of them is, else the CPU."""
        devices = [t.device for t in self.tensors]
        return next((d for d in devices if d.type == "cuda"), next(iter(devices), torch.device("cpu")))


class Pool:
    """Copies of the arguments, each in memory of its own, with the same strides.

    Floating-point tensors get new values at each `refresh`. Integers and booleans (indices, masks) keep theirs, since
    nobody knows which others would be allowed, and so do tensor subclasses and sparse tensors.

    Args:
        arguments: what is copied.
        sets: how many copies.
    """

    def __init__(self, arguments: Arguments, sets: int) -> None:
        self._given: list[tuple[Tensor, Tensor]] = []
        self._seed = 0
        copies: dict[int, list[Tensor]] = {}
        for leaf in arguments.tensors:
            if id(leaf) not in copies:
                copies[id(leaf)] = self._copies(leaf, sets)
        self.sets = [
            tuple(copies[id(leaf)][index] if isinstance(leaf, Tensor) else leaf for leaf in arguments.leaves)
            for index in range(sets)
        ]
        self.varies = any(bool((given != 0).any()) for given, _ in self._given)
        self.refresh()

    def refresh(self) -> None:
        """Write values into all sets that none of them has held before (tiny tensors of 16 bits may, by chance)."""
        self._seed += 1
        generator = torch.Generator().manual_seed(self._seed)
        for given, memory in self._given:
            span = LARGEST_FACTOR - SMALLEST_FACTOR
            # In float32: bfloat16 has so few factors that they would come back.
            factors = SMALLEST_FACTOR + span * torch.rand(len(memory), 1, generator=generator)
            torch.mul(given, factors.to(memory.device), out=memory)

    def write(self, index: int, other: Pool) -> None:
        """Write the values of the first set of another pool of the same arguments into one of these sets."""
        for (_, mine), (_, theirs) in zip(self._given, other._given, strict=True):
            mine[index].copy_(theirs[0])

    def _copies(self, tensor: Tensor, sets: int) -> list[Tensor]:
        plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
        if not plain or tensor.numel() == 0:
            return [tensor.clone() for _ in range(sets)]
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        given = tensor.as_strided((extent,), (1,))
        padded = math.ceil(extent * tensor.itemsize / ALIGNMENT) * ALIGNMENT // tensor.itemsize
        memory = torch.empty(sets, padded, dtype=tensor.dtype, device=tensor.device)[:, :extent]
        memory.copy_(given.expand(sets, extent))
        if tensor.dtype.itemsize > 1 and (tensor.is_floating_point() or tensor.is_complex()):
            self._given.append((given.clone(), memory))
        return [memory[index].as_strided(tensor.shape, tensor.stride()) for index in range(sets)]


class FreshSampler:
    """A sampler whose inputs are new for each sample, and that uses no set twice within one.

    On CUDA graphs nothing can be remembered from one replay to the next; there samples are what they were.
    """

    def __init__(self, inner: Sampler, refresh: Callable[[], None]) -> None:
        self._inner = inner
        self._refresh = refresh
        self.subject = inner.subject
        self.method = inner.method
        self.calls_per_sample = inner.calls_per_sample

    def warm_up(self) -> bool:
        """As the sampler's own."""
        return self._inner.warm_up()

    def prepare(self, *, short: bool) -> None:
        """As the sampler's own, on new values; then at most one pass over the sets."""
        self._refresh()
        self._inner.prepare(short=short)
        if not self._inner.method.startswith("CUDA graph"):
            self._inner.calls_per_sample = min(self._inner.calls_per_sample, self.subject.sets)
        self.method, self.calls_per_sample = self._inner.method, self._inner.calls_per_sample

    def sample(self, start: int) -> float:
        """Seconds per call on values that were never there before."""
        self._refresh()
        return self._inner.sample(start)


def fresh_sampler(pool: Pool) -> Callable[[Subject, torch.device], Sampler]:
    """What `clock.measure` makes its samplers with."""
    return lambda subject, device: FreshSampler(sampler_for(subject, device), pool.refresh)


def sets_for(bytes_per_set: int, seconds_per_call: float, device: torch.device, memory_limit_bytes: int) -> int:
    """How many input sets: enough to be cold, and on a CPU for one pass to last as long as a sample must.

    Fewer where a call takes so long that going through all of them once would.
    """
    sets = sets_needed(max(bytes_per_set, 1), device, memory_limit_bytes=memory_limit_bytes)
    if device.type == "cpu":
        wanted = min(math.ceil(SHORTEST_SAMPLE / seconds_per_call), MOST_SETS)
        sets = max(sets, min(wanted, memory_limit_bytes // max(bytes_per_set, 1)))
    return max(2, min(sets, math.ceil(MOST_WARM_UP / seconds_per_call)))


def seconds_of(call: Callable[[], object], device: torch.device, prepare: Callable[[], None]) -> float:
    """About how long one call takes: the shortest of five, or of as many as fit in `LONGEST_PASS`."""
    best = float("inf")
    begin = time.perf_counter()
    for _ in range(5):
        prepare()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        before = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        now = time.perf_counter()
        best = min(best, now - before)
        if now - begin > LONGEST_PASS:
            break
    return max(best, 1e-7)


def touched_bytes(arguments: Arguments, result: Any, function: Callable[..., Any]) -> int:
    """Bytes of the arguments, of a module's own tensors and of what came back, each tensor once.

    What a function holds by other means (a closure) is not seen, nor that it reads only a part of an argument.
    """
    own: list[Tensor] = []
    if isinstance(function, torch.nn.Module):
        own = [*function.parameters(), *function.buffers()]
    outputs = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
    found: dict[object, int] = {}
    for tensor in (*arguments.tensors, *own, *outputs):
        if tensor.layout == torch.strided:
            place = tensor.data_ptr(), tensor.shape, tensor.stride()
            found[place] = distinct_bytes(tensor.shape, tensor.stride(), tensor.dtype)
    return sum(found.values())


def _name(path: tuple[Any, ...]) -> str:
    """What a leaf is called: its first key says whether it stands by position or by name, its second where."""
    rest = keystr(path[2:])
    if path[0].idx == 0:
        return f"argument {path[1].idx}{rest}"
    return f"{path[1].key}{rest}"
