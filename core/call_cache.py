"""Cache of per-call work, such as argument checks and launch plans, keyed by tensor metadata and scalar values.

    found = cache.lookup(arguments)
    if found is None:
        found = cache.store(arguments, expensive(arguments))

An entry matches a call if every tensor has the same class, dispatch keys, dtype, device, shape, strides and
`requires_grad` and its memory starts at a multiple of 16 bytes, and if every other argument has the same type and
value. The tensors are compared in C++ by Dynamo's guards, in a fifth of the time that the Python attributes take.

The guards compare the dispatch keys that the call would use, so a call under a torch.func transform, a tracer, autocast
or inference mode does not match an entry from outside. `__torch_dispatch__` modes are not always visible in the keys:
the caller checks for those. `TensorGuards` is private to PyTorch.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .direct_calls import was_freed

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # disables the cache
    TensorGuards = None

_has_storage = torch._C._has_storage

PLAIN = (Tensor, torch.nn.Parameter)
"""Classes without `__torch_dispatch__`. Others, such as FakeTensor, may have no memory or symbolic shapes."""
LOWEST = 2**40  # addresses below are rare; where a storage was freed, the address of a tensor is its offset alone
SIZE = 6  # entries; scanning more takes longer than the work that is saved
PATIENCE = 64  # consecutive misses before the cache pauses, where shapes never repeat
PAUSE = 1024  # calls for which it is paused
_caches: list[CallCache] = []


class _Entry(NamedTuple):
    """One cached call.

    Attributes:
        types: types of all arguments.
        scalars: extracts the arguments that are not tensors.
        values: their values.
        zeros: places of float zeros, which compare equal to -0.0.
        tensors: extracts the tensors.
        matches: compares tensor metadata.
        found: the cached result.
    """

    types: list[type]
    scalars: Callable[[Sequence[Any]], tuple[Any, ...]]
    values: tuple[Any, ...]
    zeros: tuple[int, ...]
    tensors: Callable[[Sequence[Any]], tuple[Any, ...]]
    matches: Callable[..., bool]
    found: Any


class CallCache:
    """The most recent kinds of calls of one function, each with its cached result."""

    def __init__(self) -> None:
        self._entries: tuple[_Entry, ...] = ()
        self._patience, self._pause = PATIENCE, 0
        _caches.append(self)

    def lookup(self, arguments: Sequence[Any]) -> Any:
        """Return the cached result of a matching call, or None."""
        if self._pause > 0:  # threads may take it below zero
            self._pause -= 1
            return None
        types = [*map(type, arguments)]
        for entry in self._entries:
            if types == entry.types and entry.scalars(arguments) == entry.values and _matches(entry, arguments):
                self._patience = PATIENCE
                return entry.found
        return None

    def store(self, arguments: Sequence[Any], found: Any) -> Any:
        """Cache `found` for calls like this one, for which `lookup` returned None, and return it."""
        if self._pause > 0:
            return found
        self._patience -= 1
        if self._patience <= 0:
            self._patience, self._pause = PATIENCE, PAUSE
        elif (new := _entry(arguments, found)) is not None:
            self._entries = (new, *self._entries[: SIZE - 1])
        return found

    def clear(self) -> None:
        """Remove all entries."""
        self._entries = ()


def _matches(entry: _Entry, arguments: Sequence[Any]) -> bool:
    """Compare the tensors with those of the entry, and the signs of zeros."""
    tensors = entry.tensors(arguments)
    for tensor in tensors:
        if tensor.is_nested:  # TensorGuards aborts the process when it reads the strides of a nested tensor
            return False
    if not entry.matches(*tensors):
        return False
    for tensor in tensors:
        address = tensor.data_ptr()
        if address & 15 or (address < LOWEST and was_freed(tensor)):
            return False
    for place in entry.zeros:  # noqa: SIM110 (a generator would take as long as all the rest)
        if math.copysign(1.0, arguments[place]) < 0.0:
            return False
    return True


def _entry(arguments: Sequence[Any], found: Any) -> _Entry | None:
    """Make the entry of a call; None if the call cannot be cached."""
    places = [i for i, a in enumerate(arguments) if isinstance(a, Tensor)]
    scalar_places = [i for i in range(len(arguments)) if i not in places]
    tensors, values = [arguments[i] for i in places], tuple(arguments[i] for i in scalar_places)
    if TensorGuards is None or not tensors or not all(map(_is_cacheable, tensors)):
        return None
    zeros = tuple(i for i, a in enumerate(arguments) if isinstance(a, float) and a == 0.0)
    # A list could change after it was compared.
    if any(math.copysign(1.0, arguments[i]) < 0.0 for i in zeros) or any(isinstance(v, list) for v in values):
        return None
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    types = [*map(type, arguments)]
    return _Entry(types, getter(scalar_places), values, zeros, getter(places), guards.check, found)


def _is_cacheable(tensor: Tensor) -> bool:
    if type(tensor) not in PLAIN or not _has_storage(tensor):  # batched tensors and dead wrappers have none
        return False
    if tensor.layout != torch.strided or tensor.is_nested:
        return False
    return tensor.data_ptr() & 15 == 0 and not was_freed(tensor)


def getter(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Like `operator.itemgetter`, but the result is a tuple for zero and one places too."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    first = slice(places[0], places[0] + 1) if places else slice(0)
    return lambda sequence: tuple(sequence[first])


def clear_all() -> None:
    """Clear every cache: for tests that change what cached results depend on."""
    for cache in _caches:
        cache.clear()
