"""`rotary_embedding` in one kernel, and its gradient: the same kernel with the transposed matrix.

It is linear in x, so the operator is its own derivative, any number of times.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kernel_pytorch.cuda_ops.differentiable import differentiable
from kernel_pytorch.cuda_ops.operators import below_autograd, call, operators, per_element, register
from kernel_pytorch.cuda_ops.sharding import Shardings


def _fake(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, transposed: bool = False, version: int = 0) -> Tensor:
    return x.new_empty(x.shape)


class RotaryEmbeddingFunction(torch.autograd.Function):
    """`(x, cos, sin) -> y`; cos and sin have no gradient."""

    @staticmethod
    def forward(
        x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, transposed: bool = False, version: int = 0
    ) -> Tensor:
        """Run the operator."""
        return below_autograd(operators.rotary_embedding.default, x, cos, sin, interleaved, transposed, version)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the angles; x is not needed."""
        _, cos, sin, interleaved = inputs[:4]
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        ctx.transposed = inputs[4] if len(inputs) > 4 else False

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """The gradient of x."""
        nothing = (None,) * (len(ctx.needs_input_grad) - 1)
        if not ctx.needs_input_grad[0]:
            return None, *nothing
        cos, sin = ctx.saved_tensors
        arguments = (dy, cos, sin, ctx.interleaved, not ctx.transposed)
        return _call(*arguments), *nothing


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
run_rotary_embedding = differentiable(RotaryEmbeddingFunction)
register("rotary_embedding", _fake, run_rotary_embedding, per_element(3), _sharding)


def _call(*arguments: Any) -> Tensor:
    y: Tensor = call("rotary_embedding", operators.rotary_embedding.default, run_rotary_embedding, *arguments)
    return y


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
    return _call(x, cos, sin, interleaved)
