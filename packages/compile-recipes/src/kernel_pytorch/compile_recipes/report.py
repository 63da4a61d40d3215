"""A report as text of 80 columns: ten lines that matter first, the rest below."""

from __future__ import annotations

import io
import textwrap

from rich.console import Console
from rich.table import Table

from .records import Finding, Part, Report, mib

WIDTH = 80
TOP = 3
SHOWN = 8


def text(report: Report) -> str:
    """The whole report."""
    return "\n".join([*summary(report), "", *details(report)])


def summary(report: Report) -> list[str]:
    """At most ten lines: what the model is, breaks, attention, memory, and the first three changes."""
    ready, memory = report["compilation_readiness"], report["memory_bottlenecks"]
    facts = report.facts
    lines = [f"{report.title}: {facts['parameters'] / 1e6:.1f} M parameters, {facts['mode']}, {facts['device']}"]
    breaks, recompiles = ready.facts.get("breaks"), ready.facts.get("recompiles")
    if breaks is not None:
        whole = sum(f.evidence.get("whole_function", False) for f in ready)
        eager = f", {whole} of them cost a whole function" if whole else ""
        tried = recompiles or ready.facts.get("shapes")
        again = plural(recompiles or 0, "recompile") if tried else "recompiles not tried, for want of shapes"
        lines.append(f"compilation: {plural(breaks, 'graph break')}{eager}; {again}")
    if (attention := ready.facts.get("attention")) is not None:
        lines.append(f"attention: {attention}")
    if "saved" in memory.facts:
        peak = memory.facts["peak"]
        lines.append(f"memory: {mib(memory['saved'])} kept for the backward" + (f", peak {mib(peak)}" if peak else ""))
    fusions = report["fusion_opportunities"]
    if fusions.findings:
        lines.append(f"fusion: {plural(sum(f.evidence['count'] for f in fusions), 'pattern')} found and proven")
    if settings := [f.what for f in ready if f.kind == "setting"]:
        lines.append(_short(f"settings that cost: {'; '.join(settings)}", ""))
    for number, suggestion in enumerate(report["optimization_suggestions"].findings[:TOP], 1):
        place = f"{suggestion.place}  " if suggestion.place else ""
        lines.append(_short(f"{number}. {place}{suggestion.what}", ""))
    return lines


def details(report: Report) -> list[str]:
    """Every part, with its findings."""
    lines = []
    for name, part in report.parts.items():
        lines += [name.replace("_", " ").upper()]
        if "summary" in part.facts:
            lines += wrapped(part.facts["summary"], "  ")
        if name == "kernel_efficiency":
            lines += _table(part)
        elif not part.findings:
            lines.append("  nothing found")
        else:
            for number, finding in enumerate(part.findings[:SHOWN], 1):
                last = name == "optimization_suggestions"
                lines += _suggestion(number, finding) if last else _finding(finding)
            if len(part) > SHOWN:
                lines.append(f"  and {len(part) - SHOWN} more, in the JSON and the HTML page")
        lines.append("")
    return lines[:-1]


def _finding(f: Finding) -> list[str]:
    lines = wrapped(f.what, "- ", "  ")
    if f.line:
        lines.append(_short(f"  {f.place}", f.source))
    if f.paths and any(f.paths):
        named = [p for p in f.paths if p]
        lines += wrapped(
            ", ".join(named[:2]) + (f" and {len(named) - 2} more" if len(named) > 2 else ""), "  in ", "  "
        )
    if f.change:
        how = {"safe": "optimize() tries it: ", "all": "optimize(apply='all') tries it: "}.get(f.applies, "")
        lines += wrapped(how + f.change, "  > ", "    ")
    if f.recipe:
        lines.append(f"  recipe: {f.recipe}")
    return lines


def _suggestion(number: int, f: Finding) -> list[str]:
    """What was said above is not said again."""
    lines = wrapped(f.what, f"{number}. ", "   ")
    return [*lines, _short(f"   {f.place}", f.source)] if f.place else lines


def _table(part: Part) -> list[str]:
    table = Table(box=None, pad_edge=False)
    for head, justify in (("operator", "left"), ("calls", "right"), ("at least", "right"), ("bound by", "left")):
        table.add_column(head, justify=justify, overflow="ellipsis", no_wrap=True)  # type: ignore[arg-type]
    for f in part.findings[:SHOWN]:
        e = f.evidence
        table.add_row(f.what.partition(":")[0], str(e["count"]), f"{e['least_seconds'] * 1e6:.1f} us", e["limit"])
    console = Console(file=io.StringIO(), width=WIDTH - 2, color_system=None)
    console.print(table)
    return [f"  {line.rstrip()}" for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def wrapped(text: str, first: str, rest: str | None = None) -> list[str]:
    """A text in lines of at most 80 columns."""
    rest = first if rest is None else rest
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=True)


def plural(number: int, what: str) -> str:
    """A count in words."""
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"


def _short(left: str, right: str) -> str:
    line = f"{left}  {right}".rstrip()
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..."
