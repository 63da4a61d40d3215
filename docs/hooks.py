"""What mkdocs.yml cannot say: everything here is found in the tree, so that a new package edits no list.

- `Techniques` in the navigation holds every page of docs/techniques/ and every package that has none there, `Examples`
  every script of examples/, `Harness` one page per module of the harness.
- The page of patterns in the guide has every recipe, and that about debugging a run of `kernel-pytorch doctor`.
- The home page has what was measured of whole models on a GPU.
- Pages of the guide have tables of what was measured.
- The page about whole models has their tables, and that of the architectures that are tested.
- A fence named `math` becomes MathML: browsers draw it without a script and without a network.

How the page of a technique is put together stands in technique_pages.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import examples_pages
import guide_tables
from architectures import table as architectures_table
from home_page import measured
from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from recipes_page import DOCTOR, REPORT, diagnosed, with_doctor
from recipes_page import PAGE as RECIPES
from recipes_page import page as recipes_page
from technique_pages import packages  # beside this file, where mkdocs looks while it loads a hook

from kernel_pytorch.harness.models.page import losses as models_losses
from kernel_pytorch.harness.models.page import markdown as models_markdown
from kernel_pytorch.harness.models.record import FILE, Record, load

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
        "examples/": [examples_pages.uri(script) for script in examples_pages.scripts()],
        "reference/": [f"reference/{name}.md" for name in modules()],
    }
    config.nav = [
        {title: contents.get(target, target) if isinstance(target, str) else target for title, target in entry.items()}
        if isinstance(entry, dict)
        else entry
        for entry in config.nav
    ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add one page per module of the harness, and that of all recipes."""
    options = "{show_root_heading: false, show_root_toc_entry: false, heading_level: 2}"
    for name in modules():
        page = f"# {name}\n\n::: kernel_pytorch.harness.{name}\n    options: {options}\n"
        files.append(File.generated(config, f"reference/{name}.md", content=page))
    files.append(File.generated(config, RECIPES, content=recipes_page()))
    model = (ROOT / "docs" / DOCTOR).read_text(encoding="utf-8")
    files.append(File.generated(config, REPORT, content=diagnosed(model)[1]))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Put what was measured of whole models, and a run of `doctor`, where pages ask for it."""
    markdown = guide_tables.fill(markdown)
    if page.file.src_uri == DOCTOR:
        return with_doctor(markdown)
    if page.file.src_uri == "index.md":
        return markdown.replace("<!-- measured -->", measured([r for r in model_records() if not is_of_a_cpu(r)]))
    if page.file.src_uri != "models.md":
        return markdown
    markdown = markdown.replace("<!-- architectures -->", architectures_table())
    markdown = markdown.replace("<!-- losses -->", measured_models(models_losses))
    return markdown.replace("<!-- models -->", measured_models(models_markdown))


def measured_models(tables_of: Callable[[Record], str]) -> str:
    """The tables of every device that has some, a GPU first."""
    tables = [tables_of(record) for record in model_records()]
    return "\n\n".join(tables) or f"Not measured yet: there is no `results/<device>/{FILE}`."


def model_records() -> list[Record]:
    """What was measured of models, a GPU's first."""
    return sorted((load(file) for file in sorted(ROOT.glob(f"results/*/{FILE}"))), key=is_of_a_cpu)


def is_of_a_cpu(record: Record) -> bool:
    """Whether everything was measured on a CPU."""
    return all(run.environment.device_type == "cpu" for run in record.runs.values())


def modules() -> list[str]:
    """Public modules and packages of the harness, in alphabetical order."""
    files = [file.stem for file in HARNESS.glob("[!_]*.py")]
    return sorted([*files, *(file.parent.name for file in HARNESS.glob("[!_]*/__init__.py"))])


def draw_formula(source: str, *_: Any, **__: Any) -> str:
    """Turn a LaTeX formula into MathML."""
    return f'<div class="formula">{convert(source, display="block")}</div>'
