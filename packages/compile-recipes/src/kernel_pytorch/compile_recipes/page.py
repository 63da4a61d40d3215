"""A report as one HTML page that needs no other file and no script."""

from __future__ import annotations

from html import escape

from .records import Finding, Report
from .report import summary

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem;border-bottom:1px solid #ccc}
pre,code{font:13px/1.45 ui-monospace,monospace}pre{background:#f4f4f4;padding:.6rem;overflow-x:auto}
details{margin:.4rem 0}summary{cursor:pointer}.place{color:#666}.applies{color:#060}
@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}pre{background:#262626}.place{color:#999}
.applies{color:#8c8}h2{border-color:#444}}
"""


def page(report: Report) -> str:
    """The page."""
    parts = []
    for name, part in report.parts.items():
        title = name.replace("_", " ").capitalize()
        note = f"<p>{escape(str(part.facts['summary']))}</p>" if part.facts.get("summary") else ""
        body = "\n".join(map(_finding, part.findings)) or "<p>Nothing found.</p>"
        parts.append(f"<h2>{title}</h2>\n{note}{body}")
    facts = ", ".join(f"{key} {value}" for key, value in report.facts.items())
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(report.title)}</title>'
        f"<style>{STYLE}</style></head><body>\n<h1>{escape(report.title)}</h1>\n"
        f"<p class=place>{escape(facts)}</p>\n<pre>{escape(chr(10).join(summary(report)))}</pre>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _finding(f: Finding) -> str:
    lines = [f"<details><summary>{escape(f.what)} <span class=place>{escape(f.place)}</span></summary>"]
    if f.source:
        lines.append(f"<pre>{escape(f.line)}\n{escape(f.source)}</pre>")
    if f.change:
        applies = f" <span class=applies>optimize: {escape(f.applies)}</span>" if f.applies != "by hand" else ""
        lines.append(f"<p>Change:{applies}</p><pre>{escape(f.change)}</pre>")
    if f.recipe:
        lines.append(f"<p>Recipe <code>{escape(f.recipe)}</code></p>")
    if any(f.paths):
        lines.append(f"<p class=place>{escape(', '.join(filter(None, f.paths)))}</p>")
    rows = "".join(f"<li>{escape(str(k))}: {escape(str(v))}</li>" for k, v in f.evidence.items())
    return "".join([*lines, f"<ul>{rows}</ul>" if rows else "", "</details>"])
