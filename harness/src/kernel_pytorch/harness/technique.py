"""The declaration that an author writes; everything else in the harness follows from it.

A `Technique` holds `Operation`s; an operation holds `Implementation`s (one per level), the inputs, the cost and two
grids of `Case`s: awkward shapes for the tests, shapes of published models for the benchmarks.
"""

from __future__ import annotations

import enum
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kernel_pytorch.harness.adversaries import ADVERSARIES, COMMON_OFFSET, IMITATED, LAYOUTS, REAL
from kernel_pytorch.harness.contracts import KernelContract


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


class Direction(enum.Enum):
    """Which pass is run: the forward, the backward on a graph that stands already, or both."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BOTH = "both"


@dataclass(frozen=True)
class Implementation:
    """One way of computing an operation.

    Attributes:
        name: what tables print; a peer is named `peer:<library>`.
        level: the rung of the ladder.
        target: import string `module:function`, resolved only when the implementation is run, so that a declaration
            imports nothing optional.
        budget_factor: how many times the reference's own error is allowed; above 2 only with a reason, never above 4.
        budget_reason: why `budget_factor` is above 2.
        unsupported: row of the support table, or "<row> on cuda", "<row> on cpu" -> why this implementation has to say
            no there. A row that is not named must work; one that is named must not, unless it is a promise about all
            calls (determinism, batch invariance).
    """

    name: str
    level: Level
    target: str
    budget_factor: float = 2.0
    budget_reason: str = ""
    unsupported: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not 0.0 < self.budget_factor <= 4.0:
            raise ValueError(f"{self.name}: budget_factor is {self.budget_factor}; allowed is above 0 and at most 4")
        if self.budget_factor > 2.0 and not self.budget_reason:
            raise ValueError(f"{self.name}: budget_factor {self.budget_factor} is above 2 and needs budget_reason")

    def load(self) -> Callable[..., Any]:
        """Import the function. ImportError and AttributeError pass through: they are the reason it cannot run."""
        module_name, _, attribute = self.target.partition(":")
        return getattr(importlib.import_module(module_name), attribute)


@dataclass(frozen=True)
class Case:
    """One point of a grid: a dtype and named sizes, read as attributes (`case.rows`).

    Attributes:
        name: what it stands for ("Llama 3.1 8B, prefill", "one column").
        dtype: dtype of the principal input.
        sizes: everything else that the operation's `inputs` needs to know.
        reason: why this shape is awkward, for the test grid.
        core: whether implementations that compile anew for every shape run it in an ordinary verification.
    """

    name: str
    dtype: torch.dtype
    sizes: Mapping[str, Any]
    reason: str = ""
    core: bool = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self.sizes[name]
        except KeyError:
            raise AttributeError(f"case {self.name!r} has no size {name!r}; it has {', '.join(self.sizes)}") from None

    @property
    def dtype_name(self) -> str:
        """The dtype without the `torch.` prefix."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def label(self) -> str:
        """Name, sizes and dtype in one line, unique within a grid."""
        sizes = " ".join(f"{key}={_short(value)}" for key, value in self.sizes.items())
        return f"{self.name} [{sizes}] {self.dtype_name}"

    def __hash__(self) -> int:
        return hash(self.label)


def _short(value: object) -> str:
    return str(value).removeprefix("torch.")


@dataclass(frozen=True)
class Point:
    """A `Case` before its dtype is chosen; `grid` multiplies points by dtypes."""

    name: str
    sizes: Mapping[str, Any]
    reason: str = ""
    core: bool = False
    dtypes: tuple[torch.dtype, ...] | None = None
    devices: tuple[str, ...] = ("cpu", "cuda")


def point(
    name: str,
    *,
    reason: str = "",
    core: bool = False,
    dtypes: Sequence[torch.dtype] | None = None,
    devices: Sequence[str] = ("cpu", "cuda"),
    **sizes: Any,
) -> Point:
    """Describe one shape of a grid.

    Args:
        name: what the shape stands for.
        reason: why it is awkward (test grids).
        core: run it also at levels that compile anew for every shape.
        dtypes: replaces the grid's own dtypes for this point.
        devices: device types on which the case finishes in reasonable time.
        **sizes: the numbers that `inputs` and `cost` read.
    """
    return Point(name, sizes, reason, core, None if dtypes is None else tuple(dtypes), tuple(devices))


@dataclass(frozen=True)
class Grid:
    """An ordered set of cases, one per point and dtype."""

    points: tuple[Point, ...]
    dtypes: tuple[torch.dtype, ...]

    def cases(self, device_type: str = "cpu") -> list[Case]:
        """Every case that is meant to run on this device type."""
        return [
            Case(p.name, dtype, p.sizes, p.reason, p.core)
            for p in self.points
            if device_type in p.devices
            for dtype in (p.dtypes or self.dtypes)
        ]

    def __iter__(self) -> Iterator[Case]:
        return iter(self.cases())


def grid(*points: Point, dtypes: Sequence[torch.dtype]) -> Grid:
    """The product of `points` and `dtypes` (a point may bring dtypes of its own)."""
    if not points:
        raise ValueError("grid: points is empty; give at least one point(...)")
    return Grid(tuple(points), tuple(dtypes))


@dataclass(frozen=True)
class Cost:
    """What an operation cannot avoid doing.

    Attributes:
        bytes: compulsory traffic: each input read once, each output written once.
        flops: floating-point operations of the definition; 0 where nobody counts them (memory-bound operations).
        launches: kernels that the best level may launch, when that is part of the promise.
    """

    bytes: int
    flops: int = 0
    launches: int | None = None


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
            levels. Kernels of ours are never named: they pass on what the definition does.
    """

    arguments: tuple[str, ...]
    adversaries: tuple[str, ...]
    reason: str
    dtypes: tuple[torch.dtype, ...] | None = None
    devices: tuple[str, ...] | None = None
    levels: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for level in self.levels or ():
            if level in OUR_KERNELS:
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
        dtypes = "" if self.dtypes is None else f" in {', '.join(_short(dtype) for dtype in self.dtypes)}"
        dtypes += "" if self.levels is None else f" at {', '.join(self.levels)}"
        devices = "" if self.devices is None else f" on {', '.join(self.devices)}"
        return f"{', '.join(self.arguments)} spared {', '.join(self.adversaries)}{dtypes}{devices}: {self.reason}"


@dataclass(frozen=True)
class Operation:
    """One mathematical function and its implementations.

    Attributes:
        name: the function's name; also the operator's name in `torch.ops.kernel_pytorch`.
        implementations: one per level, the reference among them.
        inputs: `(case, generator) -> arguments`, positional, on the generator's device. Tensors that are floating
            point receive gradients. The docstring gives their shapes.
        cost: `(case, direction) -> Cost`.
        test_grid: awkward shapes, each with its reason; always some float32.
        bench_grid: shapes of named published models.
        adversarial: names of the arguments that adversarial inputs are planted in (the data, not the parameters).
        spared: which of them are not planted with which adversary, and why.
        shift_invariant: names of the adversarial arguments of which only the differences in a row matter, as in a
            softmax: they get a common offset, and may lose no digits to it.
        constants: names of the floating-point arguments that have no gradient, at any level: positions and the like.
        averaged: `arguments -> arguments` that give, element by element, what the given ones give the mean of; or None
            where they give no mean. A mean may err as far as what it is of: the reference's own error of one number
            is luck, and no measure.
        summands: `arguments -> {name: count}`: how many terms the gradient of an argument is the sum of, where that is
            more than the shapes of a broadcast argument and the outputs tell: the rows of a matrix product.
        real_input: `(activations, dtype) -> arguments`: positional arguments made of a `(tokens, channels)` float32
            tensor of real activations, or None where real activations mean nothing.
    """

    name: str
    implementations: Sequence[Implementation]
    inputs: Callable[[Case, torch.Generator], tuple[Any, ...]]
    cost: Callable[[Case, Direction], Cost]
    test_grid: Grid
    bench_grid: Grid
    adversarial: tuple[str, ...] = ()
    spared: tuple[Spared, ...] = ()
    shift_invariant: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()
    averaged: Callable[[tuple[Any, ...]], tuple[Any, ...] | None] = lambda arguments: None
    summands: Callable[[tuple[Any, ...]], Mapping[str, int]] = lambda arguments: {}
    real_input: Callable[[torch.Tensor, torch.dtype], tuple[Any, ...]] | None = None

    def __post_init__(self) -> None:
        levels = [i.level for i in self.implementations]
        if levels.count(Level.REFERENCE) != 1:
            raise ValueError(f"{self.name}: implementations must hold exactly one {Level.REFERENCE.value!r} level")
        names = [i.name for i in self.implementations]
        if len(set(names)) != len(names):
            raise ValueError(f"{self.name}: two implementations share a name: {', '.join(names)}")
        if torch.float32 not in {case.dtype for case in self.test_grid}:
            raise ValueError(f"{self.name}: test_grid has no float32 case; low precision hides wrong formulas")
        if not any(point.core for point in self.test_grid.points):
            raise ValueError(f"{self.name}: test_grid has no core case; torch.compile and adversaries run on no other")
        if strangers := {name for each in self.spared for name in each.arguments} - set(self.adversarial):
            among = ", ".join(self.adversarial) or "none"
            raise ValueError(f"{self.name}: spared names {', '.join(sorted(strangers))}; adversarial are {among}")
        if strangers := set(self.shift_invariant) - set(self.adversarial):
            among, named = ", ".join(self.adversarial) or "none", ", ".join(sorted(strangers))
            raise ValueError(f"{self.name}: shift_invariant names {named}; adversarial are {among}")

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

    def why_spared(self, implementation: str, adversary: str, dtype: torch.dtype, device: str) -> str | None:
        """Why this implementation alone is not held against this adversary there, or None if it is."""
        about = [e for e in self.spared if e.levels is not None and implementation in e.levels]
        return next((e.reason for e in about if e.covers(adversary, dtype, device)), None)

    def signature(self) -> list[str]:
        """Names of the positional arguments, read off the reference."""
        return list(inspect.signature(self.reference.load()).parameters)


@dataclass(frozen=True)
class Replacement:
    """A stock module that a technique can stand in for.

    Attributes:
        stock: the class that is replaced.
        build: `module -> drop-in`, sharing the parameters of `module`.
        restore: `drop-in -> stock module`, the way back.
        applies: `module -> None` or the reason why this very module is left alone.
    """

    stock: type[torch.nn.Module]
    build: Callable[[torch.nn.Module], torch.nn.Module]
    restore: Callable[[torch.nn.Module], torch.nn.Module]
    applies: Callable[[torch.nn.Module], str | None] = lambda module: None


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
        replacements: import string of a function that returns the keyword arguments of `Replacement`s, or None.
        contracts: by kernel name, what its compiled code promises; a kernel that is not named promises the defaults.
            For instantiations of a CUDA kernel, "name<pattern>" goes before "name": "scale_kernel<*, 1>".
        cuda_units: import string of a function that returns the `CudaUnit`s of the technique; empty where its sources
            are not here (installed from a wheel). None: it has no CUDA kernel.
    """

    name: str
    title: str
    paper: str
    operations: Sequence[Operation]
    levels: str
    replacements: str | None = None
    contracts: Mapping[str, KernelContract] = field(default_factory=dict)
    cuda_units: str | None = None

    def ladder(self) -> Any:
        """Import what says which level runs where."""
        module, _, attribute = self.levels.partition(":")
        return getattr(importlib.import_module(module), attribute) if attribute else importlib.import_module(module)

    def operation(self, name: str) -> Operation:
        """The operation of that name. Raises KeyError naming what exists."""
        for candidate in self.operations:
            if candidate.name == name:
                return candidate
        raise KeyError(f"{self.name} has no operation {name!r}; it has {', '.join(o.name for o in self.operations)}")
