"""Results as people read them: tables for the terminal and for pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text

from kernel_pytorch.harness.clock import Comparison
from kernel_pytorch.harness.results import Measurement, Results

NOT_MEASURED = "not measured here"
NOT_INSTALLED = "not installed"
NO_FIGURE = "-"
PEER = "vs best peer"
WIDTHS = {"level": 11, "median": 7, "±": 4, "GB/s": 5, "of copy": 4, "vs reference": 9, "vs native": 7,
          "vs best PyTorch": 7, PEER: 7, "error": 9}  # fmt: skip
"""Columns of the terminal's tables: together they fit 80 characters, and tables below each other line up."""
COLUMNS = tuple(name for name in WIDTHS if name != PEER)
PYTORCH_LEVELS = ("reference", "native", "torchscript", "compile")
PYTORCH_PEERS = ("peer:flex",)
"""Peers that are part of PyTorch itself: FlexAttention."""


def seconds(value: float) -> str:
    """A duration with three significant digits and a unit."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if value * factor >= 1.0 or unit == "µs":
            return f"{value * factor:.3g} {unit}"
    raise AssertionError


def size(count: int) -> str:
    """Bytes with three significant digits and a unit."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count} B"


def speedup(comparison: Comparison | None) -> str:
    """A ratio with its verdict; "=" where the interval lies within the band of equivalence, "?" where none can say."""
    if comparison is None:
        return ""
    mark = {"FASTER": "", "SLOWER": "", "SAME": " =", "UNSURE": " ?"}[comparison.verdict.name]
    ratio = comparison.speedup.median
    return f"{ratio:.2f}x{mark}" if ratio < 10 else f"{ratio:.1f}x{mark}" if ratio < 100 else f"{ratio:,.0f}x{mark}"


def best_pytorch(group: Iterable[Measurement]) -> str | None:
    """The fastest implementation by PyTorch alone in a group, the baseline of every claim."""
    return fastest(m for m in group if m.level in PYTORCH_LEVELS or m.implementation in PYTORCH_PEERS)


def best_peer(group: Iterable[Measurement]) -> str | None:
    """The fastest implementation of others in a group."""
    return fastest(m for m in group if m.level == "peer")


def fastest(group: Iterable[Measurement]) -> str | None:
    """The fastest implementation that was measured, if any was."""
    timed = [(m.time.median, place, m) for place, m in enumerate(group) if m.time]
    return min(timed)[-1].implementation if timed else None


def columns(results: Results) -> tuple[str, ...]:
    """`COLUMNS`, with one more baseline where peers were measured."""
    return tuple(WIDTHS) if best_peer(results.measurements) else COLUMNS


def rows(group: list[Measurement], header: Sequence[str]) -> list[list[str]]:
    """The rows of one case, by `columns`."""
    others = [best_pytorch(group), *([best_peer(group)] if PEER in header else [])]
    return [cells(m, *others) for m in group]


def cells(measurement: Measurement, *others: str | None) -> list[str]:
    """One row of a table, by `COLUMNS`; `others` are the best PyTorch, and the best peer where that has a column."""
    m = measurement
    if m.time is None:
        absent = NOT_INSTALLED if m.reason.startswith(NOT_INSTALLED) else NOT_MEASURED
        blank = [""] * (len(COLUMNS) - 3 + len(others))
        return [m.implementation, absent if m.status == "unavailable" else m.status, *blank]
    rate, error = m.bytes_per_second, "" if m.relative_error is None else f"{m.relative_error:.1e}"
    half = (m.time.high - m.time.low) / 2 / m.time.median  # in four characters
    return [
        m.implementation,
        seconds(m.time.median),
        f"{half:.1%}" if half < 0.0995 else f"{half:.0%}" if half < 0.995 else ">99%",
        "" if not rate else f"{rate / 1e9:.1f}" if rate < 1e11 else f"{rate / 1e9:,.0f}",
        f"{m.share_of_copy:.0%}" if m.share_of_copy is not None else "",
        *(speedup(m.comparisons.get(baseline)) for baseline in ("reference", "native")),
        *("is it" if m.implementation == o else speedup(m.comparisons.get(o or "")) for o in others),
        f"{m.error_over_budget:.1f}x of the budget" if m.over_budget else error,
    ]


def reasons(results: Results) -> list[str]:
    """Why figures are missing, each reason once: tables say that they are, these lines say why."""
    found: dict[str, None] = {}
    for m in results.measurements:
        if m.status == "unavailable":
            found[f"{m.implementation} {NOT_MEASURED}: {m.reason}"] = None
        elif m.status != "measured" or m.over_budget:
            what = m.status if m.status != "measured" else f"error {m.error_over_budget:.1f}x of the budget"
            found[f"{m.label}: {what}: {m.reason}"] = None
    return list(found)


BEFORE = "Measured before records named the code that ran"


def provenance(results: Results) -> list[str]:
    """What is not known of the code that was measured."""
    return [] if results.identities or results.quick else [f"{BEFORE}, {results.created[:10]}"]


def conditions(results: Results) -> list[str]:
    """What the machine did while it was measured, in one line, if it said so."""
    timed = [m for m in results.measurements if m.conditions is not None]
    told = [m.conditions for m in timed if m.conditions is not None]
    parts = []
    for name, unit, scale in (("clock_hz", "MHz", 1e-6), ("power_watts", "W", 1.0), ("load", "tasks a core", 1.0)):
        ranges = [r for c in told if (r := getattr(c, name)) is not None]
        if ranges:
            low, high = (f"{scale * end:,.4g}" for end in (min(r.low for r in ranges), max(r.high for r in ranges)))
            parts.append(f"{name.split('_')[0]} {low} to {high} {unit}")
    held = sorted({reason for c in told for reason in c.throttled})
    if held:
        parts.append(f"clock held down ({', '.join(held)}) in {sum(bool(c.throttled) for c in told)} of {len(told)}")
    samples = sum(len(m.samples) for m in timed)
    if samples and any("clock" in part for part in parts):
        parts.append(f"{sum(len(m.marked) for m in timed) / samples:.1%} of the samples taken while the clock moved")
    return [f"While it was measured: {'; '.join(parts)}"] if parts else []


def notes(results: Results) -> list[str]:
    """All lines that follow the tables."""
    return [*conditions(results), *provenance(results), *missing_costs(results), *reasons(results)]


def groups(results: Results) -> dict[tuple[str, str, str], list[Measurement]]:
    """Measurements by operation, direction and case, in the order in which they were made."""
    found: dict[tuple[str, str, str], list[Measurement]] = {}
    for m in results.measurements:
        found.setdefault((m.operation, m.direction, m.case.label), []).append(m)
    return found


def terminal_tables(results: Results) -> list[Group]:
    """One table per operation and direction, cases below each other, no wider than a terminal of 80 columns."""
    header = columns(results)
    tables: dict[tuple[str, str], list[RenderableType]] = {}
    for (operation, direction, label), group in groups(results).items():
        found = tables.setdefault((operation, direction), [])
        if not found:
            found.append(Text(f"\n{operation}, {direction}: median ± half of its 99% interval", style="bold italic"))
        shown = [
            Column(name, justify="left" if name in ("level", "error") else "right", width=width, overflow="fold")
            for name, width in WIDTHS.items() if name in header
        ]  # fmt: skip
        table = Table(*shown, box=None, padding=(0, 1, 0, 0), show_header=len(found) == 1, header_style="dim")
        absent = []
        for m, row in zip(group, rows(group, header), strict=True):
            if m.time is None:
                absent.append(Text(f"{row[0]:<{WIDTHS['level']}} {row[1]}"))
            else:
                table.add_row(*map(escape, row))
        found.append(Group(Text(label, style="bold"), table, *absent))
    return [Group(*found) for found in tables.values()]


COSTS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "eager call": ("eager", seconds),
    "compiled call": ("compiled", seconds),
    "graph replay": ("graph", seconds),
    "peak, forward": ("forward_peak", size),
    "peak, training": ("training_peak", size),
    "saved for backward": ("saved_for_backward", size),
    "first call, cold": ("cold_start", seconds),
    "first call, warm": ("warm_start", seconds),
    "launches": ("launches", str),
}
"""By column the field of `WholeCost`, and how it is shown."""
COST_COLUMNS = ("operation", "level", *COSTS)


def cost_rows(results: Results) -> list[list[str]]:
    """What calls cost beside device time, by `COST_COLUMNS`; `missing_costs` says why a cell has no figure."""
    return [
        [c.operation, c.implementation]
        + [NO_FIGURE if (v := getattr(c, field)) is None else show(v) for field, show in COSTS.values()]
        for c in results.costs
    ]


def cost_table(results: Results) -> Group:
    """`cost_rows` for the terminal: times, then memory and launches."""
    cases = ", ".join(dict.fromkeys(c.case.label for c in results.costs))
    found: list[RenderableType] = [Text(f"\noverheads of a call: {cases}", style="bold italic")]
    for chosen in ((0, 1, 2, 3, 4, 8, 9), (0, 1, 5, 6, 7, 10)):
        shown = [Column(COST_COLUMNS[place], justify="left" if place < 2 else "right") for place in chosen]
        table = Table(*shown, box=None, padding=(0, 2, 0, 0))
        for row in cost_rows(results):
            table.add_row(*(escape(row[place]) for place in chosen))
        found += [table, Text()]
    return Group(*found)


def missing_costs(results: Results) -> list[str]:
    """Why cells of the cost table have no figure, each reason once."""
    found: dict[tuple[str, str], dict[str, None]] = {}
    for c in results.costs:
        for name, reason in c.missing.items():
            found.setdefault((c.implementation, reason), {})[name.replace("_", " ")] = None
    return [f"{level}: {', '.join(names)} {NOT_MEASURED}: {reason}" for (level, reason), names in found.items()]


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], rule: str = " --- ") -> list[str]:
    """The lines of a table in Markdown."""
    lines = ["| " + " | ".join(cells) + " |" for cells in (header, *rows)]
    return [lines[0], "|" + f"{rule}|" * len(header), *lines[1:]]
