"""One launch of a matrix kernel of `x @ weight.T`: its configuration, and what it says to the kernel."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from kernel_pytorch.fused_ln_act._core.launch import Tiles, tiles
from kernel_pytorch.fused_ln_act._core.sizes import cdiv
from kernel_pytorch.fused_ln_act._core.triton_matmul import (
    architecture,
    copy_engine,
    is_describable,
    most_registers,
    multiprocessors_of,
    precision_of,
    program_limit,
)

from .configurations import Configuration, Table, configuration


class Shape:
    """One launch of a matrix kernel: its configuration, and what it says to the kernel.

    Attributes:
        chosen: the configuration.
        constants: keyword arguments of the kernel that all matrix kernels have.
        programs: size of the grid.
    """

    def __init__(self, table: Table, rows: int, columns: int, x: Tensor, tensors: list[Tensor], long: bool) -> None:
        precision, exact = precision_of(x.dtype)
        aligned = all(is_describable(t) for t in tensors)
        self.descriptors = copy_engine(x.device) and not exact and aligned
        long = long and not self.descriptors
        self.chosen = chosen = choose(table, x, (rows, columns, x.shape[-1]), exact, aligned and not long)
        tiles = cdiv(rows, chosen.rows) * cdiv(columns, chosen.columns)
        self.programs = min(tiles, program_limit(x.device, chosen.programs))
        self.constants: dict[str, Any] = {
            "PRECISION": precision, "WIDE": tl.float64 if x.dtype == torch.float64 else tl.float32,
            "HALF": x.dtype.itemsize == 2, "ROWS": chosen.rows, "COLUMNS": chosen.columns, "DEPTH": chosen.depth,
            "GROUP": chosen.group, "PARTS": chosen.parts, "FLATTEN": chosen.flatten,
            "DESCRIPTORS": self.descriptors, "LONG_OFFSETS": long,
            "num_stages": chosen.stages, "num_warps": chosen.warps,
            **most_registers(chosen.programs, chosen.warps),
        }  # fmt: skip

    def operands(self, x: Tensor, *weights: Tensor) -> list[Tiles | None]:
        """How the kernel reads tiles of x and of the weights."""
        if not self.descriptors:
            return [None] * (1 + len(weights))
        chosen = self.chosen
        return [tiles(x, chosen.rows, chosen.depth), *(tiles(w, chosen.columns, chosen.depth) for w in weights)]

    def result(self, matrix: Tensor | None) -> Tiles | None:
        """How the kernel reads or writes tiles of the shape of the result, a part at a time."""
        if matrix is None or not self.descriptors:
            return None
        return tiles(matrix, self.chosen.rows, self.chosen.columns // self.chosen.parts)


def choose(table: Table, x: Tensor, shape: tuple[int, int, int], exact: bool, regular: bool) -> Configuration:
    """The configuration for a product of this shape on the device of x, which is the current one."""
    place = architecture(x.device), multiprocessors_of(x.device)
    return configuration(table, *place, *shape, x.element_size(), exact, regular)
