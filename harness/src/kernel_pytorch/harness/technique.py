"""The declaration that an author writes; everything else in the harness follows from it.

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

from kernel_pytorch.harness.adversaries import ADVERSARIES, COMMON_OFFSET, IMITATED, LAYOUTS, REAL
from kernel_pytorch.harness.cases import Case, Cost, Direction, Grid, Point, grid, point, short
from kernel_pytorch.harness.contracts import KernelContract
from kernel_pytorch.harness.exemptions import unsupported_rows
from kernel_pytorch.harness.implementation import (
    BUDGET_FACTOR,
    OUR_KERNELS,
    Implementation,
    Level,
    PublicLevel,
    imported,
)

__all__ = [
    "Case",
    "Cost",
    "Direction",
    "Given",
    "Grid",
    "Implementation",
    "KernelContract",
    "Level",
    "Operation",
    "Point",
    "Spared",
    "Technique",
    "grid",
    "point",
]

Given = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of a call, by position and by name."""


@dataclass(frozen=True)
class Spared:
    """Adversarial inputs that some arguments are spared, since no level could give a right answer to them.

    Layouts are never spared: they change no number.

    Attributes:
        arguments: names, out of `Operation.adversarial`; the others get the adversary all the same.
        adversaries: what they are spared, keys of `kernel_pytorch.harness.adversaries.ADVERSARIES`;
            where `levels` are named, imitated and real activations too.
        reason: why the answers would say nothing; `kernel-pytorch verify` prints it.
        dtypes: in which they are spared; None for all.
        devices: kinds of device on which they are spared; None for all.
        levels: names of implementations that are not held against these adversaries, because PyTorch's own operators,
            which they are made of, differ from the definition there; None where the arguments are spared them at all
            levels. Kernels of ours are named only with `instead`: they pass on what the definition does.
        instead: name of the implementation whose error is the budget of the named levels there, times two; "" to leave
            them out.
    """

    arguments: tuple[str, ...]
    adversaries: tuple[str, ...]
    reason: str
    dtypes: tuple[torch.dtype, ...] | None = None
    devices: tuple[str, ...] | None = None
    levels: tuple[str, ...] | None = None
    instead: str = ""

    def __post_init__(self) -> None:
        for level in self.levels or ():
            if level in OUR_KERNELS and not self.instead:
                raise ValueError(f"spared: levels names {level!r}; kernels of ours are spared nothing on their own")
        allowed = [name for name in ADVERSARIES if name not in LAYOUTS] + ([IMITATED, REAL] if self.levels else [])
        for name in self.adversaries:
            if name not in allowed:
                raise ValueError(
                    f"spared: {name!r} is no adversary that can be spared; allowed are {', '.join(allowed)}"
                )
        if not self.reason:
            raise ValueError(f"spared: {', '.join(self.adversaries)} in {', '.join(self.arguments)} needs a reason")

    def covers(self, adversary: str, dtype: torch.dtype, device: str) -> bool:
        """Whether the arguments are spared this adversary in this dtype on this kind of device."""
        return (
            adversary in self.adversaries
            and (self.dtypes is None or dtype in self.dtypes)
            and (self.devices is None or device in self.devices)
        )

    def __str__(self) -> str:
        dtypes = "" if self.dtypes is None else f" in {', '.join(short(dtype) for dtype in self.dtypes)}"
        dtypes += "" if self.levels is None else f" at {', '.join(self.levels)}"
        dtypes += f" (checked against {self.instead} instead)" if self.instead else ""
        devices = "" if self.devices is None else f" on {', '.join(self.devices)}"
        return f"{', '.join(self.arguments)} spared {', '.join(self.adversaries)}{dtypes}{devices}: {self.reason}"


@dataclass(frozen=True)
class Operation:
    """One mathematical function: a public function of a package, which is what is verified, timed and asked about.

    Attributes:
        name: the function's name; also the operator's name in `torch.ops.kernel_pytorch`.
        levels: names of levels of the public function, the reference among them. What is no level of it stands here as
            an `Implementation`: another library's function, or every level of an operation without a public function
            that takes `level=`.
        inputs: `(case, generator) -> (args, kwargs)` of the public function without `level`, on the generator's device.
            Tensors that are floating point receive gradients, if `differentiable`. The docstring gives their shapes.
        cost: `(case, direction) -> Cost`.
        test_grid: awkward shapes, each with its reason; always some float32.
        bench_grid: shapes of named published models.
        function: import string `module:function` of the public function, which takes `level=`; "" where there is none.
        budgets: by level, how many times the reference's own error is allowed where that is not twice, and why.
        unsupported: by level, the rows of the support table in which it says no, with reasons, as far as they differ
            from those of `kernel_pytorch.harness.exemptions`; None for a row that works although it is named there.
        lacks: by level, the sizes of cases that name a feature which the level does not have, with reasons: it is not
            verified or timed on those cases. Core cases are for all levels and have no such feature.
        adversarial: names of the arguments that adversarial inputs are planted in (the data, not the parameters).
        with_rows: names of other arguments that have a row for each row of the data: the targets of tokens.
        spared: which of the adversarial ones are not planted with which adversary, and why.
        shift_invariant: names of the adversarial arguments of which only the differences in a row matter, as in a
            softmax: they get a common offset, and may lose no digits to it.
        constants: names of the floating-point arguments that have no gradient, at any level: positions and the like.
        averaged: `arguments by name -> arguments by name` that give, element by element, what the given ones give the
            mean of; or None where they give no mean. A mean may err as far as what it is of: the reference's own error
            of one number is luck, and no measure.
        summands: `arguments by name -> {name: count}`: how many terms the gradient of an argument is the sum of, where
            that is more than the shapes of a broadcast argument and the outputs tell: the rows of a matrix product.
        directions: passes that benchmarks time: an operation that computes its gradients in the forward has no
            backward worth a figure of its own, and is timed in both together.
        differentiable: False for an operation without gradients, such as inference alone needs. Then its forward is
            all that is verified, timed and tested for support, and no input requires a gradient.
        real_input: `(activations, dtype) -> (args, kwargs)` made of a `(tokens, channels)` float32 tensor of real
            activations, or None where real activations mean nothing.
    """

    name: str
    levels: Sequence[str | Implementation]
    inputs: Callable[[Case, torch.Generator], Given]
    cost: Callable[[Case, Direction], Cost]
    test_grid: Grid
    bench_grid: Grid
    function: str = ""
    budgets: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    unsupported: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)
    lacks: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    adversarial: tuple[str, ...] = ()
    with_rows: tuple[str, ...] = ()
    spared: tuple[Spared, ...] = ()
    shift_invariant: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()
    averaged: Callable[[dict[str, Any]], dict[str, Any] | None] = lambda arguments: None
    summands: Callable[[dict[str, Any]], Mapping[str, int]] = lambda arguments: {}
    directions: tuple[Direction, ...] = (Direction.FORWARD, Direction.BACKWARD)
    differentiable: bool = True
    real_input: Callable[[torch.Tensor, torch.dtype], Given] | None = None

    def __post_init__(self) -> None:
        self._check_levels()
        if torch.float32 not in {case.dtype for case in self.test_grid}:
            raise ValueError(f"{self.name}: test_grid has no float32 case; low precision hides wrong formulas")
        if not any(point.core for point in self.test_grid.points):
            raise ValueError(f"{self.name}: test_grid has no core case; torch.compile and adversaries run on no other")
        for what, given in (
            ("spared", {name for each in self.spared for name in each.arguments}),
            ("shift_invariant", set(self.shift_invariant)),
        ):
            if strangers := given - set(self.adversarial):
                among = ", ".join(self.adversarial) or "none"
                raise ValueError(f"{self.name}: {what} names {', '.join(sorted(strangers))}; adversarial are {among}")

    def _check_levels(self) -> None:
        of_function = [each for each in self.levels if isinstance(each, str)]
        if of_function and not self.function:
            raise ValueError(
                f"{self.name}: levels names {of_function[0]!r}, which is a level of function, and none is given"
            )
        for what, given in (("budgets", self.budgets), ("unsupported", self.unsupported)):
            if strangers := set(given) - set(of_function):
                among = ", ".join(of_function) or "none"
                raise ValueError(f"{self.name}: {what} names {', '.join(sorted(strangers))}; levels are {among}")
        if [i.level for i in self.implementations].count(Level.REFERENCE) != 1:
            raise ValueError(f"{self.name}: levels must hold exactly one {Level.REFERENCE.value!r} level")
        names = [i.name for i in self.implementations]
        if len(set(names)) != len(names):
            raise ValueError(f"{self.name}: two implementations share a name: {', '.join(names)}")
        if strangers := {each.instead for each in self.spared if each.instead} - set(names):
            raise ValueError(f"{self.name}: spared names {', '.join(strangers)}; levels are {', '.join(names)}")
        if strangers := set(self.lacks) - set(names):
            raise ValueError(f"{self.name}: lacks names {', '.join(sorted(strangers))}; levels are {', '.join(names)}")
        features = {feature for lacking in self.lacks.values() for feature in lacking}
        for p in (p for p in self.test_grid.points if p.core):
            if asked := sorted(feature for feature in features if p.sizes.get(feature)):
                raise ValueError(f"{self.name}: {p.name!r} has {asked[0]}, which a level lacks; core cases must not")

    @functools.cached_property
    def implementations(self) -> tuple[Implementation, ...]:
        """All levels and peers."""
        return tuple(self._level(each) if isinstance(each, str) else each for each in self.levels)

    def _level(self, name: str) -> PublicLevel:
        level, (factor, reason) = Level(name), self.budgets.get(name, (BUDGET_FACTOR, ""))
        rows = unsupported_rows(level, self.unsupported.get(name, {}), self.differentiable)
        return PublicLevel(name, level, self.function, factor, reason, rows)

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
        """Names of the arguments that get this adversary there; none if all of them are spared it."""
        candidates = self.shift_invariant if adversary == COMMON_OFFSET else self.adversarial
        spared = {
            name
            for each in self.spared
            if each.levels is None and each.covers(adversary, dtype, device)
            for name in each.arguments
        }
        return tuple(name for name in candidates if name not in spared)

    def spared_at(self, implementation: str, adversary: str, dtype: torch.dtype, device: str) -> Spared | None:
        """Return the exemption of this implementation alone from this adversary there, or None."""
        about = [e for e in self.spared if e.levels is not None and implementation in e.levels]
        return next((e for e in about if e.covers(adversary, dtype, device)), None)

    def why_lacking(self, implementation: str, case: Case) -> str | None:
        """Why this implementation has no such case, or None if it has."""
        lacking = self.lacks.get(implementation, {})
        return next((f"{name}: {reason}" for name, reason in lacking.items() if case.sizes.get(name)), None)

    def signature(self) -> list[str]:
        """Names of the arguments, in the order in which the harness keeps their values: the public function's."""
        return list(self.reference.signature().parameters)

    def arguments(self, case: Case, generator: torch.Generator) -> tuple[Any, ...]:
        """The values of all arguments on a case, in the order of `signature`."""
        return self._bound(self.inputs(case, generator), "inputs")

    def real_arguments(self, activations: torch.Tensor, dtype: torch.dtype) -> tuple[Any, ...]:
        """The same, made of real activations."""
        assert self.real_input is not None
        return self._bound(self.real_input(activations, dtype), "real_input")

    def _bound(self, given: Given, what: str) -> tuple[Any, ...]:
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
    """What one package offers.

    Attributes:
        name: the package's folder, distribution suffix and entry point.
        title: one line for tables and pages.
        paper: address of the paper that defines it.
        operations: the functions.
        levels: import string of what says which level runs where, an object of the package or a module:
            `default(operation, device, dtype) -> str` and `unavailable(level, device, dtype) -> str | None`; where
            there is more to say of a level, also `describe(level, device) -> str`.
        replacements: name of the module that puts the functions into models: `patch(model)` in place, with what was
            replaced and why the rest was not, and `unpatch(model)`, the way back. None: they stand in for nothing.
        contracts: by kernel name, what its compiled code promises; a kernel that is not named promises the defaults.
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
    contracts: Mapping[str, KernelContract] = field(default_factory=dict)
    slow_defaults: Mapping[str, str] = field(default_factory=dict)

    def ladder(self) -> Any:
        """Import what says which level runs where."""
        return imported(self.levels) if ":" in self.levels else importlib.import_module(self.levels)

    def patch(self, model: torch.nn.Module, *, gpu_bound: bool = False) -> Any:
        """Put the functions into a model, in place; what was done, as the package reports it.

        Args:
            model: whose modules are patched.
            gpu_bound: whether parts are replaced too that only pay where the GPU is the limit, if there are such.
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
