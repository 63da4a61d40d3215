"""How the page of a technique is put together from its package when the site is built.

A page says where a section belongs by a comment, `<!-- SECTION: PACKAGE -->`, or `PACKAGE/GROUP` where a package
has one folder per group of operations:

    definition   the source of `levels/reference.py`
    ladder       a table of the levels: file, and the first paragraph of its docstring
    support      which PyTorch features each level supports, from `results/<device>/support/`
    static       what the compiled kernels look like, from `results/static/`
    results      the measured tables and plots, from `results/<device>/`
    api          the public names, from their docstrings

A section that a page does not mention comes at its end, under a separate heading. A package without a page in
docs/techniques/ still gets one: its README, and every section. A section without content yet says so.
"""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_pytorch.harness import page as results_page
from kernel_pytorch.harness import results as measured
from kernel_pytorch.harness.discovery import discover
from kernel_pytorch.harness.static import record as static_record
from kernel_pytorch.harness.static import table as static_table
from kernel_pytorch.harness.support import markdown as support_tables
from kernel_pytorch.harness.support import recorded

if TYPE_CHECKING:  # so that the tests of what is put together need no mkdocs
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
PAGES = "techniques/"
MARKER = re.compile(r"<!-- (\w+): ([\w-]+)(?:/([\w-]+))? -->")
GENERATED = re.compile(r"<!-- (\w+):begin -->.*?<!-- \1:end -->", re.DOTALL)
FENCE = "```"

LEVELS = {
    "reference": ("levels/reference.py", "reference.py"),
    "native": ("levels/native.py", "native.py"),
    "torchscript": (),
    "compile": ("levels/compile.py", "compiled.py"),
    "triton": ("levels/triton.py", "operators.py"),
    "cuda": ("levels/cuda.py", "operator.py"),
}
"""Possible files of each level: in the folder of levels, what it is derived from, or as the package of the kernels in
CUDA C++ has it."""

DERIVED = {
    "native": "The definition as it stands: PyTorch has no operator that does more of it at once.",
    "torchscript": "The definition under TorchScript: the historical rung (`torch.jit.script` is deprecated upstream).",
    "compile": "The definition under TorchInductor: kernels made for the shapes it sees.",
    "cuda": "CUDA C++ and its CPU backend: what kernel_pytorch.cuda_ops offers, where it is installed.",
}
"""What levels without a file are."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for every package that has none, and the plots of all results."""
    from mkdocs.structure.files import File

    written = {file.src_uri for file in files}
    for package in packages():
        if f"{PAGES}{package}.md" not in written:
            files.append(File.generated(config, f"{PAGES}{package}.md", content=readme_as_page(package)))
        for plot in plots(package):
            files.append(File.generated(config, plot_uri(plot), content=plot.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Fill in the sections that a page asks for, and append those that it forgets."""
    package = page.file.src_uri.removeprefix(PAGES).removesuffix(".md")
    return complete(markdown, package) if page.file.src_uri.startswith(PAGES) and package in packages() else markdown


def complete(markdown: str, package: str) -> str:
    """The page of a package with every section filled in."""
    mentioned = {found[1] for found in MARKER.finditer(markdown)}
    for name, (heading, _) in SECTIONS.items():
        if name not in mentioned:
            markdown += f"\n\n## {heading}\n\n<!-- {name}: {package} -->\n"

    def fill(found: re.Match[str]) -> str:
        return SECTIONS[found[1]][1](found[2], found[3] or "") if found[1] in SECTIONS else found[0]

    return MARKER.sub(fill, markdown)


def packages() -> list[str]:
    """The packages that offer a technique, in alphabetical order."""
    declared = sorted(ROOT.glob("packages/*/pyproject.toml"))
    return [file.parent.name for file in declared if 'entry-points."kernel_pytorch.techniques"' in file.read_text()]


def readme_as_page(package: str) -> str:
    """A README without its generated blocks and what leads to them; its title is that of the technique."""
    text = GENERATED.sub("", (ROOT / "packages" / package / "README.md").read_text(encoding="utf-8"))
    head, *sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    kept = [section for section in sections if len(section.strip().splitlines()) > 1 and "../../docs/" not in section]
    return re.sub(r"^# kernel-pytorch-", "# ", head) + "".join(kept)


def folder_of(package: str, group: str = "") -> Path:
    """Where the modules of a package, or of one of its groups, lie."""
    return ROOT / "packages" / package / "src" / "kernel_pytorch" / package.replace("-", "_") / group


def groups(package: str, group: str) -> list[str]:
    """The requested group; else all that have a definition, or the package itself, which is called ''."""
    if group or file_of(package, group, "reference"):
        return [group]
    folders = [folder.name for folder in sorted(folder_of(package).iterdir()) if folder.name != "levels"]
    return [name for name in folders if file_of(package, name, "reference")]


def file_of(package: str, group: str, level: str) -> Path | None:
    """The file of a level, if there is one."""
    files = [folder_of(package, group) / place for place in LEVELS[level]]
    return next((file for file in files if file.is_file()), None)


def derived(package: str, group: str) -> set[str]:
    """Levels of a package, or of one of its groups, that have no file."""
    name = f"kernel_pytorch.{package.replace('-', '_')}"
    try:
        table = importlib.import_module(f"{name}.levels").LADDER
    except (ModuleNotFoundError, AttributeError):
        return set()
    place = ".".join(filter(None, (name, group, "levels")))
    return {level for f, own in table.functions.items() if own == place for level in table.levels(f)} & DERIVED.keys()


def definition(package: str, group: str) -> str:
    """The source of the definition."""
    files = [file_of(package, name, "reference") for name in groups(package, group)]
    return "\n\n".join(
        f"{FENCE} {{.python}}\n{file.read_text(encoding='utf-8').strip()}\n{FENCE}" for file in files if file
    )


def ladder(package: str, group: str) -> str:
    """The levels that there are, with their files and what these say that they are."""
    lines = []
    for name in groups(package, group):
        lines += [f"**{name}**", ""] if not group and name else []
        lines += ["| level | file | what it is |", "| --- | --- | --- |"]
        for level in LEVELS:
            if file := file_of(package, name, level):
                lines.append(f"| `{level}` | `{file.name}` | {first_paragraph(file)} |")
            elif level in derived(package, name):
                lines.append(f"| `{level}` | | {DERIVED[level]} |")
        lines.append("")
    return "\n".join(lines)


def first_paragraph(file: Path) -> str:
    """The first paragraph of a module's docstring, on one line."""
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n\n")[0].replace("\n", " ").replace("|", "\\|")


def results(package: str, _group: str) -> str:
    """The measured tables, under the plots of all operations, device by device."""
    found = [measured.load(file) for file in sorted(ROOT.glob(f"results/*/{package}.json"))]
    if not found:
        return (
            "Not measured yet: there is no `results/<device>/" + package + ".json`. "
            f"`nox -s bench -- {package} --full` measures it on your machine."
        )
    found.sort(key=lambda results: results.machine.environment.device_type != "cuda")  # GPUs first
    tables = [results_page.markdown(results) for results in found]
    drawn: dict[str, list[str]] = {}
    for plot in plots(package):
        device, what = plot.parent.name, plot.stem.removeprefix(f"{package}-")
        image = f"    ![{what} on {device}](../{plot_uri(plot)}){{loading=lazy}}"
        drawn.setdefault(f'??? example "Drawn: {device}"', []).append(image)
    return "\n\n".join([*(line for title, images in drawn.items() for line in (title, *images)), *tables])


def plots(package: str) -> list[Path]:
    """The plots of a technique: of every device one for each operation, whose name has no hyphen."""
    return [file for file in sorted(ROOT.glob("results/*/*.svg")) if file.stem.rpartition("-")[0] == package]


def plot_uri(plot: Path) -> str:
    """Where the site has a plot."""
    return f"assets/results/{plot.parent.name}-{plot.name}"


def support(package: str, _group: str) -> str:
    """Which PyTorch features each level supports."""
    records = list(ROOT.glob(f"results/*/support/{package}.json"))
    if not records:
        return f"Not recorded yet: `kernel-pytorch support {package} --json results/<device>` tests every feature."
    technique = discover().get(package)
    return support_tables(technique, recorded(technique, ROOT / "results"))


def static(package: str, _group: str) -> str:
    """What the compiled kernels look like."""
    record = static_record.record_file(ROOT / "results", package)
    if record.is_file():
        return static_table.markdown(static_record.load(record))
    if not any(file_of(package, name, "triton") for name in groups(package, "")):
        return "It has no kernel of its own."
    return f"Not recorded yet: `kernel-pytorch static {package} --json results` compiles the kernels."


def api(package: str, _group: str) -> str:
    """The public names, modules last."""
    name = f"kernel_pytorch.{package.replace('-', '_')}"
    options = f"show_root_heading: false, show_root_toc_entry: false, members: [{', '.join(public(package))}]"
    # As a member a module is left out: so nothing stands for a function of that name.
    modules = [f"::: {name}.{module}" for module in public_modules(package)]
    return "\n\n".join([f"::: {name}\n    options: {{{options}}}", *modules])


def public_modules(package: str) -> list[str]:
    """Those of the public names that are modules: `from . import name`."""
    tree = ast.parse((folder_of(package) / "__init__.py").read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module is None]
    found = {alias.asname or alias.name for node in imports for alias in node.names}
    return [name for name in public(package) if name in found]


def on_page_content(html: str, page: Page, **_: Any) -> None:
    """Refuse a page of a technique on which a public name has no heading."""
    from mkdocs.exceptions import PluginError

    package = page.file.src_uri.removeprefix(PAGES).removesuffix(".md")
    if page.file.src_uri.startswith(PAGES) and package in packages() and (names := undocumented(html, package)):
        raise PluginError(f"{page.file.src_uri}: its API section lacks {', '.join(names)}")


def undocumented(html: str, package: str) -> list[str]:
    """The public names that have no heading on the page of their package."""
    headings = set(re.findall(r'<h\d id="([^"]+)"', html))
    return [name for name in public(package) if f"kernel_pytorch.{package.replace('-', '_')}.{name}" not in headings]


def public(package: str, module: str = "__init__") -> list[str]:
    """The names in `__all__` of a module; `*other.__all__` stands for those of another one."""
    places = folder_of(package) / f"{module}.py", folder_of(package) / module / "__init__.py"
    file = next(place for place in places if place.is_file())
    tree = ast.parse(file.read_text(encoding="utf-8"))
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    (listed,) = [node.value for node in assigned if ast.unparse(node.targets[0]) == "__all__"]
    names: list[str] = []
    for element in listed.elts if isinstance(listed, ast.List | ast.Tuple) else []:
        other = ast.unparse(element).removeprefix("*").removesuffix(".__all__")
        names += public(package, other) if isinstance(element, ast.Starred) else [ast.literal_eval(element)]
    return names


SECTIONS: dict[str, tuple[str, Callable[[str, str], str]]] = {
    "definition": ("The definition", definition),
    "ladder": ("The ladder", ladder),
    "support": ("Compatibility", support),
    "static": ("Compiled kernels", static),
    "results": ("Results", results),
    "api": ("API", api),
}
