"""What levels are set beside, in the same rounds: a copy of as many bytes, and the same matrix products by PyTorch.

A share of the fastest copy or product of the machine says how far there is to go; small sizes and odd shapes reach
neither, whoever computes them. Of the same size and shape it says what the kernel leaves on the table.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernel_pytorch.harness.cases import Case, Cost
from kernel_pytorch.harness.clock import Interval, Subject, Timing, median_interval

COPY, PRODUCTS = "a copy of the same size", "the same products"


def yardsticks(cost: Cost, case: Case, sets: int, bytes_per_set: int, device: torch.device) -> list[Subject]:
    """The subjects that take turns with the levels.

    Args:
        cost: of the call; the copy reads half of its bytes and writes the other half, by an elementwise kernel.
        case: its dtype is that of the products.
        sets: how many there are of each subject, as of the levels: the copy finds its bytes as cold as they do.
        bytes_per_set: as of the levels.
        device: where.
    """
    found = {COPY: _copies(cost.bytes, sets, device)}
    if cost.products:
        found[PRODUCTS] = _products(cost.products, case.dtype, sets, device)
    return [Subject(name, run, sets, bytes_per_set) for name, run in found.items()]


def _copies(size: int, sets: int, device: torch.device) -> Callable[[int], object]:
    """Calls that read `size / 2` bytes and write as many, in float32 and thus up to 7 bytes less.

    They negate. `clone` and `copy_` of contiguous tensors are a `cudaMemcpyAsync`, whose speed jumps by half between
    sizes that are almost the same. An elementwise kernel moves the same bytes and has no such jumps. The result is
    allocated in each call, as that of a level is: on a CPU new pages cost time that no level avoids.
    """
    generator = torch.Generator(device).manual_seed(0)
    halves = [torch.rand(max(1, size // 8), generator=generator, device=device) for _ in range(sets)]
    return lambda index: torch.neg(halves[index])


def _products(
    shapes: tuple[tuple[int, int, int], ...], dtype: torch.dtype, sets: int, device: torch.device
) -> Callable[[int], object]:
    """Products as linear layers make them: the second matrix is transposed."""
    generator = torch.Generator(device).manual_seed(0)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator, device=device).to(dtype)

    pairs = [[(matrix(m, k), matrix(n, k)) for m, n, k in shapes] for _ in range(sets)]

    def run(index: int) -> list[Tensor]:
        with torch.no_grad():
            return [left @ right.t() for left, right in pairs[index]]

    return run


def share(yardstick: Timing | None, timing: Timing) -> Interval | None:
    """The speed of a level over that of a yardstick, of the same rounds; None where there is none of the same kind."""
    if yardstick is None or yardstick.method != timing.method:
        return None
    return median_interval([a / b for a, b in zip(yardstick.samples, timing.samples, strict=True)])
