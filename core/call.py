"""The call path of all functions and operators: what a call needs is found out once for its kind, and cached.

The first call of a kind, who asks whom:

    rms_norm(x)           functional.py   names the arguments
    Operation.bind        operation.py    checks them, chooses the level (`Ladder.chosen`, levels.py), maps them
    OperatorCall.bind     operator.py     plans, or takes an autograd function where gradients are wanted
    Planned.plan_for      plans.py        imports the kernels' launcher, which decides block sizes and grid
    bind -> Launch        launch.py       compiles at its first launch

The third call: `rms_norm(x)` -> `Operation.__call__`, which is `CachedCall.__call__` below -> the `run` of the plan ->
`Launch`. With gradients `run` is the `apply` of an autograd function, which calls the plan. Its backward calls an
operator too, `rms_norm_backward` here: an `OperatorCall`, which caches its own calls in the same way.

The second call of a kind makes what is faster for all that follow: the guards below, and an autograd function of the
kind. A level that is no single operator, such as native, ends at its function.

Calls are of one kind if every tensor has the same class, dispatch keys, dtype, device, shape, strides and
`requires_grad`, and its memory starts at a multiple of 16 bytes in both or in neither; if every other argument has the
same type and value; and if gradients are recorded in both or in neither. Autocast, inference mode and transforms of
torch.func change the dispatch keys. For each kind a `CachedCall` holds a `Bound`: what computes the call, past all
checks and choices.

The kinds that occurred again most recently are compared in C++ by Dynamo's guards, in a fifth of the time that the
Python attributes take; `TensorGuards` is private to PyTorch. All other kinds are found in a dictionary.
"""

from __future__ import annotations

import functools
import math
import operator
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .call_kinds import has_plain_memory
from .direct_calls import was_freed

try:
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # the dictionary is left
    TensorGuards = None

# Private names of PyTorch.
_dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._functorch.peek_interpreter_stack
_trace = torch._C._get_tracing_state
_included, _excluded = torch._C._dispatch_tls_local_include_set, torch._C._dispatch_tls_local_exclude_set

_records = torch.is_grad_enabled
_sign = functools.partial(math.copysign, 1.0)

LOWEST = 2**40  # addresses below are rare; where a storage was freed, the address of a tensor is its offset alone
FAST = 6  # kinds that are compared by guards; scanning more takes longer than the dictionary
AGAIN = 16  # hits of a kind in the dictionary, after which guards compare it
MOST = 1024  # kinds of calls of one function, and plans of one launcher; beyond that all are forgotten

all_known: weakref.WeakSet[Any] = weakref.WeakSet()


class Bound(NamedTuple):
    """What computes calls of one kind.

    Attributes:
        run: computes the call; it holds no tensor with memory.
        take: makes the arguments of `run` of the call's and `constants`; None if they are the call's.
        constants: what `run` is given besides tensors of the call.
        result: makes the function's result of that of `run`; None if they are the same.
        observed: computes the call where a dispatch mode or a tracer wants to see operators, with the call's arguments.
        state: reads the global state that `run` depends on, of the arguments of `run`; None if there is none.
        value: that state when `run` was made.
        kept: whether it may be cached.
    """

    run: Callable[..., Any]
    take: Callable[[Sequence[Any]], tuple[Any, ...]] | None = None
    constants: tuple[Any, ...] = ()
    result: Callable[[Any], Any] | None = None
    observed: Callable[..., Any] | None = None
    state: Callable[..., Hashable] | None = None
    value: Hashable = None
    kept: bool = True

    def given(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of `run`, of those of a call."""
        return arguments if self.take is None else self.take((*arguments, *self.constants))

    def call(self, *arguments: Any) -> Any:
        """Compute a call of this kind."""
        found = self.run(*self.given(arguments))
        return found if self.result is None else self.result(found)

    def is_outdated(self, arguments: tuple[Any, ...]) -> bool:
        """Whether the state has changed on which `run` depends."""
        return self.state is not None and self.state(*self.given(arguments)) != self.value

    def resting_on(self, state: Callable[[], Hashable]) -> Bound:
        """The same where calls depend on more state."""
        own = self.state
        if own is None:
            return self._replace(state=lambda *given: state(), value=state())
        return self._replace(state=lambda *given: (state(), own(*given)), value=(state(), self.value))


class _Entry(NamedTuple):
    """A kind of calls that guards compare.

    Attributes:
        types: types of all arguments.
        scalars: extracts the arguments that are not tensors.
        values: their values.
        zeros: places of float zeros, which compare equal to -0.0.
        tensors: extracts the tensors, each once.
        same: extract tensors that are given again, and where they are given first; None if each is given once.
        matches: compares properties of the tensors.
        records: whether gradients are recorded; None where no tensor requires one.
        bound: computes such calls.
    """

    types: list[type]
    scalars: Callable[[Sequence[Any]], tuple[Any, ...]]
    values: tuple[Any, ...]
    zeros: tuple[int, ...]
    tensors: Callable[[Sequence[Any]], tuple[Any, ...]]
    same: tuple[Callable[[Sequence[Any]], tuple[Any, ...]], Callable[[Sequence[Any]], tuple[Any, ...]]] | None
    matches: Callable[..., bool]
    records: bool | None
    bound: Bound


class CachedCall:
    """A function of positional arguments that caches, by kind of call, how calls are computed.

    It asks `bind` twice for a kind: what takes long to make is made only for a kind that comes again.
    """

    def __init__(self) -> None:
        self._entries: tuple[_Entry, ...] = ()
        self._kinds: dict[Hashable, tuple[Bound, int]] = {}
        all_known.add(self)

    def bind(self, arguments: tuple[Any, ...], again: bool) -> Bound:
        """Check the arguments, all tensors of which are plain, and return what computes such calls.

        Args:
            arguments: of the call, which is neither traced, transformed nor watched.
            again: whether such a call came before, so that what takes long to make is worth it.
        """
        raise NotImplementedError

    def uncached(self, *arguments: Any) -> Any:
        """Compute any call, also one that is traced, transformed or watched, or has a tensor that is not plain."""
        raise NotImplementedError

    def __call__(self, *arguments: Any) -> Any:
        """Compute a call. Where its kind is known, it calls no other Python function: each takes 50 ns."""
        # Not torch.compiler.is_compiling: under non-strict export tensors are fake, and match nothing.
        if torch.compiler.is_dynamo_compiling() or forward_ad._current_level >= 0:
            return self.uncached(*arguments)
        types = [*map(type, arguments)]
        for entry in self._entries:
            if types != entry.types or entry.scalars(arguments) != entry.values:
                continue
            tensors = entry.tensors(arguments)
            for tensor in tensors:
                if tensor.is_nested:  # TensorGuards aborts the process when it reads its strides
                    return self._unmatched(arguments)
            # Transforms of torch.func and tracers are among the dispatch keys.
            if not entry.matches(*tensors) or (entry.records is not None and entry.records is not _records()):
                continue
            for tensor in tensors:
                address = tensor.data_ptr()
                if address & 15 or (address < LOWEST and was_freed(tensor)):
                    return self._unmatched(arguments)
            for place in entry.zeros:
                if _sign(arguments[place]) < 0.0:
                    return self._unmatched(arguments)
            if entry.same is not None and False in map(
                operator.is_, entry.same[0](arguments), entry.same[1](arguments)
            ):
                continue
            run, take, constants, result, observed, state, value, _ = entry.bound
            if _dispatch_modes() > 0:
                return (observed or self.uncached)(*arguments)
            given = arguments if take is None else take((*arguments, *constants))
            if state is not None and state(*given) != value:
                break
            return run(*given) if result is None else result(run(*given))
        return self._unmatched(arguments)

    def clear(self) -> None:
        """Forget all kinds."""
        self._entries, self._kinds = (), {}

    def _unmatched(self, arguments: tuple[Any, ...]) -> Any:
        """Compute a call that matches no entry."""
        special = _dispatch_modes() > 0 or _trace() is not None or _transforms() is not None
        geometry = None if special else geometry_of(arguments)
        if geometry is None:
            return self.uncached(*arguments)
        # Modes such as autocast and inference are in the sets of keys.
        key = (*geometry, _wanting(arguments), _included().raw_repr(), _excluded().raw_repr())
        found = self._kinds.get(key)
        if found is None or found[0].is_outdated(arguments):
            bound, count = self.bind(arguments, False), 0
        else:
            bound, count = found
            count += 1
            if count == 1:
                bound = self.bind(arguments, True)
            if count % AGAIN == 1 and bound.kept:
                self._compare(arguments, bound)
        if bound.kept:
            if len(self._kinds) >= MOST and key not in self._kinds:
                self._kinds.clear()
            self._kinds[key] = (bound, count)
        return bound.call(*arguments)

    def _compare(self, arguments: tuple[Any, ...], bound: Bound) -> None:
        """Let guards compare such calls from now on."""
        entry = _entry(arguments, bound)
        if entry is not None:
            self._entries = (entry, *self._entries[: FAST - 1])


def _entry(arguments: tuple[Any, ...], bound: Bound) -> _Entry | None:
    """Make the entry of a kind of calls; None if guards cannot compare it."""
    first: dict[int, int] = {}
    again = {place: first.setdefault(id(a), place) for place, a in enumerate(arguments) if isinstance(a, Tensor)}
    again = {place: earlier for place, earlier in again.items() if place != earlier}
    places = [*first.values()]
    scalar_places = [place for place, a in enumerate(arguments) if not isinstance(a, Tensor)]
    tensors, values = [arguments[place] for place in places], tuple(arguments[place] for place in scalar_places)
    if TensorGuards is None or not tensors or any(t.data_ptr() & 15 or was_freed(t) for t in tensors):
        return None
    zeros = [place for place in scalar_places if isinstance(arguments[place], float) and arguments[place] == 0.0]
    if any(_sign(arguments[place]) < 0.0 for place in zeros):
        return None
    sizes, strides = [list(t.shape) for t in tensors], [list(t.stride()) for t in tensors]
    guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    records = _records() if any(t.requires_grad for t in tensors) else None
    same = (getter([*again]), getter([*again.values()])) if again else None
    types, scalars = [*map(type, arguments)], getter(scalar_places)
    return _Entry(types, scalars, values, tuple(zeros), getter(places), same, guards.check, records, bound)


def geometry_of(arguments: Sequence[Any], plain: bool = True) -> tuple[Hashable, ...] | None:
    """The key of tensors and scalars for which kernels are planned; None if there is none.

    There is none with a list, a symbolic size, or, if `plain` is set, a tensor that is not plain. A tensor gives its
    shape, strides, dtype, device, and whether its memory begins at a multiple of 16 bytes or was freed. Zeros and NaN
    go by their names: NaN is never equal to itself, and -0.0 is equal to 0.0.
    """
    found: list[Hashable] = []
    for a in arguments:
        if isinstance(a, Tensor):
            if plain and (not has_plain_memory(a) or a.layout != torch.strided or a.is_nested):
                return None
            memory = None if was_freed(a) else a.data_ptr() & 15 != 0
            found.append((a.shape, a.stride(), a.dtype, a.device, memory))
        elif isinstance(a, float) and not (a < 0.0 or a > 0.0):
            found.append(repr(a))
        elif a is None or isinstance(a, (str, int, float)):
            found.append((type(a), a))
        elif isinstance(a, tuple) and {*map(type, a)} <= {int, type(None)}:
            found.append(a)
        else:
            return None
    return tuple(found)


def _wanting(arguments: tuple[Any, ...]) -> tuple[int | bool, ...]:
    """The number of distinct tensors, then of each whether it needs a gradient now."""
    tensors = [a for a in arguments if isinstance(a, Tensor)]
    return len({*map(id, tensors)}), *([t.requires_grad for t in tensors] if _records() else ())


def taker(arguments: Sequence[Any], wanted: Sequence[Any]) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """`Bound.take` and `Bound.constants` that pick `wanted` from the arguments of a call, which has no tensor twice.

    None if a wanted tensor is none of the call's.
    """
    places: list[int] = []
    constants: list[Any] = []
    given = {id(a): place for place, a in enumerate(arguments) if isinstance(a, Tensor)}
    for value in wanted:
        if not isinstance(value, Tensor):
            places.append(len(arguments) + len(constants))
            constants.append(value)
        elif id(value) in given:
            places.append(given[id(value)])
        else:
            return None
    return getter(places), tuple(constants)


def getter(places: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Like `operator.itemgetter`, but the result is a tuple for zero and one places too."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return operator.itemgetter(slice(places[0], places[0] + 1) if places else slice(0))


def clear_all() -> None:
    """Forget what is known of calls, and all plans: for tests that change what these rest on."""
    for known in all_known:
        known.clear()
