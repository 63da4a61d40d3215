"""What the guide shows of compile-recipes: the page of every recipe, and a run of `kernel-pytorch doctor`."""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
from pathlib import Path

from kernel_pytorch.compile_recipes import CompilerOptimizationAssistant
from kernel_pytorch.compile_recipes.commands.doctor import made_of
from kernel_pytorch.compile_recipes.recipes import Recipe, catalogue

PAGE = "guide/patterns.md"
DOCTOR = "guide/debugging-compilation.md"
REPORT = "guide/report.html"
MARKER = "<!-- doctor -->"
OPENING = """# Patterns

After this page you can look up a change by the name that a report gives it. Each recipe is code before and after, and a
test counts the quantities that it names: they become less by the change.

"""
FENCE = "```"


def page() -> str:
    """The page, in Markdown."""
    recipes = catalogue().values()
    rows = [f"| [`{r.name}`](#{r.name}) | {r.title} | {', '.join(r.counts)} |" for r in recipes]
    table = ["| recipe | what it changes | counted |", "|---|---|---|", *rows]
    return OPENING + "\n".join([*table, "", *map(section, recipes)])


def section(r: Recipe) -> str:
    """One recipe."""
    code = "\n\n".join(f"{FENCE} {{.python}}\n{r.code(name).strip()}\n{FENCE}" for name in ("Before", "After"))
    return f"## {r.title} {{#{r.name}}}\n\n{r.why}\n\n{code}\n\n**When not:** {r.when_not}\n"


def diagnosed(markdown: str) -> tuple[str, str]:
    """What `doctor` prints, and writes as HTML, about the model in the first block of Python of a page."""
    code = re.search("```python\n(.*?)```", markdown, re.DOTALL)
    assert code is not None, "the page has no model"
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        file = Path(folder, "models.py")
        file.write_text(f"{code[1]}\n\ndef make():\n    return Bad(), torch.randn(8, 16)\n", encoding="utf-8")
        made = made_of(f"{file}:make")
        report = CompilerOptimizationAssistant().analyze_component(made.module, *made.inputs)
        return str(report), report.to_html().replace(f"{folder}/", "")


def with_doctor(markdown: str) -> str:
    """A page with what `doctor` prints in the place of the marker."""
    if MARKER not in markdown:
        return markdown
    text, _ = diagnosed(markdown)
    shown = f'{FENCE}text\n{text}\n{FENCE}\n\n<a href="report.html">report.html</a> is the page that it writes.'
    return markdown.replace(MARKER, shown)
