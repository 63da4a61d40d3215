"""Which kernels an implementation launches, with which constants, types and warps.

Nothing of this is declared. The implementation is called on CPU tensors, forward and backward, with a driver that only
names an architecture, and Triton is stopped where it would compile: what it was about to compile is the record.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from kernel_pytorch.harness.technique import Case, Direction, Operation
from kernel_pytorch.harness.tensors import as_tuple, leaves, wanting

_compile, _run = JITFunction._do_compile, JITFunction.run


def use_architecture(capability: int) -> None:
    """Let Triton compile for this architecture from now on, with a driver that needs no GPU."""

    def benchmark(launch: Callable[[], Any], **_: Any) -> list[float]:
        """Launch each configuration that autotuning would time, so that all of them are recorded."""
        launch()
        return [0.0, 0.0, 0.0]

    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32),
        # Triton keeps kernels by device: another number for each architecture keeps them apart.
        get_current_device=lambda: capability,
        get_current_stream=lambda device=None: 0,
        get_active_torch_device=lambda: torch.device("cpu"),
        get_benchmarker=lambda: benchmark,
    )
    triton.runtime.driver.set_active(driver)


@dataclass(frozen=True)
class Launch:
    """A kernel as its launcher launches it.

    Attributes:
        function: the Triton function.
        key: what Triton tells compilations apart by.
        signature: type by argument; "constexpr" for constants and what was specialised to one.
        device: as the driver named it.
        constexprs: values of the constants by position.
        options: of the compiler, warps among them.
        attributes: what is known of arguments: divisible by 16.
        grid: how many programs, in three dimensions.
        implementation: operation and name of the implementation, `operation/implementation`.
        case: operation and case.
        bench: launched by a case of the bench grid.
        core: launched by a core case of the test grid.
    """

    function: Any
    key: str
    signature: dict[str, Any]
    device: int
    constexprs: dict[tuple[int, ...], Any]
    options: Any
    attributes: Any
    grid: tuple[int, ...]
    implementation: str
    case: str
    bench: bool
    core: bool

    @property
    def constants(self) -> dict[str, Any]:
        """Declared constants by name, as JSON can hold them."""
        names = self.function.arg_names
        values = {names[i]: self.constexprs.get((i,)) for i in self.function.constexprs}
        return {n: v if isinstance(v, (bool, int, float, str, type(None))) else str(v) for n, v in values.items()}

    @property
    def arguments(self) -> dict[str, str]:
        """Types of pointers, descriptors and float scalars; integers are left out, and so is what is constant."""
        kinds = {name: str(kind) for name, kind in self.signature.items()}
        return {name: kind for name, kind in kinds.items() if kind != "constexpr" and kind[0] not in "iu"}

    @property
    def float_scalars(self) -> tuple[str, ...]:
        """Names of the scalars that are float32."""
        return tuple(name for name, kind in self.signature.items() if kind == "fp32")

    def compile(self, *, float64: bool = False) -> Any:
        """Triton's compiled kernel: metadata and code; with `float64` that of a caller whose floats are float64.

        TorchInductor may pass Python floats so.
        """
        key, signature = self.key, self.signature
        if float64:
            signature = {name: "fp64" if kind == "fp32" else kind for name, kind in signature.items()}
            key = f"{key} float64"
        return _compile(
            self.function, key, signature, self.device, self.constexprs, self.options, self.attributes, True
        )


def record_launches(
    operation: Operation, name: str, function: Callable[..., Any], case: Case, *, bench: bool
) -> list[Launch]:
    """Call the implementation of that name on one case, forward and any backward, and return what it would launch."""
    launches: list[Launch] = []
    grids: list[tuple[int, ...]] = []
    label, core = f"{operation.name}, {case.label}", case.core and not bench

    def record(
        self: Any, key: str, signature: Any, device: int, constexprs: Any, options: Any, attrs: Any, warmup: bool
    ) -> None:
        about = (grids[-1], f"{operation.name}/{name}", label, bench, core)
        launches.append(Launch(self, key, signature, device, constexprs, options, attrs, *about))

    with _in_place_of_compile(record, grids), _WithoutProducts():
        arguments = _arguments(operation, case)
        if Direction.BACKWARD not in operation.directions or not operation.differentiable:
            with torch.no_grad():  # it runs another kernel, or there is no backward
                function(*arguments)
        if not operation.differentiable:
            return launches
        outputs = function(*arguments)
        if differentiable := wanting(as_tuple(outputs)):
            torch.autograd.backward(differentiable, [torch.empty_like(o) for o in differentiable])
    return launches


class _WithoutProducts(TorchDispatchMode):
    """Make matrix products beside the kernels return memory of the right shape at once: no code reads their results."""

    PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.PRODUCTS:
            left, right = args[-2:]
            return left.new_empty((*left.shape[:-1], right.shape[-1]))
        return func(*args, **(kwargs or {}))


class _UnsetNumbers(TorchFunctionMode):
    """Make `torch.randn` return memory that is never touched."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.randn:
            kwargs.pop("generator", None)
            return torch.empty(*args, **kwargs)
        return func(*args, **kwargs)


@contextlib.contextmanager
def _in_place_of_compile(record: Callable[..., None], grids: list[tuple[int, ...]]) -> Iterator[None]:
    """Call `record` where Triton would compile, after the grid was added to `grids`; nothing is launched then."""

    def run(self: Any, *arguments: Any, grid: Any, **keywords: Any) -> Any:
        named = {**dict(zip(self.arg_names, arguments, strict=False)), **keywords}
        grids.append(tuple(grid(named) if callable(grid) else grid))
        return _run(self, *arguments, grid=grid, **keywords)

    JITFunction._do_compile, JITFunction.run = record, run
    try:
        yield
    finally:
        JITFunction._do_compile, JITFunction.run = _compile, _run


def _arguments(operation: Operation, case: Case) -> list[Any]:
    """Make arguments of the right layout and of arbitrary values: memory that is never touched takes none.

    Arguments that are not floating-point (indices, lengths) may decide a launch, so then the real arguments are made,
    except normal random numbers: a cache of keys has gigabytes of them.
    """
    with FakeTensorMode():
        arguments = operation.arguments(case, torch.Generator().manual_seed(0))
    if not all(a.is_floating_point() for a in arguments if isinstance(a, Tensor)):
        with _UnsetNumbers():
            return leaves(operation.arguments(case, torch.Generator().manual_seed(0)))
    made = (torch.empty_strided(a.shape, a.stride(), dtype=a.dtype) if isinstance(a, Tensor) else a for a in arguments)
    return leaves([*made])


def distinct_launches(launches: Iterable[Launch]) -> list[Launch]:
    """Every distinct compilation; where several cases lead to one, a bench case is named before a core case."""
    distinct: dict[tuple[Any, str], Launch] = {}
    for launch in sorted(launches, key=lambda each: (not each.bench, not each.core)):
        distinct.setdefault((launch.function, launch.key), launch)
    return list(distinct.values())


def covering_set(distinct: list[Launch]) -> list[Launch]:
    """Choose among `distinct_launches` so that a check of every commit stays short and no kernel escapes.

    1. Every distinct compilation that the bench cases lead to: these are the shapes that speed is claimed for.
    2. From the core cases of the test grid, every distinct combination of kernel, constants, argument types, warps and
       stages. What else Triton specialises on (a size that is 1, or divisible by 16) is not told apart.
    3. From the rest of the test grid the same, for kernels that neither bench nor core cases reach.
    """

    def combination(launch: Launch) -> tuple[Any, ...]:
        o, constants, arguments = launch.options, tuple(launch.constants.items()), tuple(launch.arguments.items())
        return launch.function, constants, arguments, o.num_warps, o.num_stages, o.num_ctas

    chosen = [launch for launch in distinct if launch.bench]
    seen = {combination(launch) for launch in chosen}
    for core in (True, False):
        reached = {launch.function for launch in chosen}
        for launch in distinct:
            wanted = launch.core if core else launch.function not in reached
            if wanted and combination(launch) not in seen:
                seen.add(combination(launch))
                chosen.append(launch)
    return chosen
