"""What was found out about a call, for all calls that are like it.

    found = memo.find(arguments)
    if found is None:
        found = memo.keep(arguments, look_at_everything(arguments))

Calls are alike where the tensors have the same classes, dispatch keys, dtypes, devices, shapes, strides and
`requires_grad`, memory that begins at a multiple of 16 bytes, and where all else is equal. Tensors are compared in C++
by the guards that Dynamo checks before it runs what it compiled: a fifth of the time that asking for all that takes.

Dispatch keys are those that a call would go by, so that a transform of torch.func, a tracer, autocast or inference mode
makes another call; a mode of `__torch_dispatch__` need not. A name that is private to PyTorch is used here.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # then nothing is remembered
    TensorGuards = None

SIZE = 6  # kinds of calls that are remembered: comparing with more takes longer than to look
PATIENCE = 64  # calls in a row that were like none, after which it rests
REST = 1024  # calls that it does not look at then
_all: list[Memo] = []


class _Known(NamedTuple):
    """A call that was looked at.

    Attributes:
        types: of its arguments.
        others: takes those that are no tensors out of a call.
        values: these.
        zeros: where these are 0.0, to which -0.0 is equal.
        tensors: takes the tensors out of a call.
        check: whether tensors are like its own.
        found: what was found out.
    """

    types: list[type]
    others: Callable[[Sequence[Any]], tuple[Any, ...]]
    values: tuple[Any, ...]
    zeros: tuple[int, ...]
    tensors: Callable[[Sequence[Any]], tuple[Any, ...]]
    check: Callable[..., bool]
    found: Any


class Memo:
    """The last kinds of calls of one function, and what was found out about them."""

    def __init__(self) -> None:
        self._known: tuple[_Known, ...] = ()
        self._patience, self._rest = PATIENCE, 0
        _all.append(self)

    def find(self, arguments: Sequence[Any]) -> Any:
        """What was kept for a call like this one; None if there was none."""
        if self._rest:
            self._rest -= 1
            return None
        types = [*map(type, arguments)]
        for known in self._known:
            if types == known.types and known.others(arguments) == known.values and _same(known, arguments):
                self._patience = PATIENCE
                return known.found
        return None

    def keep(self, arguments: Sequence[Any], found: Any) -> Any:
        """Remember `found`, which is returned, for calls like this one, which `find` did not know."""
        if self._rest:
            return found
        self._patience -= 1
        if self._patience <= 0:  # shapes that never come back
            self._patience, self._rest = PATIENCE, REST
        elif (new := _known(arguments, found)) is not None:
            self._known = (new, *self._known[: SIZE - 1])
        return found

    def forget(self) -> None:
        """Know nothing."""
        self._known = ()


def _same(known: _Known, arguments: Sequence[Any]) -> bool:
    """Whether tensors are alike, and zeros have the same sign."""
    tensors = known.tensors(arguments)
    for tensor in tensors:
        if tensor.is_nested:  # their strides end the process in the check
            return False
    if not known.check(*tensors):
        return False
    for tensor in tensors:
        address = tensor.data_ptr()
        if address & 15 or not address:
            return False
    return all(math.copysign(1.0, arguments[place]) > 0.0 for place in known.zeros) if known.zeros else True


def _known(arguments: Sequence[Any], found: Any) -> _Known | None:
    """How calls like this one are known; None if they cannot be."""
    places = [i for i, a in enumerate(arguments) if isinstance(a, Tensor)]
    tensors = [arguments[i] for i in places]
    if any(t.layout != torch.strided or t.is_nested for t in tensors):
        return None
    aligned = all(address and not address & 15 for address in (t.data_ptr() for t in tensors))
    zeros = tuple(i for i, a in enumerate(arguments) if type(a) is float and a == 0.0)
    if TensorGuards is None or not tensors or not aligned or any(math.copysign(1.0, arguments[i]) < 0.0 for i in zeros):
        return None
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    others = [i for i in range(len(arguments)) if i not in places]
    values = tuple(arguments[i] for i in others)
    return _Known([*map(type, arguments)], taker(others), values, zeros, taker(places), guards.check, found)


def taker(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """What takes these places out of a sequence, as a tuple however many they are."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    first = slice(places[0], places[0] + 1) if places else slice(0)
    return lambda sequence: tuple(sequence[first])


def forget_all() -> None:
    """Know nothing of any function: for tests that change what was found out."""
    for memo in _all:
        memo.forget()
