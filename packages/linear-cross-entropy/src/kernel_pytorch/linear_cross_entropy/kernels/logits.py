# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Cross entropy of logits in Triton: kernels, then the launchers.

Forward: a program reads a part of a row once, a block at a time, and keeps the largest logit and the sum of
exponentials relative to it (Milakov and Gimelshein, 2018); a second kernel joins the parts. So a single row is shared
by many programs, and which part a program has depends on V alone: the loss of a token never depends on how many there
are. Backward: one pass that reads logits and writes their gradient, to the same place if that is where it belongs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from kernel_pytorch.linear_cross_entropy._core.launch import bind
from kernel_pytorch.linear_cross_entropy._core.sizes import allocator, cdiv, next_power_of_2, reader, warps
from kernel_pytorch.linear_cross_entropy.rules.cross_entropy import wide_dtype

from .tiles import Shares, add_exponentials, add_logits, capped, load_targets, logits_gradient, triton_dtype

BLOCK_LIMIT = 4096  # words of a tile
SMALLEST_TILE = 1024  # logits of a tile, several rows of a small vocabulary
BLOCKS = 4  # tiles that a program of the forward takes one after another


@triton.jit
def _logits_forward_kernel(
    logits_ptr, target_ptr, largest_ptr, exponentials_ptr, sum_shares_ptr, picked_ptr, tokens, words, row_stride,
    ignore_index,
    SOFTCAP: tl.constexpr, SMOOTHED: tl.constexpr, WIDE: tl.constexpr, HALF: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """This program takes BLOCKS blocks of ROWS rows.

    logits: (T, V) with unit stride in V. largest, exponentials, sum_shares: (S, T). picked: (T).
    """
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = token < tokens
    rows = logits_ptr + token.to(tl.int64)[:, None] * row_stride
    part = tl.program_id(1)
    largest = tl.full((ROWS,), float("-inf"), WIDE)
    total = tl.zeros((ROWS,), WIDE)
    logits_sum = tl.zeros((ROWS,), WIDE)
    for block in range(BLOCKS):
        word = (part * BLOCKS + block) * BLOCK + tl.arange(0, BLOCK)[None, :]
        mask = exists[:, None] & (word < words)
        z = capped(tl.load(rows + word, mask=mask, other=0.0).to(WIDE), SOFTCAP, HALF)
        new, total = add_exponentials(tl.where(mask, z, float("-inf")), largest, total)
        if SMOOTHED:
            first = part * BLOCKS * BLOCK
            seen = tl.minimum(first + block * BLOCK, words) - first
            logits_sum = add_logits(z, mask, largest, new, seen, logits_sum)
        largest = new
    place = part.to(tl.int64) * tokens + token
    tl.store(largest_ptr + place, largest, mask=exists)
    tl.store(exponentials_ptr + place, total, mask=exists)
    if SMOOTHED:
        tl.store(sum_shares_ptr + place, logits_sum, mask=exists)
    if part == 0:
        target = load_targets(target_ptr, token, exists, words, ignore_index)
        counts = target >= 0
        at_target = logits_ptr + token.to(tl.int64) * row_stride + target
        picked = capped(tl.load(at_target, mask=counts, other=0.0).to(WIDE), SOFTCAP, HALF)
        tl.store(picked_ptr + token, picked, mask=counts)


@triton.jit
def _logits_backward_kernel(
    logits_ptr, target_ptr, normalizer_ptr, dloss_ptr, gradient_ptr, tokens, words, row_stride, gradient_stride,
    ignore_index,
    LABEL_SMOOTHING: tl.constexpr, Z_LOSS: tl.constexpr, SOFTCAP: tl.constexpr, WIDE: tl.constexpr, HALF: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """This program computes a block of ROWS rows of the gradient, which may overwrite the logits.

    logits, gradient: (T, V) with unit stride in V. normalizer: (T, 2). dloss: (T).
    """
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = token < tokens
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    mask = exists[:, None] & (word < words)
    row = token.to(tl.int64)[:, None]
    logits = tl.load(logits_ptr + row * row_stride + word, mask=mask, other=0.0).to(WIDE)
    target = load_targets(target_ptr, token, exists, words, ignore_index)
    largest = tl.load(normalizer_ptr + 2 * token, mask=exists, other=0.0)
    log_sum = tl.load(normalizer_ptr + 2 * token + 1, mask=exists, other=0.0)
    dloss = tl.load(dloss_ptr + token, mask=target >= 0, other=0.0).to(WIDE)
    gradient = logits_gradient(
        logits, word, target, largest, log_sum, dloss, words, LABEL_SMOOTHING, Z_LOSS, SOFTCAP, HALF
    )
    place = gradient_ptr + row * gradient_stride + word
    tl.store(place, gradient.to(gradient_ptr.dtype.element_ty), mask=mask)


def plan(
    logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, z_loss: float, softcap: float
) -> Callable[..., tuple[Tensor, Tensor]]:
    """How the forward is launched for a geometry: one kernel for the parts of rows, and one to join them.

    Args:
        logits: `(..., V)`, any strides.
        target: `(...)`.

    Returns:
        A function of the tensors that returns `(loss, normalizer)`, `(...)` and `(..., 2)`, wide.
    """
    as_rows, wide = rows_of(logits), wide_dtype(logits.dtype)
    matrix = as_rows(logits)
    tokens, words = matrix.shape
    rows, block = _tile(words)
    blocks = min(BLOCKS, cdiv(words, block))
    count = cdiv(words, block * blocks)
    parts = Shares(count, block * blocks, target, words, ignore_index, label_smoothing, z_loss, wide)
    launch = bind(
        _logits_forward_kernel, (cdiv(tokens, rows), count), tokens, words, matrix.stride(0), ignore_index,
        SOFTCAP=softcap, SMOOTHED=label_smoothing > 0.0, WIDE=triton_dtype(wide), HALF=logits.dtype.itemsize == 2,
        ROWS=rows, BLOCK=block, BLOCKS=blocks, num_warps=warps(rows * block),
    )  # fmt: skip
    read_logits, read_target = reader(logits, as_rows), reader(target, Tensor.contiguous)

    def run(logits: Tensor, target: Tensor, *scalars: Any) -> tuple[Tensor, Tensor]:
        target, shares = read_target(target), parts.new()
        launch(read_logits(logits), target, *shares)
        return parts.join(shares, target)

    return run


def plan_backward(
    dloss: Tensor,
    normalizer: Tensor,
    logits: Tensor,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    inplace: bool,
) -> Callable[..., Tensor]:
    """How the backward is launched for a geometry: one kernel.

    Args:
        dloss: `(...)`, any strides.
        normalizer: `(..., 2)`, as the forward returned it.
        logits: `(..., V)`, any strides.
        target: `(...)`.
        inplace: whether the gradient goes where the logits are.

    Returns:
        A function of the tensors that returns the gradient, contiguous, or the logits.
    """
    as_rows, new = rows_of(logits), allocator(logits)
    matrix = as_rows(logits)
    tokens, words = matrix.shape
    over = inplace and matrix.data_ptr() == logits.data_ptr()  # else no view of these logits has rows
    rows, block = _tile(words)
    launch = bind(
        _logits_backward_kernel, (cdiv(tokens, rows), cdiv(words, block)),
        tokens, words, matrix.stride(0), matrix.stride(0) if over else words, ignore_index,
        LABEL_SMOOTHING=label_smoothing, Z_LOSS=z_loss, SOFTCAP=softcap, WIDE=triton_dtype(normalizer.dtype),
        HALF=logits.dtype.itemsize == 2, ROWS=rows, BLOCK=block, num_warps=warps(rows * block),
    )  # fmt: skip
    read_logits = reader(logits, as_rows)
    read_dloss, read_normalizer, read_target = (reader(t, Tensor.contiguous) for t in (dloss, normalizer, target))

    def run(dloss: Tensor, normalizer: Tensor, logits: Tensor, target: Tensor, *scalars: Any) -> Tensor:
        result = logits if over else new()
        launch(read_logits(logits), read_target(target), read_normalizer(normalizer), read_dloss(dloss), result)
        return logits.copy_(result) if inplace and not over else result

    return run


def rows_of(x: Tensor) -> Callable[[Tensor], Tensor]:
    """What sees tensors like x, `(..., V)`, as `(T, V)` with unit stride in V; copies only what has no such view."""
    words = x.shape[-1]

    def as_rows(x: Tensor) -> Tensor:
        rows = x.reshape(-1, words)
        return rows if rows.stride(1) == 1 or words == 1 else rows.contiguous()

    return as_rows


def _tile(words: int) -> tuple[int, int]:
    """Rows and words of a tile."""
    block = min(BLOCK_LIMIT, next_power_of_2(words))
    return max(1, SMALLEST_TILE // block), block
