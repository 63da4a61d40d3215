"""Inputs that reveal errors which random numbers hide."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

OUTLIER = 1e4
OFFSET = 1e3
COMMON_OFFSET = "common offset"
IMITATED = "imitated activations"
TOKENS = 512
"""Rows of `imitated_activations`."""


def outlier_channels(x: Tensor) -> Tensor:
    """Every seventh channel 10,000 times as large, as in the residual streams of large language models."""
    x = x.clone()
    limit = torch.finfo(x.dtype).max / 2
    x[..., ::7] = (x[..., ::7].double() * OUTLIER).clamp(-limit, limit).to(x.dtype)
    return x


def large_mean(x: Tensor) -> Tensor:
    """A mean of 10,000 with unit variance: sums of squares cancel."""
    return x + OUTLIER


def zero_rows(x: Tensor) -> Tensor:
    """Every second row zero: only epsilon keeps the result finite."""
    x = x.clone()
    x[::2] = 0
    return x


def denormals(x: Tensor) -> Tensor:
    """Numbers below the smallest normal one: squares underflow, flushing shows."""
    return (x.double() * torch.finfo(x.dtype).tiny * 0.25).to(x.dtype)


def tiny(x: Tensor) -> Tensor:
    """Magnitudes of 1e-6: epsilon dominates, and a wrong one shows."""
    return (x.double() * 1e-6).to(x.dtype)


def strided_view(x: Tensor) -> Tensor:
    """Every second element of a larger buffer: the last dimension has stride 2."""
    buffer = x.new_full((*x.shape, 2), float("nan"))
    buffer[..., 0] = x
    return buffer[..., 0]


def packed_view(x: Tensor) -> Tensor:
    """A slice of wider rows, as q of a packed qkv: unit stride in the last dimension, gaps of NaN between rows."""
    buffer = x.new_full((*x.shape[:-1], 2 * x.shape[-1] + 1), float("nan"))
    buffer[..., : x.shape[-1]] = x
    return buffer[..., : x.shape[-1]]


def common_offset(x: Tensor) -> Tensor:
    """Add 1,000 to the first row, take 1,000 from the second, and so on: only the differences in a row matter."""
    return (x.double() + _offsets(x)).to(x.dtype)


def without_offset(x: Tensor) -> Tensor:
    """Undo `common_offset` exactly, so that a function of differences alone has the same truth for both."""
    return (x.double() - _offsets(x)).to(x.dtype)


def _offsets(x: Tensor) -> Tensor:
    rows = torch.arange(x.shape[:-1].numel(), device=x.device).view(*x.shape[:-1], 1)
    return OFFSET * (1 - 2 * (rows % 2)).double()


def not_a_number(x: Tensor) -> Tensor:
    """One NaN in every third row: the maximum of most instructions drops it."""
    return _plant(x, {1: float("nan")}, 3)


def infinities(x: Tensor) -> Tensor:
    """Infinity in every fourth row, minus infinity in every fourth: differences of them are NaN."""
    return _plant(x, {1: float("inf"), 2: float("-inf")}, 4)


def _plant(x: Tensor, values: dict[int, float], period: int) -> Tensor:
    """Write values into rows by their number modulo the period, each row at another column."""
    x = x.clone()
    rows = x.view(-1, x.shape[-1])
    for first, value in values.items():
        row = torch.arange(rows.shape[0], device=x.device)[first::period]
        rows[row, 5 * row % rows.shape[1]] = value
    return x


ADVERSARIES: dict[str, Callable[[Tensor], Tensor]] = {
    "outlier channels": outlier_channels,
    "large mean": large_mean,
    "zero rows": zero_rows,
    "denormals": denormals,
    "magnitude 1e-6": tiny,
    COMMON_OFFSET: common_offset,
    "NaN": not_a_number,
    "infinities": infinities,
    "strided view": strided_view,
    "packed view": packed_view,
}
LAYOUTS = ("strided view", "packed view")
NOT_FINITE = ("NaN", "infinities")


def imitated_activations(seed: int = 0, *, tokens: int = TOKENS) -> torch.Tensor:
    """Random hidden states with the outlying channels of a trained network.

    In a sentence encoder (all-MiniLM-L6-v2) most channels have a standard deviation near 0.4 and a mean of a third of
    that; a few percent deviate several times as far, and one has a mean and a deviation of 20 times as much. Here
    twelve do: the error of the reference in a single channel is noise.

    Args:
        seed: of the random numbers.
        tokens: how many rows.

    Returns:
        `(tokens, 384)`, float32, on the CPU.
    """
    generator = torch.Generator().manual_seed(seed)
    draw = functools.partial(torch.randn, generator=generator)
    means, deviations = 0.14 * draw(384), 0.4 + 0.05 * draw(384)
    means[3::32], deviations[3::32] = 1.5, 2.5
    means[17::32], deviations[17::32] = -8.0, 11.0
    # Cubes have the long tails of activations.
    return means + deviations * (0.8 * draw(tokens, 384) + 0.1 * draw(tokens, 384) ** 3)
