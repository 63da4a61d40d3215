"""Launches on a GPU of paper: holds what `Launch` hands over against what the JITFunction does. A program."""

import importlib
import threading
import types

import triton
import triton.language as tl
from paper_gpu import calls, encoded, on_gpu, plain, use
from triton import knobs

launcher = importlib.import_module("kernel_pytorch.rmsnorm._core.launch")


@triton.jit
def scale_kernel(x, w, y, columns, stride, eps, HAS: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    row = tl.program_id(0) * stride
    value = tl.load(x + row + column, column < columns, 0.0).to(tl.float32) + eps
    if HAS:
        value *= tl.load(w + column, column < columns, 0.0)
    tl.store(y + row + column, value, column < columns)


@triton.jit
def product_kernel(x, w, bias, y, depth, HAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(tl.cdiv(depth, 64)):
        total = tl.dot(x.load([0, step * 64]), w.load([0, step * 64]).T, total)
    if HAS:
        total += tl.load(bias + tl.arange(0, COLUMNS))[None, :]
    y.store([0, 0], total.to(y.dtype))


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


def product(x, w, bias, y):
    seen = [launcher.tiles(x, 64, 64), launcher.tiles(w, 128, 64), None, launcher.tiles(y, 64, 128)]
    constants = {"HAS": bias is not None, "ROWS": 64, "COLUMNS": 128, "num_warps": 4}
    return launcher.bind(product_kernel, (1,), x.shape[1], described=seen, **constants), constants


def descriptors_are_handed_over_as_maps():
    x, w, y, bias = on_gpu(64, 256), on_gpu(128, 256), on_gpu(64, 128), on_gpu(128)
    describe = launcher.TensorDescriptor.from_tensor
    for given in (bias, None):
        launch, constants = product(x, w, given, y)
        calls.clear()
        for _ in range(2):
            launch(x, w, given, y)
        described = describe(x, [64, 64]), describe(w, [128, 64]), given, describe(y, [64, 128])
        product_kernel[(1,)](*described, 256, **constants)
        found = [str(plain(call)).replace("'nothing'", "0") for call in calls]
        assert found[0] == found[1] == found[2], found
        assert launch.is_known
        assert len(launch._launches) == 1


def maps_are_kept_by_address():
    """A map belongs to an address: another tensor gets its own, and the first one's is not made again."""
    x, w, y = on_gpu(64, 256), on_gpu(128, 256), on_gpu(64, 128)
    other = on_gpu(64, 256)
    launch, _ = product(x, w, None, y)
    launch(x, w, None, y)  # through the JITFunction
    encoded.clear()
    calls.clear()
    for given in (x, x, other, x, other):
        launch(given, w, None, y)
        (seen,) = {part[1] for part in flat(calls[-1]) if isinstance(part, tuple) and part[1:2] == (given.data_ptr(),)}
        assert seen == given.data_ptr()
    assert encoded == [y.data_ptr(), w.data_ptr(), x.data_ptr(), other.data_ptr()], encoded
    launcher.MAPS = 1
    launch(x.clone(), w, None, y)
    ((_, go),) = launch._launches.items()
    kept = dict(zip(go.__code__.co_freevars, (cell.cell_contents for cell in go.__closure__), strict=True))["maps"]
    assert {len(maps) for _, maps in kept} == {1}


def flat(call):
    """The kernel's own arguments, in whatever order Triton wants the others."""
    last = call[-1]
    return list(last) if isinstance(last, tuple) else list(call)


def a_map_of_another_kind_goes_through_the_jit():
    x, w, y = on_gpu(64, 256), on_gpu(128, 256), on_gpu(64, 128)
    launch, _ = product(x, w, None, y)
    compiled = types.SimpleNamespace(metadata=types.SimpleNamespace(tensordesc_meta=[{"fp4_padded": True}] * 3))
    assert launch._maps(compiled) is None
    compiled.metadata.tensordesc_meta = None
    assert launch._maps(compiled) is None


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


use(launcher)
hands_over_the_same()
tensor_that_is_absent()
descriptors_are_handed_over_as_maps()
maps_are_kept_by_address()
a_map_of_another_kind_goes_through_the_jit()
goes_through_the_jit_where_somebody_watches()
any_thread_may_launch()
unknown_versions_go_through_the_jit()
