"""A guard for a project's own tests and CI: how many breaks, graphs, recompilations and saved bytes are allowed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .memory import by_line, saved
from .readiness import Readiness, readiness
from .records import Report, mib
from .state import preserved

BUDGETS = ("breaks", "graphs", "recompiles", "saved_bytes", "operators", "attention_lost")
"""What a budget file may limit, each a whole number."""
LINES = 5


def assert_ready(
    module: torch.nn.Module,
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    shapes: Sequence[Sequence[Any]] = (),
    breaks: int | None = 0,
    graphs: int | None = 1,
    recompiles: int | None = None,
    saved_bytes: int | None = None,
) -> None:
    """Fail where a module compiles worse than allowed; the message lists the lines. For a project's own tests.

    The module is left as it was; what was compiled before is compiled again at its next call.

    Args:
        module: not compiled, in the mode in which it will run.
        *inputs: of a call.
        kwargs: named inputs of the call.
        shapes: further inputs, each a tuple, which may recompile.
        breaks: graph breaks allowed; None for any number.
        graphs: graphs allowed, over all inputs; None for any number.
        recompiles: recompilations allowed, each reason once; None for any number.
        saved_bytes: bytes that may be kept for the backward; None for any number.

    Raises:
        AssertionError: there is more of one of them than allowed, or compilation fails.
    """
    with preserved(module):
        found = readiness(module, [(inputs, kwargs), *((s, kwargs) for s in shapes)])
    problems = [f"compilation fails: {found.error}"] if found.error else []
    counts = {"breaks": len(found.breaks), "graphs": found.graphs, "recompiles": len(found.recompiles)}
    for name, limit in (("breaks", breaks), ("graphs", graphs), ("recompiles", recompiles)):
        if limit is not None and counts[name] > limit:
            problems += [f"{name}: {counts[name]}, allowed {limit}", *_lines(name, found)]
    if saved_bytes is not None:
        with preserved(module):
            kept = saved(module, inputs, kwargs)
        total = sum(k.bytes for k in kept)
        if total > saved_bytes:
            problems.append(f"saved_bytes: {total} ({mib(total)}), allowed {saved_bytes}")
            lines = [*by_line(kept).items()][:LINES]
            problems += [f"  {line}: {mib(sum(k.bytes for k in group))}" for line, group in lines]
    if problems:
        raise AssertionError("\n".join([f"{type(module).__name__} is not ready:", *problems]))


def _lines(name: str, found: Readiness) -> list[str]:
    if name == "recompiles" or (name == "graphs" and found.recompiles):
        return [f"  {where}: {why.partition('  #')[0]}" for where, why in found.recompiles]
    return [f"  {b.line}: {b.cause} {b.gb}: {b.source}".rstrip() for b in found.breaks]


def read_budget(file: Path) -> dict[str, int]:
    """The limits of a budget file: a JSON object of `BUDGETS` and whole numbers.

    Raises:
        ValueError: it is not that; the message says why.
    """
    try:
        found = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from None
    if not isinstance(found, dict) or not all(type(v) is int for v in found.values()):
        raise ValueError(f"{file}: it must be an object of names and whole numbers")
    if strangers := sorted(found.keys() - set(BUDGETS)):
        raise ValueError(f"{file}: unknown {', '.join(strangers)}; allowed are {', '.join(BUDGETS)}")
    return found


def counts_of(report: Report) -> dict[str, int]:
    """What a report says of each of `BUDGETS`, as far as it does."""
    ready, memory, kernels = (
        report[n].facts for n in ("compilation_readiness", "memory_bottlenecks", "kernel_efficiency")
    )
    found = {
        "breaks": ready.get("breaks"), "graphs": ready.get("graphs"), "recompiles": ready.get("recompiles"),
        "saved_bytes": memory.get("saved"), "operators": kernels.get("operators"),
        "attention_lost": ready.get("attention_lost"),
    }  # fmt: skip
    return {name: value for name, value in found.items() if value is not None}


def over_budget(report: Report, budget: Mapping[str, int]) -> list[str]:
    """A line for each limit that a report exceeds or does not know; an empty list if there is none."""
    counts = counts_of(report)
    if any(f.kind == "error" for f in report["compilation_readiness"]):
        return [f.what for f in report["compilation_readiness"] if f.kind == "error"]
    return [
        f"{name}: {counts.get(name, 'unknown')}, allowed {limit}"
        for name, limit in budget.items()
        if counts.get(name) is None or counts[name] > limit
    ]
