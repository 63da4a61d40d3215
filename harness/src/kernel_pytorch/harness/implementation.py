"""Implementations of an operation: the levels of a public function, and functions of other libraries."""

from __future__ import annotations

import enum
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch

from kernel_pytorch.harness.tensors import as_tuple


class Level(enum.Enum):
    """How an implementation is written. The order is the ladder, from the definition to CUDA C++."""

    REFERENCE = "reference"
    NATIVE = "native"
    TORCHSCRIPT = "torchscript"
    COMPILE = "compile"
    TRITON = "triton"
    CUDA = "cuda"
    PEER = "peer"


OUR_KERNELS = (Level.TRITON.value, Level.CUDA.value)

BUDGET_FACTOR = 2.0
"""How many times the reference's own error is allowed, unless a declaration gives a reason for more."""


@dataclass(frozen=True)
class Implementation:
    """One way of computing an operation: a function that takes the operation's arguments by position.

    Attributes:
        name: for tables; a peer is named `peer:<library>`.
        level: the rung of the ladder.
        target: import string `module:function`, resolved only when the implementation is run, so that a declaration
            imports no optional module.
        budget_factor: how many times the reference's own error is allowed; above 2 only with a reason, never above 4.
        budget_reason: why `budget_factor` is above 2.
        unsupported: row of the support table, or "<row> on cuda", "<row> on cpu" -> why this implementation does not
            support it. A row that is not named must work; a named one must fail, unless it is a promise about all calls
            (determinism, batch invariance).
        partial: whether implementations of this class may refuse a case by NotImplementedError: functions of other
            libraries, and single kernels among which a launcher chooses. Their features are not tested. Levels compute
            every case.
    """

    partial: ClassVar[bool] = False

    name: str
    level: Level
    target: str
    budget_factor: float = BUDGET_FACTOR
    budget_reason: str = ""
    unsupported: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not 0.0 < self.budget_factor <= 4.0:
            raise ValueError(f"{self.name}: budget_factor is {self.budget_factor}; allowed is above 0 and at most 4")
        if self.budget_factor > BUDGET_FACTOR and not self.budget_reason:
            raise ValueError(f"{self.name}: budget_factor {self.budget_factor} is above 2 and needs budget_reason")

    def why_absent(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why it cannot run on that device in that dtype though its level can; None if it can."""
        return None

    def load(self) -> Callable[..., Any]:
        """Import the function, which takes all arguments by position, in the order of `signature`.

        ImportError and AttributeError pass through: they are the reason it cannot run.
        """
        return imported(self.target)

    def bound_to(self, arguments: Sequence[Any]) -> Callable[[], Any]:
        """Bind the function to these arguments by `functools.partial` alone: this call is timed."""
        return partial(self.load(), *arguments)

    def definition(self) -> Callable[..., Any]:
        """Return the function that computes the truth, if this is the reference; called as the one of `load`."""
        return self.load()

    def signature(self) -> inspect.Signature:
        """The arguments of the operation."""
        return inspect.signature(self.load())


@dataclass(frozen=True)
class PublicLevel(Implementation):
    """A level of a public function, called as users call it: `function(..., level=name)`.

    Attributes:
        written: names of the arguments that a call writes into: what it leaves in copies of them are further results.
    """

    written: tuple[str, ...] = ()

    def load(self) -> Callable[..., Any]:
        """Import the public function, wrapped to take the operation's arguments by position."""
        function, count, names = self._parts()
        level = self.level.value

        def call(*values: Any) -> Any:
            return function(*values[:count], **dict(zip(names, values[count:], strict=True)), level=level)

        return self._on_copies(call)

    def bound_to(self, arguments: Sequence[Any]) -> Callable[[], Any]:
        """Bind the public function to these arguments by `functools.partial` alone; it writes into them themselves."""
        function, count, names = self._parts()
        named = dict(zip(names, arguments[count:], strict=True))
        call = partial(function, *arguments[:count], **named, level=self.level.value)
        written = [a for a, is_written in zip(arguments, self._is_written(), strict=True) if is_written]
        return partial(_and_written, call, written) if written else call

    def definition(self) -> Callable[..., Any]:
        """Return the level itself: errors of the public function must not become part of the truth."""
        function, names = imported(self.level_target()), list(self.signature().parameters)
        return self._on_copies(lambda *values: function(**dict(zip(names, values, strict=True))))

    def _is_written(self) -> list[bool]:
        # Not places: where sizes are dynamic, Dynamo finds no integer in a list of them.
        return [name in self.written for name in self.signature().parameters]

    def _on_copies(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that leaves its arguments alone, and returns what the given one has written too."""
        is_written = self._is_written()

        def call(*values: Any) -> Any:
            own = [value.clone() if w else value for value, w in zip(values, is_written, strict=True)]
            return _and_written(partial(function, *own), [a for a, w in zip(own, is_written, strict=True) if w])

        return call if self.written else function

    def level_target(self) -> str:
        """Import string of the level itself, by convention `<package of the function>.levels.<level>:<function>`.

        It takes the arguments of the public function by the same names.
        """
        function = imported(self.target)
        return f"{function.__module__.rpartition('.')[0]}.levels.{self.level.value}:{function.__name__}"

    def signature(self) -> inspect.Signature:
        """The arguments of the public function but `level`."""
        public = inspect.signature(imported(self.target))
        return public.replace(parameters=[p for name, p in public.parameters.items() if name != "level"])

    def _parts(self) -> tuple[Callable[..., Any], int, list[str]]:
        """Return the public function, how many arguments it takes by position, and the names of the others."""
        names = [name for name, p in self.signature().parameters.items() if p.kind is p.KEYWORD_ONLY]
        return imported(self.target), len(self.signature().parameters) - len(names), names


def _and_written(call: Callable[[], Any], written: Sequence[Any]) -> tuple[Any, ...]:
    return *as_tuple(call()), *written


def imported(target: str) -> Any:
    """Import what the string `module:attribute` names. ImportError and AttributeError pass through."""
    module_name, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module_name), attribute)
