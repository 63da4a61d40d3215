"""A GPU of paper: Triton compiles for sm_90, and what it would hand to CUDA is recorded. Not for the interpreter."""

import types

import torch
import triton
import triton.backends.nvidia.driver as nvidia
from triton import knobs
from triton.backends.compiler import GPUTarget

calls, encoded = [], []
"""Arguments of every launch, and addresses of which a CUtensorMap was made, in order."""


class Utils:
    """What Triton asks the driver's library for."""

    def launch(self, *arguments):
        calls.append(arguments)

    def fill_tma_descriptor_tiled(self, *arguments):
        encoded.append(arguments[0])
        return ("map", *plain(arguments))

    fill_tma_descriptor = fill_tma_descriptor_tiled  # of Triton 3.6

    def load_binary(self, name, kernel, shared, device):
        return 1, 7000, 32, 0, 1024

    def get_device_properties(self, device):
        return {"max_shared_mem": 232448, "multiprocessor_count": 132}

    def build_signature_metadata(self, signature):
        return ",".join(signature).encode()

    def unload_module(self, module):
        pass


class PaperDriver(nvidia.CudaDriver):
    """A GPU of compute capability 9.0 that is not there."""

    def __init__(self):
        self.utils, self.launcher_cls = Utils(), nvidia.CudaLauncher
        self.get_current_device, self.get_current_stream = lambda: 0, lambda device: 42
        self.get_device_capability = lambda device: (9, 0)

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    def get_device(self):
        return 0


def on_gpu(*shape, offset=0):
    count = offset + torch.Size(shape).numel()
    return torch.empty(count, dtype=torch.bfloat16)[offset:].view(shape).as_subclass(OnGpu)


def plain(call):
    """What was handed over, with addresses for tensors and nothing where hooks and descriptions of a launch were."""

    def one(value):
        if isinstance(value, torch.Tensor):
            return value.data_ptr()
        if isinstance(value, (list, tuple)):
            return tuple(map(one, value))
        hidden = isinstance(value, knobs.HookChain) or type(value).__name__ == "LazyDict"
        return "nothing" if value is None or hidden else value

    return tuple(map(one, call))


def use(*launchers):
    """Let Triton, and these modules `launcher` of packages, believe in it."""
    triton.runtime.driver.set_active(PaperDriver())
    if triton.__version__.startswith("3.6."):
        nvidia.library_dirs = list
        launch = triton.runtime.driver.active.utils.launch
        nvidia.compile_module_from_src = lambda **_: types.SimpleNamespace(launch=launch)
    else:
        nvidia.PyKernelArg = lambda nested_tuple, type: (type, nested_tuple)
        nvidia.ARG_CONSTEXPR, nvidia.ARG_KERNEL, nvidia.ARG_TUPLE = "c", "k", "t"
    for launcher in launchers:
        launcher._current_device, launcher._current_stream = (lambda: 0), (lambda device: 42)
        assert launcher.VERSION in launcher.KNOWN, f"Triton {triton.__version__}: read its launches, then add it"
