"""The facts about one compiled kernel. Whichever compiler made it, this is all that the gate and the report see."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from kernel_pytorch.harness.records import Part
from kernel_pytorch.harness.static.limits import ARCHITECTURES, resident_blocks

MOST = 0.8  # the share of the bytes that a width must carry to be called the width of the accesses


class Traffic(Part):
    """Accesses to global memory as they stand in the code, each instruction counted once, loops or not.

    Attributes:
        accesses: number of instructions by width in bits.
        bulk: copies by the copy engine (TMA), which have no width.
    """

    accesses: dict[int, int] = Field(default_factory=dict)
    bulk: int = 0

    @property
    def widest(self) -> int:
        """Width of the widest access in bits; 0 if there is none."""
        return max(self.accesses, default=0)

    def share(self, bits: int) -> float:
        """Which part of the bytes is moved by accesses at least so wide; 1 where the copy engine moves the data."""
        total = sum(width * count for width, count in self.accesses.items())
        if self.bulk or not total:
            return 1.0
        return sum(width * count for width, count in self.accesses.items() if width >= bits) / total


class Compiled(Part):
    """One kernel, compiled for one architecture with one set of constants.

    Attributes:
        kernel: name of its function.
        language: what it is written in.
        arch: a key of `ARCHITECTURES`.
        constants: compile-time constants by name; of a CUDA kernel its template arguments, as "template".
        arguments: type of every other argument that is no integer, as Triton writes it ("*bf16", "fp32"); none of a
            CUDA kernel.
        warps: per block; None of a CUDA kernel, whose launches are not known.
        case: who launches it: operation and case; of a CUDA kernel the operator that it is of.
        bench: whether it is launched by a bench case; true of every CUDA kernel.
        float64_scalars: arguments whose type was changed from float32 to float64 in this compilation.
        registers: per thread.
        stack_bytes: per thread.
        spill_bytes: per thread.
        shared_bytes: per block; of a CUDA kernel what its code declares.
        loads: from global memory.
        stores: to global memory.
        tf32: instructions that round to tf32 or multiply in it.
        f64: instructions that touch a float64, other than reading it from the parameters.
        matrix: number of tensor-core instructions by kind: "mma", "wgmma", "tcgen05".
        async_copies: copies to shared memory that pass by the registers (`cp.async`), a part of `loads`.
        code: digest of its PTX, without its name and what only debuggers read; empty of a CUDA kernel.
        error: what the compiler said instead of compiling it.
    """

    kernel: str
    language: Literal["Triton", "CUDA"] = "Triton"
    arch: str
    constants: dict[str, Any]
    arguments: dict[str, str]
    warps: int | None
    case: str
    bench: bool
    float64_scalars: tuple[str, ...] = ()
    registers: int = 0
    stack_bytes: int = 0
    spill_bytes: int = 0
    shared_bytes: int = 0
    loads: Traffic = Traffic()
    stores: Traffic = Traffic()
    tf32: int = 0
    f64: int = 0
    matrix: dict[str, int] = Field(default_factory=dict)
    async_copies: int = 0
    code: str = ""
    error: str = ""

    @property
    def configuration(self) -> str:
        """Types, warps and constants in one line."""
        types = "/".join(dict.fromkeys(kind.lstrip("*") for kind in self.arguments.values()))
        typed = f" with float64 {', '.join(self.float64_scalars)}" if self.float64_scalars else ""
        constants = " ".join(f"{name}={value}" for name, value in self.constants.items())
        warps = "unknown" if self.warps is None else self.warps
        return ", ".join(part for part in (f"{types}{typed}", f"{warps} warps", constants) if part)

    @property
    def occupancy(self) -> float | None:
        """Warps that one multiprocessor holds, of those that it could: registers, shared memory and blocks decide.

        None where the size of a block is not known.
        """
        if self.warps is None:
            return None
        limits, needs = ARCHITECTURES[self.arch], {"registers": self.registers, "shared_bytes": self.shared_bytes}
        return resident_blocks(limits, warps=self.warps, **needs) * self.warps / limits.warps
