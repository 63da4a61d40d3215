"""Tables of compiled kernels: one row per kernel and architecture, with the worst of its configurations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import groupby

from rich.table import Column, Table

from kernel_pytorch.harness.report import markdown_table
from kernel_pytorch.harness.static.compiled import Compiled, Traffic
from kernel_pytorch.harness.static.limits import KIB
from kernel_pytorch.harness.static.record import StaticRecord

COLUMNS = ("registers", "spilled", "shared", "loads", "stores", "tf32", "f64", "matrix", "copies", "occupancy")

OF_TRITON = "Compiled by Triton {} for a covering set of the launches that the test and bench cases lead to."
OF_CUDA = (
    "Compiled by {} for the library: registers, spilled bytes, and shared memory without what a launch adds, as ptxas "
    "printed them for every instantiation of each CUDA kernel."
)
UNKNOWN = "-"
LEGEND = (
    "Each row is the worst of its configurations: registers and spilled bytes a thread, shared memory a block, the "
    "narrowest of the widest loads and stores at the bench cases in bits (and which part of the bytes they carry), "
    "instructions that round to tf32 or compute in float64, matrix and bulk-copy instructions, and predicted occupancy."
)


def rows(compiled: Iterable[Compiled], details: bool = False) -> dict[tuple[str, ...], list[Compiled]]:
    """What was compiled, by kernel and architecture (and configuration, for details)."""
    found: dict[tuple[str, ...], list[Compiled]] = defaultdict(list)
    for c in compiled:
        if not c.error and not c.float64_scalars:
            about = (c.kernel, c.arch, *([c.configuration] if details else []))
            found[about].append(c)
    return dict(sorted(found.items(), key=lambda row: row[0][0]))


def terminal_table(record: StaticRecord, details: bool) -> Table:
    """A row for every kernel and architecture of a technique, or for every configuration."""
    names = [Column(name, no_wrap=True) for name in ("kernel", "arch")]
    title = f"{record.technique}: the worst of all configurations of a kernel"
    table = Table(*names, "configuration" if details else "of", *COLUMNS, title=title, title_justify="left")
    for _, of_kernel in groupby(rows(record.compiled, details).items(), key=lambda row: row[0][0]):
        table.add_section()
        for about, compiled in of_kernel:
            table.add_row(*about, *([] if details else [str(len(compiled))]), *cells(compiled))
    return table


def markdown(record: StaticRecord) -> str:
    """The table of one technique for its page."""
    header = ["kernel", "arch", "of", *COLUMNS]
    legend = [OF_TRITON.format(record.triton)] if record.triton else []
    legend += [OF_CUDA.format(record.nvcc)] if record.nvcc else []
    lines = [" ".join([*legend, LEGEND]), ""]
    cases = [[f"`{kernel}`", arch, str(len(c)), *cells(c)] for (kernel, arch), c in rows(record.compiled).items()]
    return "\n".join([*lines, *markdown_table(header, cases)]) + "\n"


def cells(compiled: Sequence[Compiled]) -> list[str]:
    """The worst value of each column; widths are those of the bench cases, where there are any."""
    bench = [c for c in compiled if c.bench] or compiled
    matrix = dict.fromkeys(kind for c in compiled for kind in c.matrix)
    occupancy = [known for c in compiled if (known := c.occupancy) is not None]
    copies = {"bulk": any(c.bulk_copies for c in compiled), "async": any(c.async_copies for c in compiled)}
    instructions = [
        _width([c.loads for c in bench]),
        _width([c.stores for c in bench]),
        str(max(c.tf32 for c in compiled)),
        str(max(c.f64 for c in compiled)),
        " ".join(matrix) or "-",
        " ".join(kind for kind, there in copies.items() if there) or "-",
    ]
    return [
        str(max(c.registers for c in compiled)),
        str(max(c.spill_bytes for c in compiled)),
        f"{max(c.shared_bytes for c in compiled) / KIB:.4g} KiB",
        *([UNKNOWN] * 6 if compiled[0].language == "CUDA" else instructions),
        f"{min(occupancy):.0%}" if len(occupancy) == len(compiled) else UNKNOWN,
    ]


def _width(traffic: Sequence[Traffic]) -> str:
    """The narrowest of the widest accesses, and which part of the bytes it carries."""
    worst = min(traffic, key=lambda t: (t.widest, t.share(t.widest)))
    return "bulk" if worst.bulk else f"{worst.widest} ({worst.share(worst.widest):.0%})"
