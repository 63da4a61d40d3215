"""The levels of a package's functions: which there are, where each can run, and which is the default where."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from . import adoption
from .call import clear_all
from .call_kinds import has_transform, is_transformed
from .compiled import compiled
from .device import compute_capability
from .torchscript import scripted

Features = Collection[str]
"""Static properties of a call by which levels differ, such as a window."""

LEVELS = ("reference", "native", "torchscript", "compile", "triton", "cuda")
KERNELS = ("triton", "cuda")
MINIMUM_CAPABILITY = (8, 0)

HAS_TRITON = find_spec("triton") is not None
HAS_NUMPY = find_spec("numpy") is not None


class CudaLevel(Protocol):
    """What a ladder asks about level "cuda"; the module `cuda_level` is one."""

    def unavailable(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why the level cannot run there, or None if it can."""

    def describe(self, device: torch.device) -> str:
        """Describe the level on that device, for tables."""

    def function(self, name: str) -> Callable[..., Any]:
        """The function of that name."""


@dataclass(frozen=True)
class Default:
    """A row of a package's table: where a level other than native is the default.

    Attributes:
        level: the default there.
        record: the folder of `results/` that it rests on; a test checks the row against it. None where it was not
            measured: then the level is there for what native cannot do, or can do only by making another tensor first.
        device: type of device.
        functions: those that the row covers; None for all.
        features: only for calls that use one of them; None for all calls.
        capabilities: of a GPU; None for all.
        dtypes: of the principal tensor; None for all.
        traced: whether the row also holds in code that torch.compile traces; if not, native is the default there:
            TorchInductor fuses native with adjacent operations, and custom operators are fusion barriers.
        device_name: of the only device, as `adoption.device_name` gives it; None for all.
    """

    level: str
    record: str | None
    device: str = "cuda"
    functions: Collection[str] | None = None
    features: Collection[str] | None = None
    capabilities: Collection[tuple[int, int]] | None = None
    dtypes: Collection[torch.dtype] | None = None
    traced: bool = True
    device_name: str | None = None

    def covers(self, function: str, device: torch.device, dtype: torch.dtype, features: Features = ()) -> bool:
        """Whether the row is about such a call."""
        return (
            device.type == self.device
            and (self.functions is None or function in self.functions)
            and (self.features is None or any(feature in self.features for feature in features))
            and (self.dtypes is None or dtype in self.dtypes)
            and (self.capabilities is None or compute_capability(device) in self.capabilities)
            and (self.device_name is None or adoption.device_name(device) == self.device_name)
        )


class Ladder:
    """The levels of a package's functions.

    Attributes:
        user_file: the module that knows the file of adopted rows, for those who write it.
        operations: the functions of the package, by name, as `operation.py` calls them.

    Args:
        functions: the package whose modules are the levels, by name of function: `kernel_pytorch.x.levels` holds
            `reference.py`, `native.py` and so on, and each the function of that name. Without one, "torchscript" and
            "compile" compile the definition, "native" is the definition where there is no `native.py`, "triton" calls
            the operator that `MAPPED` of `kernel_pytorch.x.operators` gives it, with a function that converts the
            arguments, or else the operator of that name there, if there is one, and "cuda" is the function of `cuda`
            if that is given.
        defaults: the first row that covers a call says its default, unless its level lacks a feature of the call;
            where none does it is native, or the reference where native lacks one. Rows go by what they name and never
            by rows or batch: levels round differently, and the result of a row must not depend on how many rows there
            are.
        cuda: answers queries about level "cuda"; None if no function has it.
        absent: by function, levels that it lacks.
        lacks: by level, the features of calls that it lacks, with the reasons.
        derived: by derived level and function, what it is made of instead: the level to compile, or the name of the
            operator, or of the function in `cuda`.
    """

    user_file = adoption

    def __init__(
        self,
        functions: Mapping[str, str],
        defaults: Sequence[Default],
        cuda: CudaLevel | None,
        absent: Mapping[str, Collection[str]] | None = None,
        lacks: Mapping[str, Mapping[str, str]] | None = None,
        derived: Mapping[str, Mapping[str, str]] | None = None,
    ) -> None:
        self.functions = functions
        self.defaults = tuple(defaults)
        self.cuda = cuda
        self.lacks = lacks or {}
        self._derived = derived or {}
        self._levels: dict[tuple[str, str], Callable[..., Any]] = {}
        for function in functions:
            for level in LEVELS:
                if level not in (absent or {}).get(function, ()) and (found := self._load(function, level)) is not None:
                    self._levels[function, level] = found
        self._resolved: dict[Any, Any] = {}
        self.operations: dict[str, Any] = {}

    def __reduce__(self) -> Any:
        """Pickled by name, as by cloudpickle: unpickling returns the object of the package there."""
        return find_ladder, (adoption.PACKAGE,)

    def _load(self, function: str, level: str) -> Callable[..., Any] | None:
        """Import or derive the function of a level; None where there is none."""
        package, source = self.functions[function], self._derived.get(level, {}).get(function)
        module = _module(f"{package}.{level}")
        if (written := getattr(module, function, None)) is not None:
            return cast("Callable[..., Any]", written)
        if level == "cuda":
            return None if self.cuda is None else self.cuda.function(source or function)
        if level in ("compile", "torchscript"):
            derive = compiled if level == "compile" else scripted
            return derive(self._levels[function, source or "reference"])
        if level == "triton":
            from .operation import derived  # which imports this module

            operators = _module(f"{package.rpartition('.')[0]}.operators")
            own = getattr(operators, source or function, None), None
            operator, mapping = getattr(operators, "MAPPED", {}).get(function, own)
            if (found := derived(operator, self._levels[function, "reference"], mapping)) is not None:
                return found
        if module is None and level in ("native", "triton"):
            return self._levels[function, "reference"] if level == "native" else None
        raise ImportError(f"{package}.{level}: it has no function {function}")

    def levels(self, function: str) -> tuple[str, ...]:
        """The levels of a function, from the definition to CUDA C++."""
        return tuple(level for level in LEVELS if (function, level) in self._levels)

    def function(self, function: str, level: str) -> Callable[..., Any]:
        """The function of that name of a level."""
        return self._levels[function, level]

    @contextlib.contextmanager
    def replaced(self, function: str, level: str, by: Callable[..., Any]) -> Iterator[None]:
        """Let another function be a level of a function, for tests: a fault planted there must be found."""
        key = function, level
        own = self._levels[key]
        self._levels[key] = by
        self.forget()
        try:
            yield
        finally:
            self._levels[key] = own
            self.forget()

    def default_of(self, call: Callable[[], Any]) -> str:
        """The level that a call of a public function with `level=None` takes; nothing is computed. For tests.

        Args:
            call: calls one of the package's functions; its tensors may be fake ones of a GPU that is not here.
        """
        own = self._levels
        self._levels = {key: functools.partial(_report, key[1]) for key in own}
        self.forget()
        try:
            call()
        except _ReachedError as reached:
            return str(reached)
        finally:
            self._levels = own
            self.forget()
        raise ValueError("call: it called none of the package's functions")

    def forget(self) -> None:
        """Drop cached decisions, after a change of what they depend on."""
        self._resolved.clear()
        clear_all()

    def default(
        self, function: str, device: torch.device, dtype: torch.dtype, traced: bool = False, features: Features = ()
    ) -> str:
        """The level that `level=None` means there, or in what torch.compile traces there."""
        row = self.deciding_row(function, device, dtype, traced, features)
        return self._without_kernels(function, features) if row is None else row.level

    def deciding_row(
        self, function: str, device: torch.device, dtype: torch.dtype, traced: bool = False, features: Features = ()
    ) -> Default | None:
        """The row that says the default there; None where none does. Arguments as in `default`."""
        # Adopted rows do not hold in traced code: Dynamo could not read their file.
        tracing = traced or torch.compiler.is_compiling()
        for row in self.defaults if tracing else (*self.defaults, *self.adopted):
            able = row.level in self.levels(function) and row.covers(function, device, dtype, features)
            if not able or self.why_lacking(row.level, features) is not None:
                continue
            if traced and not row.traced:
                return None
            if self.unavailable(row.level, device, dtype) is None:
                return row
        return None

    def _without_kernels(self, function: str, features: Features) -> str:
        """The default where no row of the table says it."""
        able = "native" in self.levels(function) and self.why_lacking("native", features) is None
        return "native" if able else "reference"

    def why_lacking(self, level: str, features: Features) -> str | None:
        """Why a level lacks one of these features, or None if it has all."""
        lacking = self.lacks.get(level, {})
        return next((f"{feature}: {lacking[feature]}" for feature in features if feature in lacking), None)

    @functools.cached_property
    def adopted(self) -> tuple[Default, ...]:
        """The rows that the user adopted, read once, when a default is first looked up: see `adoption`."""
        file = adoption.place()
        try:
            rows = () if file is None else adoption.read(file)
        except ValueError as error:
            warnings.warn(f"{file} is ignored by {adoption.PACKAGE}: {error}", RuntimeWarning, stacklevel=2)
            return ()
        return tuple(
            Default(
                row.level, str(file), row.device_type, functions=(row.function,), dtypes=(adoption.DTYPES[row.dtype],),
                traced=False, device_name=row.device,
            )
            for row in rows
            if row.package == adoption.TECHNIQUE and self.why_ignored(row) is None
        )  # fmt: skip

    def why_ignored(self, row: adoption.Row) -> str | None:
        """Why an adopted row of this package is used on no device; None if it is used."""
        if row.function not in self.functions or row.level not in self.levels(row.function):
            return f"{row.package} has no level {row.level!r} of {row.function}"
        now = adoption.version_of(row.level)
        return None if row.version == now else f"measured with {row.version}; installed is {now}"

    def unavailable(self, level: str, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why this level cannot run there, or None if it can."""
        if level == "cuda":
            return "the package has none" if self.cuda is None else self.cuda.unavailable(device, dtype)
        return _no_triton(device, dtype) if level == "triton" else None

    def describe(self, level: str, device: torch.device) -> str:
        """What is worth knowing of a level that runs there, for tables."""
        if level == "native" and all(
            self._levels.get((f, level)) is self._levels[f, "reference"] for f in self.functions
        ):
            return "the definition as it stands"
        return self.cuda.describe(device) if level == "cuda" and self.cuda is not None else ""

    def check(self, level: str | None) -> None:
        """Raise ValueError, listing the levels, unless this is one of them or None."""
        if level is not None and level not in LEVELS:
            raise ValueError(f"level: given {level!r}; allowed are None, {', '.join(map(repr, LEVELS))}")

    def resolve(
        self, function: str, level: str | None, *tensors: Tensor | None, features: tuple[str, ...] = ()
    ) -> Callable[..., Any]:
        """The level's function, or an error that names what is allowed.

        Args:
            function: its name.
            level: as the user gave it.
            tensors: the arguments that decide, the principal one first.
            features: that the call uses, of those that rows of the table and `lacks` name.

        Raises:
            ValueError: no such level, or not of this function.
            RuntimeError: the level lacks a feature, or cannot run on this device or dtype, with the reason.
        """
        self.check(level)
        interpreted = level == "triton" and not (tensors[0] is not None and tensors[0].is_cuda)  # the environment says
        if torch.compiler.is_compiling() or has_transform() or interpreted:
            return self.function(function, self.chosen(function, level, *tensors, features=features))
        key = (function, level, features, *[None if t is None else (t.device, t.dtype) for t in tensors])
        found: Callable[..., Any] | None = self._resolved.get(key)
        if found is None:
            chosen = self.chosen(function, level, *tensors, features=features)
            found = self._resolved[key] = self.function(function, chosen)
        return found

    def is_native(self, function: str, x: Tensor) -> bool:
        """Whether the default for such a tensor is PyTorch's own operators.

        A module that is patched then runs its own forward, which is made of them too: a detour costs the host.
        """
        return self.is_default(function, "native", x)

    def is_default(self, function: str, level: str, x: Tensor) -> bool:
        """Whether this level is the default for such a tensor."""
        if torch.compiler.is_compiling():
            return self.resolve(function, None, x) is self._levels[function, level]
        key = "is_default", function, level, x.device, x.dtype
        found: bool | None = self._resolved.get(key)
        if found is None:
            found = self.chosen(function, None, x) == level
            if not has_transform():  # under one it is native; the function knows that itself
                self._resolved[key] = found
        return found

    def chosen(self, function: str, level: str | None, *tensors: Tensor | None, features: Features = ()) -> str:
        """The name of the level that `resolve` takes; same arguments and errors."""
        self.check(level)
        x = tensors[0]
        assert x is not None
        if level is None:
            level = self.default(function, x.device, x.dtype, torch.compiler.is_compiling(), features)
            if level in KERNELS and (is_transformed() or self._why_not(level, tensors) is not None):
                return self._without_kernels(function, features)
            return level
        reason = self.why_lacking(level, features)
        if reason is None and level not in self.levels(function):
            having = ", ".join(map(repr, self.levels(function)))
            raise ValueError(f"level: {level!r} of {function} does not exist yet; it has {having}")
        reason = self._why_not(level, tensors) if reason is None else reason
        if reason is not None:
            raise RuntimeError(f"level {level!r} of {function} cannot run here: {reason}")
        return level

    def _why_not(self, level: str, tensors: tuple[Tensor | None, ...]) -> str | None:
        """Why a level cannot run for one of these tensors."""
        reasons = [self.unavailable(level, t.device, t.dtype) for t in tensors if t is not None]
        return next((reason for reason in reasons if reason is not None), None)


class _ReachedError(Exception):
    """A level is reached that was only asked for; the message is its name."""


def _report(level: str, *arguments: Any) -> None:
    raise _ReachedError(level)


def _module(name: str) -> ModuleType | None:
    """Import a module; None where there is none of that name."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
    return None


def find_ladder(package: str = adoption.PACKAGE) -> Ladder:
    """The levels of the package whose copy of the core this is."""
    return importlib.import_module(f"{package}.levels").LADDER


def _no_triton(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why Triton's kernels cannot run there, or None if they can."""
    if not HAS_TRITON:
        return "triton is not installed (pip install triton)"
    if device.type == "cuda":
        capability = compute_capability(device)
        if capability < MINIMUM_CAPABILITY:
            return f"compute capability is {capability[0]}.{capability[1]}; Triton kernels need 8.0"
        return None
    if device.type != "cpu" or os.environ.get("TRITON_INTERPRET", "").lower() not in ("1", "true", "yes", "on", "y"):
        return f"device is {device.type}; Triton needs CUDA, or TRITON_INTERPRET=1 to check kernels on the CPU"
    if not HAS_NUMPY:
        return "Triton's interpreter needs numpy (pip install numpy)"
    if dtype == torch.bfloat16:
        return "Triton's interpreter computes bfloat16 wrongly"
    return None
