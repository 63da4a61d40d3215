# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Cross entropy of logits in Triton: kernels, then the launchers.

Forward: a program reads a part of a row once, a block at a time, and keeps the largest logit and the sum of
exponentials relative to it (Milakov and Gimelshein, 2018); a second kernel joins the parts. So a single row is shared
by many programs, and which part a program has depends on V alone: the loss of a token never depends on how many there
are. Backward: one pass that reads logits and writes their gradient, to the same place if that is where it belongs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernel_pytorch.linear_cross_entropy._core.device import on_device
from kernel_pytorch.linear_cross_entropy._core.launch import cdiv, next_power_of_2, warps

from .chunks import wide_dtype
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
    """This program computes a block of ROWS rows of the gradient, which may stand where the logits do.

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


def forward(
    logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float, z_loss: float, softcap: float
) -> tuple[Tensor, Tensor]:
    """Launch the forward: one kernel for the parts of rows, and one to join them.

    Args:
        logits: `(T, V)`, any strides.
        target: `(T,)`.
        ignore_index: as in `reference.py`.
        label_smoothing: as in `reference.py`.
        z_loss: as in `reference.py`.
        softcap: as in `reference.py`.

    Returns:
        `(loss, normalizer)`, `(T,)` and `(T, 2)`, wide.
    """
    tokens, words = logits.shape
    wide = wide_dtype(logits.dtype)
    logits, target = _with_unit_stride(logits), target.contiguous()
    rows, block = _tile(words)
    blocks = min(BLOCKS, cdiv(words, block))
    parts = cdiv(words, block * blocks)
    shares = Shares(parts, tokens, wide, logits.device, label_smoothing > 0.0)
    if tokens == 0:
        return torch.empty_like(shares.picked), shares.picked.new_empty((0, 2))
    with on_device(logits):
        _logits_forward_kernel[(cdiv(tokens, rows), parts)](
            logits, target, shares.largest, shares.exponentials, shares.total, shares.picked, tokens, words,
            logits.stride(0), ignore_index,
            SOFTCAP=softcap, SMOOTHED=label_smoothing > 0.0, WIDE=triton_dtype(wide), HALF=logits.dtype.itemsize == 2,
            ROWS=rows, BLOCK=block, BLOCKS=blocks, num_warps=warps(rows * block),
        )  # fmt: skip
        return shares.join(target, words, ignore_index, block * blocks, label_smoothing, z_loss)


def backward(
    dloss: Tensor,
    logits: Tensor,
    target: Tensor,
    normalizer: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    result: Tensor,
) -> None:
    """Launch the backward: one kernel.

    Args:
        dloss: `(T,)`, any strides.
        logits: `(T, V)`, any strides.
        target: `(T,)`.
        normalizer: `(T, 2)`, as the forward returned it.
        ignore_index: as in `reference.py`.
        label_smoothing: as in `reference.py`.
        z_loss: as in `reference.py`.
        softcap: as in `reference.py`.
        result: `(T, V)`, written; it may be the logits.
    """
    tokens, words = logits.shape
    source, place = _with_unit_stride(logits), _with_unit_stride(result)
    rows, block = _tile(words)
    with on_device(logits):
        _logits_backward_kernel[(cdiv(tokens, rows), cdiv(words, block))](
            source, target.contiguous(), normalizer.contiguous(), dloss.contiguous(), place,
            tokens, words, source.stride(0), place.stride(0), ignore_index,
            LABEL_SMOOTHING=label_smoothing, Z_LOSS=z_loss, SOFTCAP=softcap, WIDE=triton_dtype(normalizer.dtype),
            HALF=logits.dtype.itemsize == 2, ROWS=rows, BLOCK=block, num_warps=warps(rows * block),
        )  # fmt: skip
    if place is not result:
        result.copy_(place)


def _with_unit_stride(matrix: Tensor) -> Tensor:
    return matrix if matrix.stride(1) == 1 or matrix.shape[1] == 1 else matrix.contiguous()


def _tile(words: int) -> tuple[int, int]:
    """Rows and words of a tile."""
    block = min(BLOCK_LIMIT, next_power_of_2(words))
    return max(1, SMALLEST_TILE // block), block
