"""A page for each script in examples/, made from its cells when the site is built; nothing is run.

The docstring opens the page. A cell begins with `# %% Title`; the comment lines right below become the text of its
section, and the rest its code.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # so that the test needs no mkdocs
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

EXAMPLES = Path(__file__).parent.parent / "examples"
CELL = re.compile(r"^# %%", re.MULTILINE)
SECTION = re.compile(r"^ *# --8<-- .*\n", re.MULTILINE)  # what other pages quote
FENCE = "```"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    from mkdocs.structure.files import File

    for script in scripts():
        content = page(script.stem, script.read_text(encoding="utf-8"))
        files.append(File.generated(config, uri(script), content=content))
    return files


def scripts() -> list[Path]:
    """The scripts, in alphabetical order."""
    return sorted(EXAMPLES.glob("*.py"))


def uri(script: Path) -> str:
    """Where the page of a script is, below docs/."""
    return f"examples/{script.stem}.md"


def page(name: str, source: str) -> str:
    """A script as Markdown."""
    source = SECTION.sub("", source)
    docstring = (ast.get_docstring(ast.parse(source), clean=False) or "").strip()  # a command stays indented
    head, *cells = CELL.split(source)
    title = name.replace("_", " ").capitalize()
    parts = [f"# {title}\n\n{docstring}\n\nThe whole script is `examples/{name}.py`."]
    begin = re.match(r"\s*(\"\"\".*?\"\"\")?", head, re.DOTALL)
    parts += _code(head[begin.end() if begin else 0 :])
    for cell in cells:
        heading, _, rest = cell.partition("\n")
        lines = rest.splitlines()
        above = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
        parts.append(f"## {heading.strip()}")
        parts += ["\n".join(line.removeprefix("#").strip() for line in lines[:above])] if above else []
        parts += _code("\n".join(lines[above:]))
    return "\n\n".join(parts) + "\n"


def _code(text: str) -> list[str]:
    return [f"{FENCE} {{.python}}\n{text.strip()}\n{FENCE}"] if text.strip() else []
