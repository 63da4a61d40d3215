"""The forward pass in Triton: one kernel, the mask drawn where it is used. The kernel, then the launcher.

x and residual are seen as `(T, N)` with a row stride each. One launch, tiles of some rows and some columns
(`kernels/tiles.py`), everything in float32 (float64 for float64 input).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_pytorch.fused_ln_act._core.arguments import check_choice
from kernel_pytorch.fused_ln_act._core.direct_calls import check_operands
from kernel_pytorch.fused_ln_act._core.launch import bind
from kernel_pytorch.fused_ln_act._core.plans import Planned
from kernel_pytorch.fused_ln_act._core.sizes import allocator, bytes_of, eviction_policy, exceeds_int32, reader, unmade
from kernel_pytorch.fused_ln_act.kernels.activations import activate
from kernel_pytorch.fused_ln_act.kernels.dropout import check_seed, dropout
from kernel_pytorch.fused_ln_act.kernels.rows import as_rows
from kernel_pytorch.fused_ln_act.kernels.tiles import FEW_ELEMENTS, Tile, place, widest_tile
from kernel_pytorch.fused_ln_act.rules.activations import ACTIVATIONS


@triton.jit
def _bias_forward_kernel(
    x_ptr, bias_ptr, residual_ptr, seed_ptr, y_ptr, rows, columns, x_stride, residual_stride,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr, DROPOUT_P: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LONG_OFFSETS: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """This program computes one tile.

    x, residual: (T, N) with unit stride in N. bias: (N). seed: (). y: (T, N) contiguous.
    """
    row, column, mask = place(rows, columns, ROWS, BLOCK, LONG_OFFSETS)
    wide = tl.float64 if y_ptr.dtype.element_ty == tl.float64 else tl.float32
    y = tl.load(x_ptr + row * x_stride + column, mask=mask, other=0.0, eviction_policy=POLICY).to(wide)
    if HAS_BIAS:
        y += tl.load(bias_ptr + column, mask=column < columns, other=0.0).to(wide)
    y = activate(y, ACTIVATION, y_ptr.dtype.element_ty.primitive_bitwidth == 16)
    if DROPOUT_P > 0.0:
        y = dropout(y, tl.load(seed_ptr), row, column, columns, DROPOUT_P)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * residual_stride + column, mask=mask, other=0.0, eviction_policy=POLICY)
        y += residual.to(wide)
    tl.store(y_ptr + row * columns + column, y.to(y_ptr.dtype.element_ty), mask=mask)


@Planned
def bias_act(x: Tensor, bias: Tensor | None, activation: str) -> Callable[..., Tensor]:
    """The launcher of `activation(x + bias)`: one launch.

    Args:
        x: `(..., N)`, any strides.
        bias: `(N,)` or None.
        activation: one of `ACTIVATIONS`.

    Returns:
        `(..., N)`, contiguous, in the dtype of x.
    """
    run = plan(x, bias, None, None, 0.0, activation)
    return lambda x, bias, activation: run(x, bias, None, None)


@Planned
def bias_dropout_add(
    x: Tensor, bias: Tensor | None, residual: Tensor, seed: Tensor | None, p: float
) -> Callable[..., Tensor]:
    """The launcher of `residual + dropout(x + bias)`: one launch.

    Args:
        x: `(..., N)`, any strides.
        bias: `(N,)` or None.
        residual: `(..., N)`, any strides.
        seed: int64 `()`, or None where p is 0.
        p: the probability that an element is dropped.

    Returns:
        `(..., N)`, contiguous, in the promoted dtype of x and residual.
    """
    check_operands(residual=residual)
    return plan(x, bias, residual, seed, p, "identity")


def plan(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor | None, dropout_p: float, activation: str
) -> Callable[..., Tensor]:
    """What computes `residual + dropout(activation(x + bias))` of `(x, bias, residual, seed)` of this geometry."""
    check(x, {"residual": residual}, bias, seed, dropout_p, activation)
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    new_y = allocator(x, dtype=dtype)
    if x.numel() == 0:
        return lambda *arguments: new_y()
    x_rows = as_rows(x)
    residual_rows = None if residual is None else as_rows(residual)
    walked = [t for t in (x_rows, residual_rows, unmade(x.shape, dtype)) if t is not None]
    (rows, columns), drops = x_rows.shape, dropout_p > 0.0
    tile = tile_of(rows, columns, x)
    launch = bind(
        _bias_forward_kernel, tile.grid(rows, columns),
        rows, columns, x_rows.stride(0), 0 if residual_rows is None else residual_rows.stride(0),
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, ACTIVATION=activation, DROPOUT_P=dropout_p,
        LONG_OFFSETS=exceeds_int32(*walked), POLICY=eviction_policy(x, bytes_of(*walked)), **tile.options,
    )  # fmt: skip
    read_x, read_bias = reader(x, as_rows), reader(bias, Tensor.contiguous)
    read_residual = reader(residual, as_rows)

    def run(x: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor | None, *scalars: Any) -> Tensor:
        y = new_y()
        launch(read_x(x), read_bias(bias), read_residual(residual), seed if drops else None, y)
        return y

    return run


def check(
    x: Tensor,
    like_x: Mapping[str, Tensor | None],
    bias: Tensor | None,
    seed: Tensor | None,
    dropout_p: float,
    activation: str,
) -> None:
    """Check the arguments: direct operator calls pass no other check, and a wrong shape would read foreign memory."""
    check_choice("activation", activation, ACTIVATIONS)
    check_operands(x=x, bias=bias)
    check_operands(**like_x)  # may hold another tensor named x
    for name, tensor in like_x.items():
        if tensor is not None and tensor.shape != x.shape:
            raise ValueError(f"{name}: shape is {tuple(tensor.shape)}; it must be that of x, {tuple(x.shape)}")
    if bias is not None and bias.shape != x.shape[-1:]:
        raise ValueError(f"bias: shape is {tuple(bias.shape)}; for x of {tuple(x.shape)} it must be its end")
    check_seed(seed, dropout_p)


def tile_of(rows: int, columns: int, x: Tensor) -> Tile:
    """Tile of one program: small for few elements; for many 16-bit elements several rows, which share the bias."""
    if rows * columns <= FEW_ELEMENTS:
        return widest_tile(columns, 512, 4)
    return widest_tile(columns, 8192, 8, widest=1024) if x.element_size() == 2 else widest_tile(columns, 1024, 4)
