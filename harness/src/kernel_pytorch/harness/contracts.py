"""Contracts of compiled kernels, and the CUDA sources, as `kernel-pytorch static` checks them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class KernelContract:
    """Limits of the compiled code of a kernel on every architecture; `kernel-pytorch static` checks them.

    Every kernel must compile, and its shared memory must fit on the card.

    Attributes:
        max_spill_bytes: registers spilled to memory, in bytes per thread.
        max_registers: registers per thread, or None for no bound.
        max_f64: float64 instructions where no argument is float64.
        allow_tf32: whether products of float32 may be rounded to tf32.
        min_load_bits: at the bench cases, at least four fifths of the bytes that the code reads from global memory are
            read by instructions of this width. The rest is for values that a row has one of: a statistic, an offset.
        min_store_bits: the same for the bytes that it writes.
        matrix_instructions: architecture -> "mma", "wgmma" or "tcgen05": at the bench cases with a 16-bit argument the
            products are made by that instruction. Other architectures are not checked.
    """

    max_spill_bytes: int = 0
    max_registers: int | None = None
    max_f64: int = 0
    allow_tf32: bool = False
    min_load_bits: int = 0
    min_store_bits: int = 0
    matrix_instructions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CudaUnit:
    """One CUDA C++ source file, as `kernel-pytorch static` compiles it for every architecture.

    Attributes:
        source: the .cu file.
        include: folders of the project's own headers (`-I`). Every header below them or the folder of the source counts
            as a source of the unit.
        options: other options of nvcc: `-std=c++17`, `--use_fast_math`, `-isystem` and the headers of others. No
            architecture, no output.
    """

    source: Path
    include: tuple[Path, ...] = ()
    options: tuple[str, ...] = ()
