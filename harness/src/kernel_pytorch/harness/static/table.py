"""Tables of compiled kernels: one row per kernel and architecture, with the worst of its configurations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
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


def terminal_table(record: StaticRecord, details: bool) -> Table:
    """A row for every kernel and architecture of a technique, or for every configuration."""
    names = [Column(name, no_wrap=True) for name in ("kernel", "arch")]
    title = f"{record.technique}: the worst of all configurations of a kernel"
    table = Table(*names, "configuration" if details else "of", *COLUMNS, title=title, title_justify="left")
    for _, rows in groupby(_rows(record, details), key=lambda row: row[0]):
        table.add_section()
        for row in rows:
            table.add_row(*row)
    return table


def markdown(record: StaticRecord) -> str:
    """The table of one technique for its page."""
    legend = [OF_TRITON.format(record.triton)] if record.triton else []
    legend += [OF_CUDA.format(record.nvcc)] if record.nvcc else []
    rows = ([f"`{kernel}`", *cells] for kernel, *cells in _rows(record))
    table = markdown_table(["kernel", "arch", "of", *COLUMNS], rows)
    return "\n".join([" ".join([*legend, LEGEND]), "", *table]) + "\n"


def _rows(record: StaticRecord, details: bool = False) -> list[list[str]]:
    """Kernel, architecture, number of configurations or one of them, and the worst of each column."""
    found: dict[tuple[str, str, str], list[Compiled]] = defaultdict(list)
    for c in record.compiled:
        if not c.error and not c.float64_scalars:
            found[c.kernel, c.arch, c.configuration if details else ""].append(c)
    rows = sorted(found.items(), key=lambda row: row[0][0])
    return [[*about[:2], about[2] or str(len(each)), *_worst(each)] for about, each in rows]


def _worst(compiled: Sequence[Compiled]) -> list[str]:
    """The worst value of each column; widths are those of the bench cases, where there are any."""
    bench = [c for c in compiled if c.bench] or compiled
    occupancy = [known for c in compiled if (known := c.occupancy) is not None]
    copies = ["bulk"] * any(c.loads.bulk or c.stores.bulk for c in compiled)
    copies += ["async"] * any(c.async_copies for c in compiled)
    instructions = [
        _width([c.loads for c in bench]),
        _width([c.stores for c in bench]),
        str(max(c.tf32 for c in compiled)),
        str(max(c.f64 for c in compiled)),
        " ".join(dict.fromkeys(kind for c in compiled for kind in c.matrix)) or "-",
        " ".join(copies) or "-",
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
