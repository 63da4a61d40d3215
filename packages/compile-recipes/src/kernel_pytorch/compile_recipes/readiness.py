"""Graph breaks, each once with the user's line, and recompilations, each once with the guard that failed.

Two sources, and neither changes what the user configured: the logger of graph breaks, whose text carries the reason,
PyTorch's id and the user's stack; and the metrics of compilation, which carry why each recompilation happened. The
backend is Dynamo's alone: nothing is lowered.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import re
import sysconfig
import traceback
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .internals import break_messages, fresh_dynamo, recompile_reasons
from .recorder import is_foreign
from .registry import recipe_of
from .state import call

STANDARD_LIBRARY = sysconfig.get_path("stdlib")
REASON = re.compile(
    r"^(?:Graph Break Reason: )?(\S.*)\n  (?:Higher Order Operator:.*\n  )?Explanation: (.*)", re.MULTILINE
)
LIMIT = 64
"""Recompilations that are followed; PyTorch's own limit falls back to eager in silence after eight."""


@dataclass(frozen=True)
class Break:
    """A graph break."""

    line: str  # `file:line` of the user's code
    source: str  # that line
    cause: str  # PyTorch's name for it
    gb: str  # PyTorch's id, such as "GB0124"; "" if it gives none
    eager: bool  # whether the whole function runs in eager, not the line alone
    recipe: str  # what mends it; "" if no recipe is known


@dataclass
class Readiness:
    """What compilation by Dynamo alone found."""

    graphs: int = 0  # how many were captured, over all inputs
    breaks: list[Break] = field(default_factory=list)  # each line once, those that cost a whole function first
    recompiles: list[tuple[str, str]] = field(default_factory=list)  # (`file:line function`, failed guard), each once
    error: str = ""  # what compilation raised, in one line; "" if nothing
    export: str | None = None  # why `torch.export` refuses; "" if it does not, None if it was not asked
    export_line: str = ""  # `file:line` of the user's code at which it does; "" if it names none


def readiness(
    module: torch.nn.Module,
    calls: Sequence[tuple[Sequence[Any], Mapping[str, Any] | None]],
    *,
    export: bool = False,
    dynamic: bool | None = None,
) -> Readiness:
    """Compile a module with Dynamo alone and call it, once for each of the given inputs.

    Args:
        module: in the mode in which it will run.
        calls: (inputs, kwargs), the first the typical one.
        export: whether to ask `torch.export` too.
        dynamic: as `torch.compile` takes it.
    """
    found = Readiness()

    def keep(gm: torch.fx.GraphModule, example: Any) -> Any:
        found.graphs += 1
        return gm.forward

    with fresh_dynamo(LIMIT):
        with break_messages() as texts, torch.set_grad_enabled(module.training), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Dynamo warns of some breaks, too
            compiled = torch.compile(module, backend=keep, dynamic=dynamic)
            try:
                for inputs, kwargs in calls:
                    call(compiled, inputs, kwargs)
            except Exception as error:  # eager ran before this: it is Dynamo's, or depends on it
                found.error = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        found.recompiles = _once(recompile_reasons())
    found.breaks = _distinct([b for b in map(parse, texts) if b is not None])
    if export:
        found.export, found.export_line = why_not_exported(module, *calls[0])
    return found


def parse(text: str) -> Break | None:
    """A break from what Dynamo says about it, or None: it says other things too."""
    if "raph break" not in text.partition("\n")[0]:
        return None
    marks = ("User code traceback:", "in the following user code:")  # the second in torch 2.10 and 2.11, where it skips
    head, _, trace = text.partition(marks[marks[0] not in text])
    frames = re.findall(r'File "([^"]+)", line (\d+)', trace)
    frames = frames or re.findall(r"in user code at (.+):(\d+)$", head, re.MULTILINE)  # of a line told before
    mine = [(f, int(n)) for f, n in frames if _is_users(f)] or [(f, int(n)) for f, n in frames[-1:]]
    reasons = REASON.findall(head)
    gb = re.findall(r"gb(\d{4})\.html", head)
    in_loop = len(reasons) > 1 and "in loop" in reasons[-1][0]  # the break itself is named before it
    gb = gb[:-1] if in_loop and len(gb) > 1 else gb
    if reasons:
        cause, explanation = reasons[-2 if in_loop else -1]
        cause += "".join(re.findall(r"builtin operator( `\w+`)", explanation)[:1])
    else:
        cause, explanation = head.split("Reason:")[-1].strip().partition("\n")[0], ""
    line, source = (f"{mine[-1][0]}:{mine[-1][1]}", linecache.getline(*mine[-1]).strip()) if mine else ("", "")
    number = f"GB{gb[-1]}" if gb else ""
    eager = "Skipping the function" in head or "cannot properly resume" in head
    in_context = eager and (
        "WithExitFunctionVariable" in head or source.startswith("with ")
    )  # cannot be resumed inside
    recipe = "context_manager" if in_context else recipe_of(number, cause, source, explanation)
    return Break(line, source, cause, number, eager, recipe)


def why_not_exported(
    module: torch.nn.Module, inputs: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> tuple[str, str]:
    """Why `torch.export` refuses a module, in one line, and `file:line` of the user's code; "" if it does not."""
    try:
        silent = contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO())
        with torch.no_grad(), break_messages(), silent[0], silent[1]:
            torch.export.export(module, tuple(inputs), dict(kwargs or {}), strict=False)
    except Exception as error:  # of many kinds, the user's own among them
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        why = f"{type(error).__name__}: {lines[0] if lines else ''}"
        if "DataDependent" in why:  # PyTorch tells of its symbols
            why = f"values decide about a branch or a size, which must be fixed ({why})"
        frames = traceback.extract_tb(error.__traceback__)
        mine = [f for f in frames[_first_forward(frames) :] if _is_users(f.filename)]
        return why, f"{mine[-1].filename}:{mine[-1].lineno}" if mine else ""
    return "", ""


def _first_forward(frames: Sequence[traceback.FrameSummary]) -> int:
    """Where calls of modules begin in a stack, which begins with who asked for the export."""
    return next((i for i, f in enumerate(frames) if f.name in ("_call_impl", "forward")), len(frames))


def _is_users(file: str) -> bool:
    return not is_foreign(file) and (not file.startswith(STANDARD_LIBRARY) or "site-packages" in file)


def _distinct(breaks: Sequence[Break]) -> list[Break]:
    """Each line once; a record of the same line that says more is merged into it."""
    once: dict[str, Break] = {}
    for b in breaks:
        known = once.setdefault(b.line, b)
        eager = known.eager or b.eager
        once[b.line] = replace(known, eager=eager, recipe=known.recipe or b.recipe, gb=known.gb or b.gb)
    causes = {b.cause for b in once.values() if _is_users(b.line)}
    # What PyTorch's own code repeats, between the lines of the user.
    found = [b for b in once.values() if _is_users(b.line) or b.cause not in causes]
    return sorted(found, key=lambda b: not b.eager)


def _once(reasons: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    found: dict[str, tuple[str, str]] = {}
    for where, why in reasons:
        key = where + re.sub(r"\d+", "#", why)  # s.n == 0, s.n == 1, ...: one reason
        found.setdefault(key, (where, re.sub(r"\s{2,}", "  ", why)))
    return list(found.values())
