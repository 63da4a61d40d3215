"""Which sources an operator of csrc/ is compiled from, and their digest: how a stale figure is recognised."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

# What an operator's code for a device starts from, beside its schema.
DEVICE_SOURCES = {"cpu": "cpu.cpp", "cuda": "cuda.cu"}

INCLUDE = re.compile(r'^#include "([^"]+)"', re.MULTILINE)
# Text and characters are matched first, so that what looks like a comment inside them is none.
TEXT_OR_COMMENT = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])\'|//[^\n]*|/\*.*?\*/', re.DOTALL)


def operator_digests(csrc: Path) -> dict[str, dict[str, str]]:
    """By operator and type of device, the digest of the code that runs there: a kernel is none of its CPU backend's."""
    csrc = csrc.resolve()  # a link, beside this file
    return {
        file.parent.name: {device: _code_digest(csrc, file.parent, device) for device in DEVICE_SOURCES}
        for file in sorted(csrc.glob("*/cpu.cpp"))
    }


def _code_digest(csrc: Path, operator: Path, device: str) -> str:
    """Digest of what the operator's schema and its source for a device include, without comments and empty lines."""
    other = csrc / "include" / "kernel_pytorch" / ("cpu" if device == "cuda" else "cuda")
    found: dict[str, str] = {}
    pending = [operator / "operator.cpp", operator / DEVICE_SOURCES[device]]
    while pending:
        file = pending.pop().resolve()
        place = file.relative_to(csrc).as_posix()
        if place in found:
            continue
        found[place] = code = _without_comments(file.read_text(encoding="utf-8"))
        for name in INCLUDE.findall(code):
            here, shared = file.parent / name, csrc / "include" / name
            pending += [path for path in (here, shared) if path.is_file() and other not in path.parents][:1]
    return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()[:16]


def _without_comments(source: str) -> str:
    """The lines that are neither empty nor a comment."""
    text = TEXT_OR_COMMENT.sub(lambda found: " " if found[0].startswith("/") else found[0], source)
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip())
