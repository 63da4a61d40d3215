"""Contracts of compiled kernels, as `kernel-pytorch static` checks them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class KernelContract:
    """Limits of the compiled code of a kernel on every architecture; `kernel-pytorch static` checks them.

    Every kernel must compile, and its shared memory must fit on the card. For kernels in CUDA C++ only registers,
    spills and shared memory are known.

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
