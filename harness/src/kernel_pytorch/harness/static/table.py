"""What was found out about kernels as people read it: a row per kernel and architecture, with the worst of each."""

from __future__ import annotations

import importlib.metadata
from collections import defaultdict
from collections.abc import Iterable, Sequence

from rich.table import Table

from kernel_pytorch.harness.static.compiled import Compiled, Traffic
from kernel_pytorch.harness.static.inspection import Inspection
from kernel_pytorch.harness.static.kernel_sources import kernel_digest, triton_level
from kernel_pytorch.harness.static.limits import KIB
from kernel_pytorch.harness.technique import Technique

COLUMNS = ("registers", "spilled", "shared", "loads", "stores", "tf32", "f64", "matrix", "copies", "occupancy")

OF_TRITON = "Compiled by Triton {} for a covering set of the launches that the test and bench cases lead to."
OF_CUDA = (
    "Compiled by nvcc {}: every instantiation of each CUDA kernel, in the largest block that its launch bounds allow; "
    'shared memory is without what a launch adds ("dynamic").'
)
LEGEND = (
    "Each row is the worst of its configurations: registers and spilled bytes a thread, shared memory a block, the "
    "narrowest of the widest loads and stores at the bench cases in bits (and which part of the bytes they carry), "
    "instructions that round to tf32 or compute in float64, matrix and bulk-copy instructions, and predicted occupancy."
)


def rows(inspections: Iterable[Inspection], details: bool = False) -> dict[str, dict[tuple[str, ...], list[Compiled]]]:
    """By technique and then by kernel and architecture (and configuration, for details), what was compiled."""
    found: dict[str, dict[tuple[str, ...], list[Compiled]]] = defaultdict(lambda: defaultdict(list))
    for inspection in inspections:
        for c in inspection.findings.compiled:
            if not c.error and not c.float64_scalars:
                about = (c.kernel, c.arch, *([c.configuration] if details else []))
                found[inspection.technique.name][about].append(c)
    return {name: dict(sorted(of_one.items(), key=lambda row: row[0][0])) for name, of_one in found.items()}


def terminal_tables(inspections: Iterable[Inspection], details: bool) -> list[Table]:
    """One table per technique: a row for every kernel and architecture, or for every configuration."""
    drawn = []
    for technique, of_technique in rows(inspections, details).items():
        table = Table(title=f"{technique}: the worst of all configurations of a kernel", title_justify="left")
        table.add_column("kernel", no_wrap=True)
        table.add_column("arch", no_wrap=True)
        table.add_column("configuration" if details else "of")
        for column in COLUMNS:
            table.add_column(column)
        previous = None
        for about, compiled in of_technique.items():
            if previous not in (None, about[0]):
                table.add_section()
            previous = about[0]
            table.add_row(*about, *([] if details else [str(len(compiled))]), *cells(compiled))
        drawn.append(table)
    return drawn


def markdown(technique: Technique, inspections: Sequence[Inspection]) -> str:
    """The table of one technique for its README, with the digest of the sources that it speaks of.

    Args:
        technique: whose kernels these are.
        inspections: of it, one for every architecture.
    """
    header = ["kernel", "arch", "of", *COLUMNS]
    legend = [OF_TRITON.format(importlib.metadata.version("triton"))] if triton_level(technique) else []
    legend += [OF_CUDA.format(version) for version in sorted({i.findings.nvcc for i in inspections} - {""})]
    lines = [f"<!-- sources: {kernel_digest(technique)} -->", " ".join([*legend, LEGEND]), ""]
    lines += ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    for about, compiled in rows(inspections).get(technique.name, {}).items():
        kernel, arch = about
        lines.append("| " + " | ".join([f"`{kernel}`", arch, str(len(compiled)), *cells(compiled)]) + " |")
    return "\n".join(lines) + "\n"


def cells(compiled: Sequence[Compiled]) -> list[str]:
    """The worst value of each column; widths are those of the bench cases, where there are any."""
    bench = [c for c in compiled if c.bench] or compiled
    matrix = dict.fromkeys(kind for c in compiled for kind in c.matrix)
    dynamic = any(c.dynamic_shared for c in compiled)
    occupancy = [known for c in compiled if (known := c.occupancy) is not None]
    copies = {"bulk": any(c.bulk_copies for c in compiled), "async": any(c.async_copies for c in compiled)}
    return [
        str(max(c.registers for c in compiled)),
        str(max(c.spill_bytes for c in compiled)),
        f"{max(c.shared_bytes for c in compiled) / KIB:.4g} KiB" + (" + dynamic" if dynamic else ""),
        _width([c.loads for c in bench]),
        _width([c.stores for c in bench]),
        str(max(c.tf32 for c in compiled)),
        str(max(c.f64 for c in compiled)),
        " ".join(matrix) or "-",
        " ".join(kind for kind, there in copies.items() if there) or "-",
        ("up to " if dynamic else "") + f"{min(occupancy):.0%}" if len(occupancy) == len(compiled) else "unknown",
    ]


def _width(traffic: Sequence[Traffic]) -> str:
    """The narrowest of the widest accesses, and which part of the bytes it carries."""
    worst = min(traffic, key=lambda t: (t.widest, t.share(t.widest)))
    return "bulk" if worst.bulk else f"{worst.widest} ({worst.share(worst.widest):.0%})"
