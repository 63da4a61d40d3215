"""What an analysis says: findings in five parts, which can be indexed, printed and saved."""

from __future__ import annotations

import json
import linecache
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PARTS: tuple[str, ...] = ("compilation_readiness", "fusion_opportunities", "memory_bottlenecks", "kernel_efficiency")
PARTS += ("optimization_suggestions",)
SAFE, ALL, BY_HAND = "safe", "all", "by hand"


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    Attributes:
        kind: such as "graph-break", "rms_norm" or "saved".
        what: a sentence.
        line: `file:line` of the user's code; "" if there is none.
        paths: names of the modules that it is in.
        recipe: id of the recipe in the catalogue; "" if there is none.
        change: what to do, in a few lines of code or words.
        gain_bytes: bytes that the change saves, at least; 0 where that is unknown.
        gain_seconds: seconds that it saves on the GPU of the report, at least; 0 where that is unknown.
        applies: "safe" or "all", which `optimize` makes, or "by hand".
        evidence: numbers and names behind the sentence.
    """

    kind: str
    what: str
    line: str = ""
    paths: tuple[str, ...] = ()
    recipe: str = ""
    change: str = ""
    gain_bytes: int = 0
    gain_seconds: float = 0.0
    applies: str = BY_HAND
    evidence: dict[str, Any] = field(default_factory=dict)

    @property
    def source(self) -> str:
        """The line itself."""
        file, _, number = self.line.rpartition(":")
        return linecache.getline(file, int(number or 0)).strip() if file else ""

    @property
    def place(self) -> str:
        """Name of the file and the line, for people; without a line the path of a module."""
        return self.line.rpartition("/")[2] or next(iter(self.paths), "")


@dataclass
class Part:
    """Findings and the figures that belong to them: iterated, and indexed by number or by the name of a figure."""

    facts: dict[str, Any] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)

    def __len__(self) -> int:
        return len(self.findings)

    def __getitem__(self, key: int | str) -> Any:
        return self.facts[key] if isinstance(key, str) else self.findings[key]


@dataclass
class Report:
    """What `analyze_component` found; `report["fusion_opportunities"]` is a part.

    Attributes:
        title: of the module.
        facts: what was analysed, and where.
        parts: by name, in the order of `PARTS`.
    """

    title: str
    facts: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, Part] = field(default_factory=lambda: {name: Part() for name in PARTS})

    def __getitem__(self, name: str) -> Part:
        if name not in self.parts:
            raise KeyError(f"no part {name!r}; there are: {', '.join(self.parts)}")
        return self.parts[name]

    @property
    def findings(self) -> list[Finding]:
        """Those of all parts but the suggestions, which repeat them."""
        return [f for name, part in self.parts.items() if name != PARTS[-1] for f in part]

    def __str__(self) -> str:
        """The report in 80 columns."""
        from .report import text

        return text(self)

    def to_json(self) -> str:
        """Facts and findings, with file, line, recipe and change of each."""
        parts = {
            name: {"facts": part.facts, "findings": [asdict(f) | {"source": f.source} for f in part]}
            for name, part in self.parts.items()
        }
        return json.dumps({"title": self.title, "facts": self.facts, "parts": parts}, indent=1, default=str)

    def to_html(self) -> str:
        """One page that needs no other file."""
        from .page import page

        return page(self)

    def save(self, file: str | Path) -> Path:
        """Write the report as JSON or HTML, by the ending of the name; ValueError for other endings."""
        file = Path(file)
        if file.suffix not in (".json", ".html"):
            raise ValueError(f"file is {file.name!r}; it must end in .json or .html")
        file.write_text(self.to_json() if file.suffix == ".json" else self.to_html(), encoding="utf-8")
        return file


def mib(size: float) -> str:
    """Bytes for people."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size) >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size:.0f} B"


def microseconds(seconds: float) -> str:
    """A time for people."""
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"
