"""The page of the guide that lists every recipe, made from the catalogue."""

from __future__ import annotations

from kernel_pytorch.compile_recipes.recipes import Recipe, catalogue

PAGE = "guide/patterns.md"
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
