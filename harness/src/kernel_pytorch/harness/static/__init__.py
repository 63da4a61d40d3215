"""The performance contract that needs no GPU: what the compiled code of every kernel looks like.

`kernel-pytorch static` compiles the kernels in Triton for every architecture of `limits.ARCHITECTURES`, reads what the
build of a library said about those in CUDA C++, and holds each to its `KernelContract`. From a launch to a verdict:

    launches.py      which Triton kernels are launched, with which constants: recorded from the launchers themselves
    triton_code.py   what they compile to: the program of a separate process, for one technique and architecture
    cuda_code.py     the kernels in CUDA C++ that a library was compiled from
    instructions.py  what the PTX says: widths, tf32, float64, tensor cores, copies
    limits.py        what an architecture has, and how many blocks fit on a multiprocessor
    compiled.py      the facts about one compiled kernel, whatever compiler made it
    gate.py          the facts compared with the contract
    inspection.py    the processes, and what they found before
    record.py        all of it as `results/static/<technique>.kernels.json`
    table.py         and as tables

Only `launches.py`, `triton_code.py` and `instructions.py` are about Triton, and only the first two import it.
"""

from kernel_pytorch.harness.static.compiled import Compiled
from kernel_pytorch.harness.static.gate import Violation, violations
from kernel_pytorch.harness.static.inspection import Inspection, inspect
from kernel_pytorch.harness.static.limits import ARCHITECTURES, Limits
from kernel_pytorch.harness.static.record import StaticRecord, summarize

__all__ = [
    "ARCHITECTURES",
    "Compiled",
    "Inspection",
    "Limits",
    "StaticRecord",
    "Violation",
    "inspect",
    "summarize",
    "violations",
]
