"""Cases, grids of cases, directions, and the least cost of a case."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


class Direction(enum.Enum):
    """Which pass is run: the forward, the backward on an existing graph, or both."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BOTH = "both"

    def cost(self, forward: Cost, backward: Cost) -> Cost:
        """Cost of this pass; of both it is the sum, with launches only if both are known."""
        if self is not Direction.BOTH:
            return forward if self is Direction.FORWARD else backward
        known = forward.launches is not None and backward.launches is not None
        launches = forward.launches + backward.launches if known else None  # type: ignore[operator]
        flops, products = forward.flops + backward.flops, forward.products + backward.products
        return Cost(forward.bytes + backward.bytes, flops, launches, products)


@dataclass(frozen=True)
class Case:
    """One point of a grid: a dtype and named sizes, read as attributes (`case.rows`).

    Attributes:
        name: for people ("Llama 3.1 8B, prefill", "one column").
        dtype: dtype of the principal input.
        sizes: everything else that the operation's `inputs` needs.
        reason: why this shape is awkward, for the test grid.
        core: whether implementations that compile for every shape run it in an ordinary verification.
    """

    name: str
    dtype: torch.dtype
    sizes: Mapping[str, Any]
    reason: str = ""
    core: bool = False

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self.sizes[name]
        except KeyError:
            raise AttributeError(f"case {self.name!r} has no size {name!r}; it has {', '.join(self.sizes)}") from None

    @property
    def dtype_name(self) -> str:
        """The dtype without the `torch.` prefix."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def label(self) -> str:
        """Name, sizes and dtype in one line, unique within a grid."""
        sizes = " ".join(f"{key}={short(value)}" for key, value in self.sizes.items())
        return f"{self.name} [{sizes}] {self.dtype_name}"

    def __hash__(self) -> int:
        return hash(self.label)


def short(value: object) -> str:
    """Format a value for tables: a dtype without `torch.`."""
    return str(value).removeprefix("torch.")


@dataclass(frozen=True)
class Point:
    """A `Case` before its dtype is chosen; `grid` multiplies points by dtypes."""

    name: str
    sizes: Mapping[str, Any]
    reason: str = ""
    core: bool = False
    dtypes: tuple[torch.dtype, ...] | None = None
    devices: tuple[str, ...] = ("cpu", "cuda")


def point(
    name: str,
    *,
    reason: str = "",
    core: bool = False,
    dtypes: Sequence[torch.dtype] | None = None,
    devices: Sequence[str] = ("cpu", "cuda"),
    **sizes: Any,
) -> Point:
    """Describe one shape of a grid.

    Args:
        name: for people, such as the model that has the shape.
        reason: why it is awkward (test grids).
        core: run it also at levels that compile for every shape.
        dtypes: replaces the grid's own dtypes for this point.
        devices: device types on which the case finishes in reasonable time.
        **sizes: the numbers that `inputs` and `cost` read.
    """
    return Point(name, sizes, reason, core, None if dtypes is None else tuple(dtypes), tuple(devices))


@dataclass(frozen=True)
class Grid:
    """An ordered set of cases, one per point and dtype."""

    points: tuple[Point, ...]
    dtypes: tuple[torch.dtype, ...]

    def cases(self, device_type: str = "cpu") -> list[Case]:
        """Return every case that runs on this device type."""
        return [
            Case(p.name, dtype, p.sizes, p.reason, p.core)
            for p in self.points
            if device_type in p.devices
            for dtype in (p.dtypes or self.dtypes)
        ]

    def __iter__(self) -> Iterator[Case]:
        return iter(self.cases())


def grid(*points: Point, dtypes: Sequence[torch.dtype]) -> Grid:
    """Combine `points` with `dtypes`; the dtypes of a point replace them."""
    if not points:
        raise ValueError("grid: points is empty; give at least one point(...)")
    return Grid(tuple(points), tuple(dtypes))


@dataclass(frozen=True)
class Cost:
    """The least work of an operation.

    Attributes:
        bytes: compulsory traffic: each input read once, each output written once.
        flops: floating-point operations of the definition; 0 if they are not counted (memory-bound operations).
        launches: kernels that the best level may launch; None for any number.
        products: `(m, n, k)` of the matrix products that most of its FLOPs belong to; PyTorch's own products are timed
            in the same rounds.
    """

    bytes: int
    flops: int = 0
    launches: int | None = None
    products: tuple[tuple[int, int, int], ...] = ()
