"""What mkdocs.yml cannot say: everything here is found in the tree, so that a new package edits no list.

- `Techniques` in the navigation holds every page of docs/techniques/ and every package that has none there, `Harness`
  one page per module of the harness.
- A fence named `math` becomes MathML: browsers draw it without a script and without a network.

How the page of a technique is put together stands in technique_pages.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from technique_pages import packages  # beside this file, where mkdocs looks while it loads a hook

ROOT = Path(__file__).parent.parent
HARNESS = ROOT / "harness" / "src" / "kernel_pytorch" / "harness"


@event_priority(100)  # before mkdocstrings reads its paths
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Point mkdocstrings at every package, fill the navigation, and draw formulae."""
    sources = [str(folder) for folder in sorted(ROOT.glob("packages/*/src"))]
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [str(ROOT / "harness" / "src"), *sources]
    config.mdx_configs["pymdownx.superfences"] = {
        "custom_fences": [{"name": "math", "class": "math", "format": draw_formula}]
    }
    written = {file.stem for file in (ROOT / "docs" / "techniques").glob("*.md")}
    techniques = sorted(written | set(packages()))
    contents = {
        "techniques/": [f"techniques/{name}.md" for name in techniques],
        "reference/": [f"reference/{name}.md" for name in modules()],
    }
    config.nav = [
        {title: contents.get(target, target) for title, target in entry.items()} if isinstance(entry, dict) else entry
        for entry in config.nav
    ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add one page per module of the harness."""
    options = "{show_root_heading: false, show_root_toc_entry: false, heading_level: 2}"
    for name in modules():
        page = f"# {name}\n\n::: kernel_pytorch.harness.{name}\n    options: {options}\n"
        files.append(File.generated(config, f"reference/{name}.md", content=page))
    return files


def modules() -> list[str]:
    """Public modules and packages of the harness, in alphabetical order."""
    files = [file.stem for file in HARNESS.glob("[!_]*.py")]
    return sorted([*files, *(file.parent.name for file in HARNESS.glob("[!_]*/__init__.py"))])


def draw_formula(source: str, *_: Any, **__: Any) -> str:
    """Turn a LaTeX formula into MathML."""
    return f'<div class="formula">{convert(source, display="block")}</div>'
