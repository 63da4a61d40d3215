"""`rotary_embedding` in one kernel, and its gradient: the same kernel with the transposed matrix.

It is linear in x, so the operator is its own derivative, any number of times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from kernel_pytorch.cuda_ops._core.operator import declare, per_element
from kernel_pytorch.cuda_ops.operators import call
from kernel_pytorch.cuda_ops.rows_sharding import Shardings


def _fake(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, transposed: bool = False) -> Tensor:
    return x.new_empty(x.shape)


def _gradient(
    dy: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, transposed: bool, needs: Sequence[bool]
) -> tuple[Tensor | None, None, None]:
    return run_rotary_embedding(dy, cos, sin, interleaved, not transposed) if needs[0] else None, None, None


def token_placements(placements: Any, x: Any, cos: Any) -> Iterator[tuple[Any, Any]]:
    """Where heads may lie, whole, and the tables with them.

    Args:
        placements: `torch.distributed.tensor`.
        x: `(..., S, H, D)`.
        cos: `(S, R/2)`, or `(..., S, R/2)`.
    """
    yield placements.Replicate(), placements.Replicate()
    first = x.ndim - 1 - cos.ndim  # of the dimensions of x that the tables have
    for dimension in range(x.ndim - 1):
        has = first <= dimension < x.ndim - 2
        yield placements.Shard(dimension), placements.Shard(dimension - first) if has else placements.Replicate()


def _sharding(placements: Any, x: Any, cos: Any, sin: Any, *scalars: Any) -> Shardings:
    for heads, tables in token_placements(placements, x, cos):
        yield [heads], [heads, tables, tables]


# Three products and sums for each of two columns: 3 an element.
run_rotary_embedding = declare(
    "rotary_embedding(Tensor x, Tensor cos, Tensor sin, bool interleaved, bool transposed=False) -> Tensor",
    fake=_fake,
    gradient=_gradient,
    flops=per_element(3),
    sharding=_sharding,
)


def rotary_embedding(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate every head of `x` by the angles of its token, differentiable in x any number of times.

    Computed in float32 (float64 for float64) and rounded once. A view of a packed projection is read in place: heads
    and tokens may have any strides, as long as the columns of a head lie side by side.

    Args:
        x: `(..., S, H, D)`, float16, bfloat16 or float32, on a CPU float64 too.
        cos: `(S, R/2)`, or `(..., S, R/2)` with the leading dimensions of x; R at most D, what is beyond R passes. Any
            of these dtypes, on the device of x. No gradient goes to it.
        sin: as cos.
        interleaved: pairs are columns 2i and 2i + 1 (GPT-J); else i and i + R/2 (Llama, GPT-NeoX).

    Returns:
        `(..., S, H, D)` in the dtype of x, contiguous.

    Raises:
        RuntimeError: the arguments do not fit, or the kernel could not be launched; the message names them.
        TypeError: an argument is not of its kind.
    """
    y: Tensor = call("rotary_embedding", run_rotary_embedding, x, cos, sin, interleaved, False)
    return y
