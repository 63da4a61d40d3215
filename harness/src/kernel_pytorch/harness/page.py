"""Results in Markdown: every case on the page of a technique, five in the README of its package."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kernel_pytorch.harness.report import (
    COST_COLUMNS,
    NO_FIGURE,
    NOT_MEASURED,
    PYTORCH_LEVELS,
    best_peer,
    best_pytorch,
    conditions,
    cost_rows,
    fastest,
    groups,
    markdown_table,
    missing_costs,
    provenance,
    reasons,
    seconds,
    speedup,
)
from kernel_pytorch.harness.results import Measurement, Results

TIMES = "median time of a call ± half of its 99 % interval"
SAME_SIZE = (
    "the speed over that of a copy of the same size, or of the same matrix products by PyTorch, if that is higher"
)
OF_MACHINE = "the share of the copy bandwidth or of the fastest matrix product of the machine, whichever is higher"
SIGNS = "`=`: no difference beyond 2 %. `?`: the interval does not tell."

UNFOLDED = 3
"""Up to this many operations, every table is shown; with more, a click shows the tables of an operation."""

HEADLINES = 5
"""Rows of the table in a README."""


def headline(devices: Sequence[Results]) -> str:
    """The table of a package's README: the best PyTorch beside the best of ours.

    The device is a GPU if there is one: that with the most operations, the first of equals.
    """
    on_gpu = [r for r in devices if r.machine.environment.device_type == "cuda"] or devices
    results = max(on_gpu, key=lambda r: len({m.operation for m in r.measurements}))
    e = results.machine.environment
    where = f"{e.device_name}, torch {e.torch}{f', triton {e.triton}' if e.triton else ''}, {results.created[:10]}"
    rows = [_headline_row(group) for group in _headline_cases(results)]
    table = markdown_table(["operation", "case", "best PyTorch", "ours", "speedup"], rows)
    legend = f"The largest case of each operation: {TIMES}, and {_shares(results)}. {SIGNS}"
    if any(row[3].startswith("`native`") for row in rows):
        legend += " Where no kernel of ours was timed, `native` is the default."
    return "\n".join([f"{where}. {legend}", "", *table]) + "\n"


def _shares(results: Results) -> str:
    """What the percentages of a table are of."""
    return SAME_SIZE if any(m.same_size for m in results.measurements) else OF_MACHINE


def _headline_cases(results: Results) -> list[list[Measurement]]:
    """The largest case of each operation forward, then backward, then smaller ones, until there are `HEADLINES`.

    With more operations, it takes `HEADLINES` of them at equal distances in their order, so no person chooses the rows.
    """
    cases = [group for group in groups(results).values() if best_pytorch(group)]
    operations = list(dict.fromkeys(group[0].operation for group in cases))
    if len(operations) > HEADLINES:
        operations = [operations[place * len(operations) // HEADLINES] for place in range(HEADLINES)]

    def place(group: list[Measurement]) -> tuple[int, bool]:
        return operations.index(group[0].operation), group[0].direction != "forward"

    def larger(group: list[Measurement]) -> int:
        return sum(place(other) == place(group) and other[0].bytes > group[0].bytes for other in shown)

    shown = [group for group in cases if group[0].operation in operations]
    chosen = sorted(shown, key=lambda group: (larger(group), place(group)[::-1]))[:HEADLINES]
    return sorted(chosen, key=place)


def _headline_row(group: list[Measurement]) -> list[str]:
    # A kernel that is measured under a separate name is not a level that users can name. Where none of our kernels was
    # timed, `native` is what `level=None` runs.
    levels = [m for m in group if m.implementation == m.level]
    ours = fastest(filter(_is_own, levels)) or fastest(m for m in levels if m.level == "native") or ""
    best, by_name = best_pytorch(group) or "", {m.implementation: m for m in group}
    times = [f"`{name}` {time_cell(by_name[name])}" if name in by_name else NOT_MEASURED for name in (best, ours)]
    ratio = speedup(by_name[ours].comparisons.get(best)) if ours else ""
    return [f"`{group[0].operation}`, {group[0].direction}", group[0].case.label, *times, ratio]


def markdown(results: Results) -> str:
    """The tables for a page."""
    environment = results.machine.environment
    lines = [
        f"Measured on {environment.device_name} with torch {environment.torch}"
        + (f", triton {environment.triton}" if environment.triton else "")
        + f", {environment.torch_threads} CPU threads, on {results.created[:10]}."
        + (" A short run: fewer cases and rounds." if results.quick else "")
        + (" An unfinished run: what is not in these tables was not measured." if not results.complete else "")
        + f" {TIMES.capitalize()}, and {_shares(results)}. {SIGNS}",
        "",
    ]
    cases: dict[str, dict[str, list[list[Measurement]]]] = {}
    for (operation, direction, _), group in groups(results).items():
        cases.setdefault(operation, {}).setdefault(direction, []).append(group)
    for operation, directions in cases.items():
        tables = []
        for direction, found in directions.items():
            tables += [f"**`{operation}`, {direction}**", "", *time_table(found), ""]
        if len(cases) > UNFOLDED:  # shown on a click, on GitHub as on the site
            title = f"<summary>{_summary(operation, directions)}</summary>"
            tables = ['<details markdown="1">', title, "", *tables, "</details>", ""]
        lines += tables
    if results.costs:
        labels = ", ".join(dict.fromkeys(c.case.label for c in results.costs))
        lines += [f"**Whole cost of a call**: {labels}", "", *markdown_table(COST_COLUMNS, cost_rows(results)), ""]
        lines += [f"{reason}.  " for reason in missing_costs(results)]
    lines += [f"{_sentence(line)}  " for line in (*conditions(results), *provenance(results), *reasons(results))]
    return "\n".join(lines).rstrip() + "\n"


def _sentence(line: str) -> str:
    """Capitalize the first word unless it is a name in code, and end with a full stop."""
    is_code = any(sign in line.partition(" ")[0] for sign in "_:")
    return f"{line if is_code else line[0].upper() + line[1:]}."


def _summary(operation: str, directions: Mapping[str, Sequence[list[Measurement]]]) -> str:
    """One line of HTML: how far apart our levels and the best PyTorch are, over the cases of each direction."""
    parts = []
    for direction, cases in directions.items():
        found: dict[str, list[float]] = {}
        for group in cases:
            baseline = best_pytorch(group) or ""
            for m in group:
                if _is_own(m) and (comparison := m.comparisons.get(baseline)) is not None:
                    found.setdefault(m.implementation, []).append(comparison.speedup.median)
        ends = {name: dict.fromkeys(f"{end:.2f}x" for end in (min(all_), max(all_))) for name, all_ in found.items()}
        spans = [f"{name} {' to '.join(both)}" for name, both in ends.items()]
        parts += [f"{direction} {', '.join(spans)}"] if spans else []
    said = f": {'; '.join(parts)} of the best PyTorch" if parts else ""
    return f"<code>{operation}</code>{said}"


def time_table(cases: Sequence[list[Measurement]]) -> list[str]:
    """The lines of one table: cases below each other, levels beside each other, then the speedups of ours."""
    names = list(dict.fromkeys(m.implementation for group in cases for m in group))
    timed = {m.implementation for group in cases for m in group if _is_own(m) and m.time}
    own = [name for name in names if name in timed]
    others: dict[str, Callable[[list[Measurement]], str | None]]
    others = {"native": lambda group: "native", "best PyTorch": best_pytorch}
    if any(map(best_peer, cases)):
        others["best peer"] = best_peer
    rows = []
    for group in cases:
        found = {m.implementation: m for m in group}
        compared = [found[name].comparisons if name in found else {} for name in own]
        speedups = [speedup(each.get(find(group) or "")) for each in compared for find in others.values()]
        rows.append([group[0].case.label, *(time_cell(found.get(name)) for name in names), *speedups])
    return markdown_table(["case", *names, *(f"{name} over {other}" for name in own for other in others)], rows)


def time_cell(measurement: Measurement | None) -> str:
    """Time, interval and share of one measurement, or what there is instead."""
    m = measurement
    if m is None:
        return ""
    if m.time is None:
        return NO_FIGURE if m.status == "unavailable" else m.status
    spread = (m.time.high - m.time.low) / 2.0 / m.time.median
    share = max(m.share_of_copy or 0.0, m.share_of_matmul or 0.0)
    return f"{seconds(m.time.median)} ± {spread:.1%}" + (f", {share:.0%}" if share else "")


def _is_own(m: Measurement) -> bool:
    return m.level not in PYTORCH_LEVELS and m.level != "peer"
