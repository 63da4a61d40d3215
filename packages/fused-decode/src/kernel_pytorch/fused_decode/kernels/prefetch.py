# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
"""Ask for memory ahead of its use: into the L2 cache, by the copy engine, from compute capability 9.0 on.

Between two kernels, and while attention waits for its own loads, the memory would be idle. A kernel that asks then for
the next weights finds nothing to compute in it: one instruction of one thread asks for `CHUNK` bytes.
"""

from __future__ import annotations

import triton
import triton.language as tl

CHUNK = tl.constexpr(2048)
ASK = tl.constexpr("""{
    .reg .pred wanted;
    setp.ne.u64 wanted, $1, 0;
    @wanted cp.async.bulk.prefetch.L2.global [$1], 2048;
    mov.u32 $0, 0;
}""")


@triton.jit
def prefetch(ptr, chunks, program, programs, THREADS: tl.constexpr):
    """This program's share of the first `chunks` chunks at `ptr`, which 16 divides; a thread asks for one at a time."""
    if ptr is not None:
        for first in range(program * THREADS, chunks, programs * THREADS):
            chunk = first + tl.arange(0, THREADS)
            address = ptr.to(tl.int64) + chunk.to(tl.int64) * CHUNK
            address = tl.where(chunk < chunks, address, 0)
            tl.inline_asm_elementwise(ASK, "=r,l", [address], dtype=tl.int32, is_pure=False, pack=1)
