"""Launches of Triton kernels with little host time: decided once for a geometry, then past `JITFunction.run`.

    @planned
    def scale(x, factor):                      # runs once for a geometry: checks, block sizes, grid
        launch = bind(_kernel, (grid,), x.numel(), BLOCK=1024, num_warps=4)

        def run(x, factor):                    # runs in every call
            y = torch.empty_like(x)
            launch(x, y)                       # _kernel[(grid,)](x, y, x.numel(), BLOCK=1024, num_warps=4)
            return y

        return run

A `Launch` belongs to one geometry: its grid, scalars, constants, and the dtypes of its tensors are the same each time,
addresses may differ. The first launch on a device, for each pattern of 16-byte alignment, goes through the JITFunction,
which specialises, compiles, caches and checks; later ones hand the same arguments to the C function that Triton's own
launcher ends in. Every launch falls back to the JITFunction under the interpreter, with hooks (Proton, pre-run hooks),
debugging or instrumentation, for kernels with scratch memory, and where Triton's internals are not as known here. What
it no longer sees: changed global variables of a kernel.

All that is private to Triton is used here.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction

from .device import on_device

PLANS = 4096  # geometries of one launcher; beyond that all are forgotten
VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
KNOWN = ((3, 6), (3, 7), (3, 8), (3, 9))
"""Versions of Triton whose launches were read; a test holds what is handed over against what they hand over."""

# Private names of Triton and PyTorch.
_runtime, _compilation = knobs.runtime, knobs.compilation
_enter, _leave = _runtime.launch_enter_hook, _runtime.launch_exit_hook  # chains, empty unless a profiler is at work
_current_device = getattr(torch._C, "_cuda_getDevice", None)  # None: PyTorch without CUDA
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def planned(plan: Callable[..., Callable[..., Any]]) -> Callable[..., Any]:
    """A launcher that decides once for a geometry.

    Args:
        plan: checks its arguments and returns what runs with them, and with all others of the same shapes, strides,
            dtypes, devices and scalars. It gets tensors whose memory was freed alone: those it must refuse.
    """
    known: dict[Any, Callable[..., Any]] = {}

    @functools.wraps(plan)
    def launcher(*arguments: Any) -> Any:
        key = tuple(
            [
                (a.shape, a.stride(), a.dtype, a.device, a.data_ptr() == 0) if isinstance(a, Tensor) else a
                for a in arguments
            ]
        )
        run = known.get(key)
        if run is None:
            if len(known) >= PLANS:
                known.clear()
            with on_device(next(a for a in arguments if isinstance(a, Tensor))):
                run = known[key] = plan(*arguments)
        return run(*arguments)

    return launcher


def bind(kernel: Any, grid: tuple[int, ...], *scalars: Any, **keywords: Any) -> Launch:
    """All of a launch but its tensors, which come first in the kernel's signature.

    Args:
        kernel: a `triton.jit` function.
        grid: how many programs.
        *scalars: the arguments that follow its tensors.
        **keywords: the constants that end its signature, by name, and options of the compiler such as `num_warps`.
    """
    named = [name for name in kernel.arg_names if name in keywords]
    if named != kernel.arg_names[len(kernel.arg_names) - len(named) :]:
        raise TypeError(f"{kernel.__name__}: {', '.join(named)} must end its signature, {', '.join(kernel.arg_names)}")
    constants = (*scalars, *(keywords.pop(name) for name in named))
    return Launch(kernel, (*grid, 1, 1)[:3], constants, keywords)


class Launch:
    """A launch of which the tensors are given each time. Operators alone may use it: torch.compile cannot trace it."""

    def __init__(self, kernel: Any, grid: tuple[int, ...], constants: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.kernel = kernel
        self.grid = grid
        self.constants = constants
        self.options = options
        self.is_known = type(kernel) is JITFunction and VERSION in KNOWN and _current_device is not None
        self._launches: dict[Any, Callable[[int, list[int]], None]] = {}

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launch with these tensors, of which the first says where."""
        first = tensors[0]
        assert first is not None
        device = first.get_device()
        if not self.is_known or device < 0 or _is_watched(self.kernel):
            with on_device(first):
                self._through_jit(tensors)
            return
        assert _current_device is not None
        assert _current_stream is not None
        if device != _current_device():  # a function belongs to the context of its device
            with torch.cuda.device(device):
                self(*tensors)
            return
        addresses = [0 if t is None else t.data_ptr() for t in tensors]
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
        return self.kernel[self.grid](*tensors, *self.constants, **self.options)

    def _past_jit(self, compiled: CompiledKernel) -> Callable[[int, list[int]], None] | None:
        """A function of stream and addresses; None where this launch needs more than the C function."""
        run: Any = compiled.run
        if type(run).__name__ != "CudaLauncher" or getattr(run, "gsan_enabled", False):
            return None
        if run.global_scratch_size or run.profile_scratch_size:  # allocated anew for each launch
            return None
        if getattr(compiled.metadata, "tensordesc_meta", None):
            return None
        launch, constants, (x, y, z) = run.launch, self.constants, self.grid
        function, packed = compiled.function, compiled.packed_metadata
        cooperative, overlapped = run.launch_cooperative_grid, run.launch_pdl

        # The kernel is kept: from 3.8 on its module is unloaded with it.
        if VERSION == (3, 6):

            def go(stream: int, addresses: list[int], kept: CompiledKernel = compiled) -> None:
                launch(x, y, z, stream, function, cooperative, overlapped, None, None, packed, None, None, None,
                       *addresses, *constants)  # fmt: skip
        else:
            annotations, signature = run.arg_annotations, run.kernel_signature

            def go(stream: int, addresses: list[int], kept: CompiledKernel = compiled) -> None:
                launch(x, y, z, stream, function, cooperative, overlapped, packed, None, None, None, None, None,
                       annotations, signature, (*addresses, *constants))  # fmt: skip

        return go


def _is_watched(kernel: JITFunction[Any]) -> Any:
    """Whether somebody wants to see launches, or another compilation than the usual."""
    return (
        _enter.calls
        or _leave.calls
        or _runtime.launch_enter_hook is not _enter
        or _runtime.launch_exit_hook is not _leave
        or _runtime.debug
        or _compilation.instrumentation_mode
        or kernel.pre_run_hooks
        or getattr(_runtime, "add_stages_inspection_hook", None) is not None
    )
