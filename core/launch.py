"""Launches of Triton kernels with little host time: past `JITFunction.run` once a launch is known.

    launch = bind(_kernel, (grid,), rows, columns, BLOCK=1024, num_warps=4)       # once, by a plan (`plans.py`)
    launch(x, y)                         # _kernel[(grid,)](x, y, rows, columns, BLOCK=1024, num_warps=4), in every call

A `Launch` belongs to one geometry: its grid, scalars, constants, and the dtypes of its tensors are the same each time,
addresses may differ. The first launch on a device, for each pattern of 16-byte alignment, goes through the JITFunction,
which specialises, compiles, caches and checks; later ones hand the same arguments to the C function that Triton's own
launcher ends in. Every launch falls back to the JITFunction under the interpreter, with hooks (Proton, pre-run hooks),
debugging or instrumentation, for kernels with scratch memory, and where Triton's internals are not as known here. A
known launch does not notice changed global variables of a kernel.

For a tensor that the kernel reads through a TensorDescriptor, the C function takes a CUtensorMap, which the driver
makes from an address, a shape, strides and a block, and nothing else. So all but the address is fixed with the launch
(`Tiles`), and the maps are cached by address: a known address reuses its map, and a new address gets a new map.

Private names of Triton are used only here.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from .device import on_device

VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
MAPS = 256  # addresses of one tensor of a launch; beyond that all are forgotten
KNOWN = ((3, 6), (3, 7), (3, 8), (3, 9))
"""Versions of Triton whose launches were read; a test holds what is handed over against what they hand over."""

# Private names of Triton and PyTorch.
_runtime, _compilation = knobs.runtime, knobs.compilation
_enter, _leave = _runtime.launch_enter_hook, _runtime.launch_exit_hook  # chains, empty unless a profiler is at work
_current_device = getattr(torch._C, "_cuda_getDevice", None)  # None: PyTorch without CUDA
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class Tiles(NamedTuple):
    """How a kernel sees a tensor through a TensorDescriptor.

    Attributes:
        shape: of the tensor.
        strides: of the tensor, the last one 1, the others multiples of 16 bytes.
        block: shape of a tile.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block: list[int]


def tiles(matrix: Tensor, *block: int) -> Tiles:
    """See tensors like `matrix`, at any address, in tiles of this shape."""
    return Tiles(tuple(matrix.shape), matrix.stride(), list(block))


def bind(kernel: Any, grid: tuple[int, ...], *scalars: Any, described: Any = (), **keywords: Any) -> Launch:
    """All of a launch but its tensors, which come first in the kernel's signature.

    Args:
        kernel: a `triton.jit` function.
        grid: how many programs.
        *scalars: the arguments that follow its tensors.
        described: `Tiles` of what the kernel reads and writes through descriptors, in the order of the tensors; None
            for pointers and for absent tensors. A described tensor's first address counts, and 16 must divide it.
        **keywords: the constants that end its signature, by name, and options of the compiler such as `num_warps`.
    """
    named = [name for name in kernel.arg_names if name in keywords]
    if named != kernel.arg_names[len(kernel.arg_names) - len(named) :]:
        raise TypeError(f"{kernel.__name__}: {', '.join(named)} must end its signature, {', '.join(kernel.arg_names)}")
    constants = (*scalars, *(keywords.pop(name) for name in named))
    return Launch(kernel, (*grid, 1, 1)[:3], constants, keywords, described if any(described) else ())


class Launch:
    """A launch of which the tensors are given each time. Operators alone may use it: torch.compile cannot trace it."""

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        constants: tuple[Any, ...],
        options: dict[str, Any],
        described: Sequence[Tiles | None],
    ) -> None:
        self.kernel = kernel
        self.grid = grid
        self.constants = constants
        self.options = options
        self.described = described
        self.is_known = type(kernel) is JITFunction and VERSION in KNOWN and _current_device is not None
        self._launches: dict[Any, Callable[[int, list[int]], None]] = {}

    def twin(self) -> Launch:
        """The same for calls in which other tensors are None: Triton compiles another kernel for them."""
        return Launch(self.kernel, self.grid, self.constants, self.options, self.described)

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launch with these tensors, of which the first says where; the same ones are always None, see `twin`."""
        first = tensors[0]
        assert first is not None
        device = first.get_device()
        # A hook wants to see launches, a setting changes the compilation, or this is not a launch as known here.
        if (
            not self.is_known
            or device < 0
            or _enter.calls
            or _leave.calls
            or _runtime.launch_enter_hook is not _enter
            or _runtime.launch_exit_hook is not _leave
            or _runtime.debug
            or _compilation.instrumentation_mode
            or self.kernel.pre_run_hooks
            or getattr(_runtime, "add_stages_inspection_hook", None) is not None
        ):
            with on_device(first):
                self._through_jit(tensors)
            return
        assert _current_device is not None
        assert _current_stream is not None
        if device != _current_device():  # a function belongs to the context of its device
            with torch.cuda.device(device):
                self(*tensors)
            return
        addresses = []
        for t in tensors:  # a comprehension is one more call before Python 3.12
            addresses.append(0 if t is None else t.data_ptr())
        key: Any = device
        if functools.reduce(operator.or_, addresses) & 15:
            key = (device, *[address & 15 == 0 for address in addresses])
        launch = self._launches.get(key)
        if launch is not None:
            launch(_current_stream(device), addresses)
            return
        compiled = self._through_jit(tensors)  # by any thread, any number of times
        if isinstance(compiled, CompiledKernel):
            launch = self._past_jit(compiled)
            if launch is None:
                self.is_known = False
            else:
                self._launches[key] = launch

    def _through_jit(self, tensors: tuple[Tensor | None, ...]) -> Any:
        """The launch as Triton documents it."""
        if self.described:
            pairs = zip(tensors, self.described, strict=True)
            tensors = tuple(t if seen is None else TensorDescriptor(t, *seen) for t, seen in pairs)
        return self.kernel[self.grid](*tensors, *self.constants, **self.options)

    def _past_jit(self, compiled: CompiledKernel) -> Callable[[int, list[int]], None] | None:
        """A function of stream and addresses; None where this launch needs more than the C function."""
        run: Any = compiled.run
        if type(run).__name__ != "CudaLauncher" or getattr(run, "gsan_enabled", False):
            return None
        if run.global_scratch_size or run.profile_scratch_size:  # allocated anew for each launch
            return None
        launch, maps = _c_function(run.launch), self._maps(compiled)
        if launch is None or maps is None:
            return None
        constants, (x, y, z) = self.constants, self.grid
        function, packed = compiled.function, compiled.packed_metadata
        cooperative, overlapped = run.launch_cooperative_grid, run.launch_pdl

        # The kernel is kept: from 3.8 on its module is unloaded with it.
        if VERSION == (3, 6):

            def go(stream: int, addresses: list[int], kept: CompiledKernel = compiled) -> None:
                arguments = _with_maps(addresses, maps) if maps else addresses
                launch(x, y, z, stream, function, cooperative, overlapped, None, None, packed, None, None, None,
                       *arguments, *constants)  # fmt: skip
        else:
            annotations, signature = run.arg_annotations, run.kernel_signature

            def go(stream: int, addresses: list[int], kept: CompiledKernel = compiled) -> None:
                arguments = _with_maps(addresses, maps) if maps else addresses
                launch(x, y, z, stream, function, cooperative, overlapped, packed, None, None, None, None, None,
                       annotations, signature, (*arguments, *constants))  # fmt: skip

        return go

    def _maps(self, compiled: CompiledKernel) -> list[tuple[int, _Maps]] | None:
        """Places of descriptors among the tensors, and their maps; None for a kind of descriptor that is not known."""
        layouts = getattr(compiled.metadata, "tensordesc_meta", None) or ()
        seen = [(place, tiles) for place, tiles in enumerate(self.described) if tiles is not None]
        # Without layouts the kernel was compiled for addresses: before compute capability 9.0.
        if len(layouts) != len(seen) or any(layout["fp4_padded"] or layout.get("is_im2col") for layout in layouts):
            return None
        return [(place, _Maps(layout, tiles)) for layout, (place, tiles) in zip(layouts, seen, strict=True)]


class _Maps(dict[int, tuple[Any, ...]]):
    """What the C function takes of a descriptor, by address: the CUtensorMap, shape and strides."""

    def __init__(self, layout: Any, tiles: Tiles) -> None:
        super().__init__()
        from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

        utils = triton.runtime.driver.active.utils
        self.encode = getattr(utils, "fill_tma_descriptor_tiled", None) or utils.fill_tma_descriptor
        self.layout = layout["swizzle"], layout["elem_size"], TMA_DTYPE_DEVICE_TO_HOST[layout["elem_type"]]
        self.block, self.tiles = layout["block_size"], tiles

    def __missing__(self, address: int) -> tuple[Any, ...]:
        if len(self) >= MAPS:
            self.clear()
        shape, strides, _ = self.tiles
        zeros_beyond_edges = 0
        found = (self.encode(address, *self.layout, self.block, shape, strides, zeros_beyond_edges), *shape, *strides)
        self[address] = found
        return found


def _with_maps(addresses: list[int], maps: list[tuple[int, _Maps]]) -> list[Any]:
    """Put in the place of addresses what the C function takes of descriptors."""
    arguments: list[Any] = addresses
    for place, known in reversed(maps):
        address = addresses[place]
        arguments[place : place + 1] = known[address]
    return arguments


def _c_function(launch: Any) -> Any:
    """Triton's launch, without the function around it that makes maps of descriptors in every call, if it is known."""
    return inspect.getclosurevars(launch).nonlocals.get("launcher") if isinstance(launch, FunctionType) else launch
