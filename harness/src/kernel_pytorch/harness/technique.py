"""The declaration of a technique; everything else in the harness follows from it.

A `Technique` holds `Operation`s; an operation names a public function and its levels, and holds the inputs, the cost
and two grids of `Case`s: awkward shapes for the tests, shapes of published models for the benchmarks.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kernel_pytorch.harness.adversaries import COMMON_OFFSET
from kernel_pytorch.harness.cases import Case, Cost, Direction, Grid, Point, grid, point
from kernel_pytorch.harness.contracts import KernelContract
from kernel_pytorch.harness.exemptions import BACKWARD_TIME, CASE, GRADIENTS, Exemption, unsupported_rows
from kernel_pytorch.harness.implementation import BUDGET_FACTOR, Implementation, Level, PublicLevel, imported

__all__ = [
    "Case",
    "Cost",
    "Direction",
    "Exemption",
    "Given",
    "Grid",
    "Implementation",
    "KernelContract",
    "Level",
    "Operation",
    "Point",
    "Technique",
    "grid",
    "point",
]

Given = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a call, by position and by name."""


ROLES = ("data", "shift invariant", "rows", "constant", "written")
"""What `Operation.roles` may say of arguments."""


@dataclass(frozen=True)
class Operation:
    """One mathematical function: a public function of a package, which is verified, timed and tested for support.

    Attributes:
        name: the function's name; also the operator's name in `torch.ops.kernel_pytorch`.
        levels: names of levels of the public function, the reference among them; an `Implementation` for each function
            of another library, and for the levels of an operation without a public function that takes `level=`.
        inputs: `(case, generator) -> (args, kwargs)` of the public function without `level`, on the generator's device.
            Floating-point tensors receive gradients. The docstring gives their shapes.
        cost: `(case, direction) -> Cost`.
        test_grid: awkward shapes, each with its reason; always some float32.
        bench_grid: shapes of named published models.
        function: import string `module:function` of the public function, which takes `level=`; "" if there is none.
        budgets: by level, how many times the reference's own error is allowed where that is not twice, and why.
        exemptions: properties that do not hold or are not checked, with reasons, where they differ from those of
            `kernel_pytorch.harness.exemptions.COMMON`. Core cases have no feature from which a level is exempt.
        roles: names of arguments by role. "data": adversarial inputs are planted in them, and they have a row per token
            or so, as parameters have not. "shift invariant": data of which only the differences in a row matter, as in
            a softmax; a common offset may cost no digits. "rows": not data, but with a row for each row of the data, as
            targets of tokens. "constant": floating-point arguments without a gradient at any level, as positions.
            "written": tensors that a call of the public function writes into, as caches; they are results too.
        averaged: `arguments by name -> arguments by name` that give, element by element, what the given ones give the
            mean of; or None where they give no mean. A mean may err as far as what it is the mean of, because the
            reference's own error of a single number is noise.
        summands: `arguments by name -> {name: count}`: how many terms the gradient of an argument is the sum of, where
            the shapes of a broadcast argument and the outputs do not show it: the rows of a matrix product.
        real_input: `(activations, dtype) -> (args, kwargs)` made of `(tokens, channels)` float32 hidden states with the
            outlying channels of a trained network (`adversaries.imitated_activations`); None if the operation has no
            such input.
        known: results that do not come from the definition, and that it must give, as `(args, kwargs, result)`; a list
            is a tensor of float64, a tuple several results.
        in_parts: the definition computed part by part, called with the arguments by name, for cases whose float64 graph
            does not fit on the GPU; None if there is no such function.
    """

    name: str
    levels: Sequence[str | Implementation]
    inputs: Callable[[Case, torch.Generator], Given]
    cost: Callable[[Case, Direction], Cost]
    test_grid: Grid
    bench_grid: Grid
    function: str = ""
    budgets: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    exemptions: Sequence[Exemption] = ()
    roles: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    averaged: Callable[[dict[str, Any]], dict[str, Any] | None] = lambda arguments: None
    summands: Callable[[dict[str, Any]], Mapping[str, int]] = lambda arguments: {}
    real_input: Callable[[torch.Tensor, torch.dtype], Given] | None = None
    known: Sequence[tuple[tuple[Any, ...], Mapping[str, Any], Any]] = ()
    in_parts: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        self._check_levels()
        self._check_arguments()
        if torch.float32 not in {case.dtype for case in self.test_grid}:
            raise ValueError(f"{self.name}: test_grid has no float32 case; low precision hides wrong formulas")
        core = [p for p in self.test_grid.points if p.core]
        if not core:
            raise ValueError(f"{self.name}: test_grid has no core case; torch.compile and adversaries run on no other")
        features = [name for each in self.exemptions for name in each.what if name.startswith(CASE)]
        for p in core:
            if asked := sorted(name for name in features if p.sizes.get(name.removeprefix(CASE))):
                raise ValueError(f"{self.name}: core case {p.name!r} has {asked[0]}, from which a level is exempt")

    def _check_levels(self) -> None:
        of_function = [each for each in self.levels if isinstance(each, str)]
        if of_function and not self.function:
            raise ValueError(
                f"{self.name}: levels names {of_function[0]!r}, which is a level of function, and none is given"
            )
        if [i.level for i in self.implementations].count(Level.REFERENCE) != 1:
            raise ValueError(f"{self.name}: levels must hold exactly one {Level.REFERENCE.value!r} level")
        names = [i.name for i in self.implementations]
        if len(set(names)) != len(names):
            raise ValueError(f"{self.name}: two implementations share a name: {', '.join(names)}")
        named = {level for each in self.exemptions for level in each.levels or ()}
        instead = {each.instead for each in self.exemptions if each.instead}
        for what, strangers in (
            ("budgets", set(self.budgets) - set(of_function)),
            # A list of exemptions may serve several operations, some of which do not have all levels.
            ("exemptions", (named - set(names) - {level.value for level in Level}) | (instead - set(names))),
        ):
            if strangers:
                raise ValueError(
                    f"{self.name}: {what} names {', '.join(sorted(strangers))}; levels are {', '.join(names)}"
                )

    def _check_arguments(self) -> None:
        if strangers := set(self.roles) - set(ROLES):
            raise ValueError(f"{self.name}: roles names {', '.join(sorted(strangers))}; allowed are {', '.join(ROLES)}")
        exempt = {name for each in self.exemptions for name in each.arguments}
        for what, given in (("exemptions", exempt), ("shift invariant", set(self.shift_invariant))):
            if strangers := given - set(self.adversarial):
                among = ", ".join(self.adversarial) or "none"
                raise ValueError(f"{self.name}: {what} names {', '.join(sorted(strangers))}; data are {among}")

    @property
    def adversarial(self) -> tuple[str, ...]:
        """Names of the data, which adversarial inputs are planted in."""
        return self.roles.get("data", ())

    @property
    def shift_invariant(self) -> tuple[str, ...]:
        """Names of the data of which only the differences in a row matter."""
        return self.roles.get("shift invariant", ())

    @property
    def with_rows(self) -> tuple[str, ...]:
        """Names of other arguments with a row for each row of the data."""
        return self.roles.get("rows", ())

    @property
    def constants(self) -> tuple[str, ...]:
        """Names of floating-point arguments without a gradient."""
        return self.roles.get("constant", ())

    @property
    def differentiable(self) -> bool:
        """Whether it has gradients."""
        return not self._is_exempt(GRADIENTS)

    @property
    def directions(self) -> tuple[Direction, ...]:
        """Passes that benchmarks time by default."""
        if not self.differentiable:
            return (Direction.FORWARD,)
        return Direction.FORWARD, Direction.BOTH if self._is_exempt(BACKWARD_TIME) else Direction.BACKWARD

    def _is_exempt(self, what: str) -> bool:
        return any(what in each.what for each in self.exemptions)

    @functools.cached_property
    def implementations(self) -> tuple[Implementation, ...]:
        """All levels and peers."""
        return tuple(self._level(each) if isinstance(each, str) else each for each in self.levels)

    def _level(self, name: str) -> PublicLevel:
        level, (factor, reason) = Level(name), self.budgets.get(name, (BUDGET_FACTOR, ""))
        rows, written = unsupported_rows(level, self.exemptions), self.roles.get("written", ())
        return PublicLevel(name, level, self.function, factor, reason, rows, written)

    @property
    def reference(self) -> Implementation:
        """The definition."""
        return next(i for i in self.implementations if i.level is Level.REFERENCE)

    def implementation(self, name: str) -> Implementation:
        """The implementation of that name. Raises KeyError naming what exists."""
        for candidate in self.implementations:
            if candidate.name == name:
                return candidate
        raise KeyError(f"{self.name} has no level {name!r}; it has {', '.join(i.name for i in self.implementations)}")

    def planted_in(self, adversary: str, dtype: torch.dtype, device: str) -> tuple[str, ...]:
        """Names of the arguments that get this adversary there; none if all of them are exempt."""
        candidates = self.shift_invariant if adversary == COMMON_OFFSET else self.adversarial
        covering = [e for e in self.exemptions if e.levels is None and e.covers(adversary, dtype, device)]
        return tuple(name for name in candidates if not any(name in each.arguments for each in covering))

    def exemption_of(self, implementation: str, adversary: str, dtype: torch.dtype, device: str) -> Exemption | None:
        """The exemption of this implementation from this adversary there, or None."""
        about = [e for e in self.exemptions if e.levels is not None and implementation in e.levels]
        return next((e for e in about if e.covers(adversary, dtype, device)), None)

    def why_lacking(self, implementation: str, case: Case) -> str | None:
        """Why this implementation has no such case, or None if it has."""
        for each in self.exemptions:
            for name in (n.removeprefix(CASE) for n in each.what if n.startswith(CASE)):
                if (each.levels is None or implementation in each.levels) and case.sizes.get(name):
                    return f"{name}: {each.reason}"
        return None

    def signature(self) -> list[str]:
        """Names of the arguments, in the order in which the harness keeps their values: the public function's."""
        return list(self.reference.signature().parameters)

    def arguments(self, case: Case, generator: torch.Generator) -> tuple[Any, ...]:
        """The values of all arguments on a case, in the order of `signature`."""
        return self.bound(self.inputs(case, generator), "inputs")

    def real_arguments(self, activations: torch.Tensor, dtype: torch.dtype) -> tuple[Any, ...]:
        """The same, made of hidden states."""
        assert self.real_input is not None
        return self.bound(self.real_input(activations, dtype), "real_input")

    def bound(self, given: Given, what: str) -> tuple[Any, ...]:
        """The values of all arguments of a call, in the order of `signature`; `what` has given them."""
        signature = self.reference.signature()
        try:
            args, kwargs = given
            bound = signature.bind(*args, **kwargs)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"{self.name}: {what} must return (args, kwargs) of {self.reference.target}{signature}: {error}"
            ) from None
        bound.apply_defaults()
        return tuple(bound.arguments.values())


@dataclass(frozen=True)
class Technique:
    """The declaration of one package.

    Attributes:
        name: the package's folder, distribution suffix and entry point.
        title: one line for tables and pages.
        paper: address of the paper that defines it.
        operations: the functions.
        levels: import string of an object or a module that says which level runs where:
            `default(operation, device, dtype) -> str` and `unavailable(level, device, dtype) -> str | None`; optionally
            `describe(level, device) -> str`.
        replacements: name of the module that puts the functions into models: `patch(model)` in place, with what was
            replaced and why the rest was not, and `unpatch(model)`, the way back. None: there is no such module.
        decoder: import string of a class that decodes with causal models: it is called with a model, `batch_size` and
            `max_length`, and has `start(input_ids)`, `step()`, `tokens` and `logits`. None: there is no such class.
        contracts: by kernel name, the limits of its compiled code; the others have the default contract.
            For instantiations of a CUDA kernel, "name<pattern>" goes before "name": "scale_kernel<*, 1>".
        slow_defaults: cases of benchmarks in which the default may be slower than another level, with the reasons, by
            "operation: label of the case"; see `defaults`.
    """

    name: str
    title: str
    paper: str
    operations: Sequence[Operation]
    levels: str
    replacements: str | None = None
    decoder: str | None = None
    contracts: Mapping[str, KernelContract] = field(default_factory=dict)
    slow_defaults: Mapping[str, str] = field(default_factory=dict)

    def ladder(self) -> Any:
        """Import the object or module `levels`."""
        return imported(self.levels) if ":" in self.levels else importlib.import_module(self.levels)

    def patch(self, model: torch.nn.Module, *, gpu_bound: bool = False) -> Any:
        """Put the functions into a model, in place, and return the package's report.

        Args:
            model: whose modules are patched.
            gpu_bound: whether to replace also parts whose replacement is faster only if the GPU is the limit.
        """
        if not self.replacements:
            return None
        replace = importlib.import_module(self.replacements).patch
        options = {"gpu_bound": True} if gpu_bound and "gpu_bound" in inspect.signature(replace).parameters else {}
        return replace(model, **options)

    def unpatch(self, model: torch.nn.Module) -> None:
        """Undo `patch`."""
        if self.replacements:
            importlib.import_module(self.replacements).unpatch(model)

    def operation(self, name: str) -> Operation:
        """The operation of that name. Raises KeyError naming what exists."""
        for candidate in self.operations:
            if candidate.name == name:
                return candidate
        raise KeyError(f"{self.name} has no operation {name!r}; it has {', '.join(o.name for o in self.operations)}")
