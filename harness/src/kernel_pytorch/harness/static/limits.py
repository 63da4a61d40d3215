"""What each architecture has, and how many blocks of a kernel fit on one multiprocessor.

Figures: `cuda_occupancy.h` of the CUDA toolkit 13, and "Technical Specifications per Compute Capability" in NVIDIA's
CUDA C++ Programming Guide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

KIB = 1024
WARP = 32

REGISTERS = 65536  # 32-bit registers of a multiprocessor
PARTITIONS = 4  # of a multiprocessor; a warp and its registers live in one
REGISTER_UNIT = 256  # registers are handed to a warp in units of so many
SHARED_UNIT = 128  # and shared memory to a block, in bytes
SHARED_RESERVED = 1 * KIB  # of every block, by CUDA itself
SHARED_DECLARED = 48 * KIB  # that the code of a kernel may declare; what is above must be asked for by the launch


@dataclass(frozen=True)
class Limits:
    """One architecture.

    Attributes:
        capability: compute capability as Triton writes it: 90 is 9.0.
        warps: that a multiprocessor can hold.
        blocks: that a multiprocessor can hold.
        shared_bytes: shared memory of a multiprocessor.
        shared_bytes_per_block: the most that one block can have, when it opts in.
        target: what nvcc and ptxas compile for. "sm_90a" has the instructions that only 9.0 has (wgmma); the others are
            plain, so that what is compiled here also runs on the later cards of their kind (10.3, 12.1).
    """

    capability: int
    warps: int
    blocks: int
    shared_bytes: int
    shared_bytes_per_block: int
    target: str


# name: capability, warps, blocks, KiB of a multiprocessor, target; CUDA keeps 1 KiB of each block for itself
ARCHITECTURES = {
    name: Limits(capability, warps, blocks, shared * KIB, shared * KIB - SHARED_RESERVED, target)
    for name, capability, warps, blocks, shared, target in (
        ("sm_80", 80, 64, 32, 164, "sm_80"),
        ("sm_90", 90, 64, 32, 228, "sm_90a"),
        ("sm_100", 100, 64, 32, 228, "sm_100"),
        ("sm_120", 120, 48, 24, 100, "sm_120"),
    )
}


def resident_blocks(limits: Limits, *, warps: int, registers: int, shared_bytes: int) -> int:
    """How many blocks one multiprocessor holds at a time; 0 if not even one fits.

    Args:
        limits: of the architecture.
        warps: per block.
        registers: per thread.
        shared_bytes: per block.
    """
    registers_of_warp = REGISTER_UNIT * math.ceil(max(registers, 1) * WARP / REGISTER_UNIT)
    warps_by_registers = REGISTERS // PARTITIONS // registers_of_warp * PARTITIONS
    shared = SHARED_UNIT * math.ceil(shared_bytes / SHARED_UNIT) + SHARED_RESERVED
    return min(limits.blocks, limits.warps // warps, warps_by_registers // warps, limits.shared_bytes // shared)
