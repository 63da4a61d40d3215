"""What to do first: the findings of all parts as changes, ranked by what they gain at least."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .records import Finding, mib, microseconds
from .registry import ADVICE

FIRST = {"error": 0, "attention-lost": 1, "graph-break": 2, "recompile": 3, "setting": 4}
"""What comes before anything that is ranked by its gain: it decides whether the rest takes effect."""


def suggestions(findings: Sequence[Finding]) -> list[Finding]:
    """The findings that name a change, the most urgent first; what gains nothing that can be counted is left out.

    Among equal gains, the user's own lines come first: those of a library are harder to change.
    """
    wanted = [
        f for f in findings if f.change and f.kind != "note" and (f.kind in FIRST or f.gain_bytes or f.gain_seconds)
    ]
    foreign = {id(f): not f.line or "-packages/" in f.line for f in wanted}
    wanted.sort(key=lambda f: (FIRST.get(f.kind, len(FIRST)), -f.gain_seconds, foreign[id(f)], -f.gain_bytes))
    return [replace(f, what=f.what + gain(f)) for f in wanted]


def gain(finding: Finding) -> str:
    """What a change gains, in words."""
    if finding.gain_seconds:
        return f"; saves at least {mib(finding.gain_bytes)}, {microseconds(finding.gain_seconds)} an eager forward"
    if finding.gain_bytes:
        return f"; saves at least {mib(finding.gain_bytes)}"
    return ""


def advice(recipe: str) -> str:
    """What to do about a break, in one line."""
    return ADVICE.get(recipe, "see the page of PyTorch about this id")
