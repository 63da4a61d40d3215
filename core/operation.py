"""The functions of a package: a call is checked, its level chosen, and its launch bound, once for each kind of call.

    RMS_NORM = Operation(LADDER, "rms_norm", check=_check)
    ...
    return RMS_NORM(x, weight, eps, offset, casting, level)

Functions of a level that are one call of an operator follow from it, or are the mapping of their arguments to its own:

    @calls(operators.norm_act, first)
    def layer_norm(x, weight, bias, eps):
        return x, None, weight, bias, None, eps, 0.0, "layer", "identity"
"""

from __future__ import annotations

import functools
import inspect
import operator
import typing
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import adoption
from .call import Bound, CachedCall, taker
from .levels import Ladder, find_ladder
from .operator import OperatorCall


def first(results: Sequence[Any]) -> Any:
    """The first result of an operator."""
    return results[0]


def first_two(results: Sequence[Any]) -> tuple[Any, Any]:
    """The first two results of an operator."""
    return results[0], results[1]


IN_C: dict[Any, Callable[[Any], Any]] = {first: operator.itemgetter(0), first_two: operator.itemgetter(0, 1)}
"""The same without a frame of Python, for eager calls: Dynamo does not trace `operator.itemgetter`."""


class MappedCall:
    """A function of a level that is one call of an operator, see `calls`."""

    def __init__(
        self,
        run: OperatorCall,
        result: Callable[[Any], Any] | None,
        arguments_of: Callable[..., tuple[Any, ...]],
    ) -> None:
        functools.update_wrapper(self, arguments_of)
        self.run, self.result, self.arguments_of = run, result, arguments_of

    def __call__(self, *arguments: Any) -> Any:
        """Call the operator."""
        found = self.run(*self.arguments_of(*arguments))
        return found if self.result is None else self.result(found)


def calls(
    run: OperatorCall, result: Callable[[Any], Any] | None = None
) -> Callable[[Callable[..., tuple[Any, ...]]], MappedCall]:
    """Make a level's function of one that returns the arguments of an operator.

    Args:
        run: what `declare` returned.
        result: makes the function's result of the operator's, `first` or `first_two`; None if they are the same.

    The function that is decorated decides nothing by the numbers in tensors. Where it makes tensors it runs in every
    call.
    """
    return functools.partial(MappedCall, run, result)


def derived(
    run: Any, definition: Callable[..., Any], mapping: Callable[..., tuple[Any, ...]] | None = None
) -> MappedCall | None:
    """Level "triton" of a function, a call of an operator; None if `run` is not what `declare` returned.

    It returns the operator's first results; the annotations of the definition say how many. `mapping` converts the
    function's arguments to the operator's; without it, ImportError says where they differ, by name or order.
    """
    if not isinstance(run, OperatorCall):
        return None
    schema, given = run.operator._schema, list(inspect.signature(definition).parameters)
    if mapping is None and given != [a.name for a in schema.arguments]:
        how = "write the function of level 'triton' that maps them, in `MAPPED` of operators.py"
        raise ImportError(f"operator {schema} does not take ({', '.join(given)}) of {definition.__name__}: {how}")
    count = len(typing.get_args(typing.get_type_hints(definition)["return"])) or 1
    result = None if count == len(schema.returns) else (first, first_two)[count - 1]
    found = MappedCall(run, result, mapping or (lambda *arguments: arguments))
    functools.update_wrapper(found, definition)
    return found


class Prepared(NamedTuple):
    """A call whose arguments were checked.

    Attributes:
        level: as the user gave it, or as the arguments decide.
        arguments: of the level's function.
        features: that the call uses, of those that rows of the table and `Ladder.lacks` name.
        result: makes the function's result of the level's; None if they are the same.
        state: reads what else decides about the call, such as switches of PyTorch; None if nothing does.
        deciding: the arguments whose device and dtype decide whether a level can run, the principal one first; None for
            all tensors of floats and bools.
    """

    level: str | None
    arguments: tuple[Any, ...]
    features: tuple[str, ...] = ()
    result: Callable[[Any], Any] | None = None
    state: Callable[[], Hashable] | None = None
    deciding: tuple[Tensor | None, ...] | None = None


class Operation(CachedCall):
    """A function of a package at all levels; it is called with the arguments of the levels' functions, then the level.

    Args:
        ladder: the levels of the package.
        name: of the function.
        check: raises for wrong arguments, of which it may read everything but the numbers in tensors.
        prepare: where that is not all: of the level and the arguments makes the call of a level's function.
    """

    def __init__(
        self,
        ladder: Ladder,
        name: str,
        check: Callable[..., None] | None = None,
        *,
        prepare: Callable[..., Prepared] | None = None,
    ) -> None:
        super().__init__()
        self.ladder, self.name = ladder, name
        self.check, self.prepare = check, prepare
        ladder.operations[name] = self

    def __reduce__(self) -> Any:
        """Pickled by name, as by cloudpickle: unpickling returns the object of the package there."""
        return find_operation, (adoption.PACKAGE, self.name)

    def uncached(self, *arguments: Any) -> Any:
        """Check the arguments, choose the level and call its function.

        Raises:
            TypeError: as `check`.
            ValueError: as `check`; no such level, or not of this function.
            RuntimeError: the level lacks a feature, or cannot run on this device or dtype, with the reason.
        """
        prepared = self._prepared(arguments)
        tensors = _deciding(prepared)
        function = self.ladder.resolve(self.name, prepared.level, *tensors, features=prepared.features)
        found = function(*prepared.arguments)
        return found if prepared.result is None else prepared.result(found)

    def level_of(self, *arguments: Any) -> str:
        """The level that such a call takes; errors as `uncached`."""
        prepared = self._prepared(arguments)
        tensors = _deciding(prepared)
        return self.ladder.chosen(self.name, prepared.level, *tensors, features=prepared.features)

    def bind(self, arguments: tuple[Any, ...], again: bool) -> Bound:
        """Check the arguments, choose the level, and bind its function; errors as `uncached`."""
        arguments = _each_once(arguments)
        prepared = self._prepared(arguments)
        tensors = _deciding(prepared)
        level = self.ladder.chosen(self.name, prepared.level, *tensors, features=prepared.features)
        principal = tensors[0]
        assert principal is not None
        # On a CPU the level depends on TRITON_INTERPRET, which may change.
        kept = level != "triton" or principal.is_cuda
        taken = taker(arguments, prepared.arguments) if prepared.result is None else None
        if taken is None:  # each call makes a tensor, or the result is there already
            return Bound(self.uncached, kept=kept)
        function = self.ladder.function(self.name, level)
        plain = Bound(function, *taken, kept=kept)
        if isinstance(function, MappedCall):
            given = function.arguments_of(*prepared.arguments)
            taken = taker(arguments, given)
            if taken is not None:
                take, constants = taken
                bound = function.run.bind(given, again, IN_C.get(function.result, function.result))
                plain = bound._replace(take=take, constants=constants, observed=plain.call, kept=kept)
        return plain if prepared.state is None else plain.resting_on(prepared.state)

    def _prepared(self, arguments: tuple[Any, ...]) -> Prepared:
        *given, level = arguments
        if self.prepare is not None:
            return self.prepare(level, *given)
        if self.check is not None:
            self.check(*given)
        return Prepared(level, tuple(given))


def _deciding(prepared: Prepared) -> Sequence[Tensor | None]:
    if prepared.deciding is not None:
        return prepared.deciding
    tensors = [a for a in prepared.arguments if isinstance(a, Tensor)]
    return [t for t in tensors if t.dtype.is_floating_point or t.dtype == torch.bool]


def _each_once(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments, with views in the place of tensors that are given again, so that each has one place."""
    seen: set[int] = set()
    found = []
    for a in arguments:
        found.append(a.view_as(a) if isinstance(a, Tensor) and id(a) in seen else a)
        seen.add(id(a))
    return tuple(found)


def find_operation(package: str, name: str) -> Operation:
    """The function of that name of the package whose copy of the core this is."""
    return find_ladder(package).operations[name]
