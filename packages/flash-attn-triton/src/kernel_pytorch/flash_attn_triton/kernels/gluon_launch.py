"""When the kernel of `gluon_forward.py` runs, with which configuration, and its launcher.

It is for attention that is full or causal and has no other feature, with heads of 64 or 128, in 16 bits, on compute
capability 9.0. All else takes the kernel of `forward.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from kernel_pytorch.flash_attn_triton._core.launch import KNOWN, VERSION, Launch, Tiles, _current_device
from kernel_pytorch.flash_attn_triton._core.sizes import cdiv
from kernel_pytorch.flash_attn_triton._core.triton_matmul import architecture, multiprocessors_of

from .geometry import Geometry

ROWS = 64  # of a consumer
NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}  # as Gluon calls them
LEAST_SCALE = 2.0**-64  # below, masked scores of -inf could become NaN


class Configuration(NamedTuple):
    """How the kernel is launched.

    Attributes:
        consumers: groups of four warps, each of which attends for 64 queries.
        columns: keys of a tile.
        stages: tiles of keys, and of values, that there is room for.
        registers: of a thread of the consumers but the first, which has what is left.
        together: heads whose keys and values are read at a time.
        persistent: whether as many programs are launched as run at a time; else one for each item.
        held: whether the second product is waited for only when the softmax is done.
    """

    consumers: int
    columns: int
    stages: int
    registers: int
    together: int
    persistent: bool
    held: bool


CONFIGURATIONS = {
    (64, False): Configuration(3, 128, 4, 160, 8, True, False),
    (64, True): Configuration(3, 128, 4, 160, 32, True, False),
    (128, False): Configuration(2, 128, 2, 240, 8, True, False),
    (128, True): Configuration(2, 128, 2, 240, 128, True, True),
}
"""By head size and whether it is causal: the fastest of those that were tried on an H200."""

CAPABILITY = 90  # as Triton writes it: the matrix instructions are those of 9.0 alone

FASTER = frozenset((depth, dtype, causal) for depth, causal in CONFIGURATIONS for dtype in NAMES)
"""Head size, dtype and causal flag for which level "triton" launches this kernel: verified on an H200, see
`results/nvidia-h200/flash-attn-triton.verification.json`, and timed beside the portable kernel and cuDNN's there."""

_asked_for: ContextVar[bool] = ContextVar("asked_for", default=False)


@contextlib.contextmanager
def gluon_forward() -> Iterator[None]:
    """Make level "triton" launch only this kernel, to verify it or to compare it with the portable one.

    Where it cannot run, calls raise NotImplementedError, which says why.
    """
    token = _asked_for.set(True)
    try:
        yield
    finally:
        _asked_for.reset(token)


def is_asked_for(*arguments: Any) -> bool:
    """What plans rest on beside their arguments."""
    return _asked_for.get()


def chosen(g: Geometry, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, right: int) -> Configuration | None:
    """The configuration with which this kernel runs; None where the other one does.

    Raises:
        NotImplementedError: it was asked for and cannot run, with the reason.
    """
    causal = right == 0
    asked = is_asked_for()
    if not asked and (g.depth, q.dtype, causal) not in FASTER:
        return None
    reason = why_not(g, q, k, v, sinks, right)
    if reason is None:
        return CONFIGURATIONS[g.depth, causal]
    if asked:
        raise NotImplementedError(f"the Gluon forward cannot run here: {reason}")
    return None


def why_not(g: Geometry, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, right: int) -> str | None:
    """Why this kernel cannot run; None if it can."""
    found = architecture(q.device)
    if found != CAPABILITY:
        return f"it is for compute capability 9.0, and this is {'the interpreter' if found is None else found / 10}"
    if not has_gluon():
        return f"Triton {triton.__version__} has no Gluon for Hopper"
    if q.dtype not in NAMES or (g.depth, False) not in CONFIGURATIONS:
        return f"it takes float16 and bfloat16 with head sizes 64 and 128, given {q.dtype} and {g.depth}"
    if g.has_features or sinks is not None or g.varlen or g.constants["HAS_LEFT"] or right > 0:
        return "it has no window, soft cap, ALiBi, sinks, dropout, mask or packed sequences"
    if g.is_empty or k.numel() == 0:
        return "there is nothing to attend to"
    if not g.constants["SCALE"] >= LEAST_SCALE:
        return f"scale is {g.constants['SCALE']}; it must be at least {LEAST_SCALE}"
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not _is_describable(x):
            return f"the copy engine cannot read {name}, strides {x.stride()}: multiples of 16 bytes, the last one 1"
    return None


def has_gluon() -> bool:
    """Whether Triton brings what the kernel is written in."""
    try:
        from . import gluon_forward  # noqa: F401
    except (ImportError, AttributeError):
        return False
    return True


def _is_describable(x: Tensor) -> bool:
    # The stride of a dimension of size one has no meaning; the launcher writes another.
    strides = [stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
    aligned = x.data_ptr() % 16 == 0 and all(stride % 8 == 0 and 0 < stride < 2**36 for stride in strides)
    return aligned and x.stride(-1) == 1


def plan(
    g: Geometry, q: Tensor, k: Tensor, v: Tensor, scale: float, keep_rest: bool, chosen: Configuration
) -> Callable[..., tuple[Tensor, ...]]:
    """What runs the forward of this geometry: `(o, lse, normalizer, rest)`, as the other kernel's."""
    from triton.experimental.gluon import language as gl

    from .gluon_forward import hopper_forward_kernel

    consumers, columns, stages, registers, together, persistent, held = chosen
    items = cdiv(g.rows, ROWS * consumers) * g.batch * g.heads
    programs = min(items, multiprocessors_of(q.device)) if persistent else items
    blocks = [[1, 1, ROWS, g.depth]] + [[1, 1, columns, g.depth]] * 2 + [[1, 1, ROWS, g.depth]] * 2
    layouts = [gl.NVMMASharedLayout.get_default_for(block, getattr(gl, NAMES[q.dtype])) for block in blocks]
    seen = [_seen(x, block) for x, block in zip((q, k, v, g.q_like.meta, g.q_like.meta), blocks, strict=True)]
    launch = GluonLaunch(
        hopper_forward_kernel,
        (programs, 1, 1),
        (g.heads, g.group, g.rows, g.columns, g.batch * g.heads, items, scale, g.constants["HAS_RIGHT"], keep_rest,
         min(together, g.batch * g.heads), consumers, columns, g.depth, stages, held, registers),
        {"num_warps": 4},
        (*seen, None, None),
        layouts,
    )  # fmt: skip

    results = g.results(keep_rest)

    def run(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        o, lse, normalizer, kept = results()
        launch(q, k, v, o, kept if keep_rest else o, lse, normalizer)
        return o, lse, normalizer, kept

    return run


def _seen(x: Tensor, block: list[int]) -> Tiles:
    """How the copy engine sees it; the stride of a dimension of one element is never used, and must be allowed."""
    outer = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    return Tiles(tuple(x.shape), (*(8 if size == 1 else stride for size, stride in outer), 1), block)


class GluonLaunch(Launch):
    """A launch of a kernel in Gluon, whose descriptors say how tiles lie in shared memory."""

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], constants: tuple[Any, ...], options: dict[str, Any],
        described: Sequence[Tiles | None], layouts: Sequence[Any],
    ) -> None:  # fmt: skip
        super().__init__(kernel, grid, constants, options, described)
        self.layouts = [*layouts, *[None] * (len(described) - len(layouts))]
        self.is_known = VERSION in KNOWN and _current_device is not None

    def _through_jit(self, tensors: tuple[Tensor | None, ...]) -> Any:
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        given = [
            t if tiles is None else TensorDescriptor(t, list(tiles.shape), list(tiles.strides), tiles.block, layout)
            for t, tiles, layout in zip(tensors, self.described, self.layouts, strict=True)
        ]
        return self.kernel[self.grid](*given, *self.constants, **self.options)
