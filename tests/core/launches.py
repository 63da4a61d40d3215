"""Launches on a GPU of paper: Triton compiles for sm_90, and what it would hand to CUDA is recorded.

Run as a program, without Triton's interpreter: it holds what `Launch` hands over against what the JITFunction does.
"""

import importlib
import threading
import types

import torch
import triton
import triton.backends.nvidia.driver as nvidia
import triton.language as tl
from triton import knobs
from triton.backends.compiler import GPUTarget

launcher = importlib.import_module("kernel_pytorch.rmsnorm._core.launcher")
calls = []


class Utils:
    """What Triton asks the driver's library for."""

    def launch(self, *arguments):
        calls.append(arguments)

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


@triton.jit
def scale_kernel(x, w, y, columns, stride, eps, HAS: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    row = tl.program_id(0) * stride
    value = tl.load(x + row + column, column < columns, 0.0).to(tl.float32) + eps
    if HAS:
        value *= tl.load(w + column, column < columns, 0.0)
    tl.store(y + row + column, value, column < columns)


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


def bound(columns=1024, stride=1024, eps=1e-6, has=True, **options):
    return launcher.bind(scale_kernel, (4,), columns, stride, eps, HAS=has, BLOCK=1024, **options)


def hands_over_the_same():
    x, w, y = on_gpu(4, 1024), on_gpu(1024), on_gpu(4, 1024)
    odd = on_gpu(4, 1024, offset=1)  # another alignment is another compilation
    for first in (x, odd):
        for numbers in ((1024, 1024, 1e-6), (1, 1024, 0.5), (17, 1024, 0.5), (16, 1, 0.5), (1000, 2**33, 0.5)):
            launch = bound(*numbers, num_warps=4)
            calls.clear()
            launch(first, w, y)
            launch(first, w, y)
            scale_kernel[(4,)](first, w, y, *numbers, HAS=True, BLOCK=1024, num_warps=4)
            found = [plain(call) for call in calls]
            assert len(found) == 3, len(found)
            assert found[0] == found[1] == found[2], (numbers, found)
            assert launch.is_known
    launch = bound()
    launch(x, w, y)
    launch(odd, w, y)
    assert len(launch._launches) == 2


def tensor_that_is_absent():
    x, y = on_gpu(4, 1024), on_gpu(4, 1024)
    launch = bound(has=False)
    calls.clear()
    launch(x, None, y)
    launch(x, None, y)
    first, second = (tuple(0 if value == "nothing" else value for value in plain(call)) for call in calls)
    assert str(first).replace("'nothing'", "0") == str(second).replace("'nothing'", "0"), (first, second)


def goes_through_the_jit_where_somebody_watches():
    x, w, y = on_gpu(4, 1024), on_gpu(1024), on_gpu(4, 1024)
    launch, counted, original = bound(), [], triton.JITFunction.run
    triton.JITFunction.run = lambda self, *a, **k: (counted.append(1), original(self, *a, **k))[1]

    def is_watched():
        counted.clear()
        launch(x, w, y)
        return bool(counted)

    def hook(metadata):
        pass

    assert is_watched()  # the first time it is compiled
    assert not is_watched()
    for chain in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        chain.add(hook)
        assert is_watched()
        chain.remove(hook)
        assert not is_watched()
    with knobs.runtime.scope():
        knobs.runtime.launch_enter_hook = hook
        assert is_watched()
    knobs.runtime.debug = True
    assert is_watched()
    knobs.runtime.debug = False
    scale_kernel.pre_run_hooks.append(lambda *a, **k: None)
    assert is_watched()
    scale_kernel.pre_run_hooks.clear()
    assert not is_watched()
    triton.JITFunction.run = original


def any_thread_may_launch():
    x, w, y = on_gpu(4, 1024), on_gpu(1024), on_gpu(4, 1024)
    launch = bound(num_warps=8)
    calls.clear()
    threads = [threading.Thread(target=lambda: [launch(x, w, y) for _ in range(50)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 400
    assert len({str(plain(call)[-8:]) for call in calls}) == 1


def unknown_versions_go_through_the_jit():
    launcher.VERSION = (4, 0)
    assert not bound().is_known


triton.runtime.driver.set_active(PaperDriver())
if launcher.VERSION == (3, 6):
    nvidia.library_dirs = list
    nvidia.compile_module_from_src = lambda **_: types.SimpleNamespace(launch=triton.runtime.driver.active.utils.launch)
else:
    nvidia.PyKernelArg = lambda nested_tuple, type: (type, nested_tuple)
    nvidia.ARG_CONSTEXPR, nvidia.ARG_KERNEL, nvidia.ARG_TUPLE = "c", "k", "t"
launcher._current_device, launcher._current_stream = (lambda: 0), (lambda device: 42)
assert launcher.VERSION in launcher.KNOWN, f"Triton {triton.__version__}: read its launches, then add it to KNOWN"

hands_over_the_same()
tensor_that_is_absent()
goes_through_the_jit_where_somebody_watches()
any_thread_may_launch()
unknown_versions_go_through_the_jit()
