"""Every Python block of every page runs: each page in one namespace, from top to bottom.

Source that a page shows by inclusion is fenced as `{.python}`: it is not copied, and has tests of its own.
"""

import importlib.util
import re
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("harness/*.md"), *ROOT.glob("packages/*/*.md"), *ROOT.glob("docs/**/*.md")]
)
BLOCK = re.compile(r"^(?P<indent> *)```python[^\n]*\n(?P<code>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[int, str]]:
    """Line number and code of each Python block."""
    text = page.read_text(encoding="utf-8")
    return [
        (text.count("\n", 0, found.start("code")), textwrap.dedent(found["code"])) for found in BLOCK.finditer(text)
    ]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: str(page.relative_to(ROOT)))
def test_the_code_on_a_page_runs(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__page__"}
    for line, code in blocks(page):
        # The empty lines make a traceback point at the line of the page.
        exec(compile("\n" * line + code, str(page), "exec"), namespace)


def test_there_is_code_to_run():
    assert any(blocks(page) for page in PAGES)


def test_no_page_shows_lines_by_their_numbers():
    """Those move when the file is edited: a section of it is named, `[start:name]` to `[end:name]`."""
    numbered = [page for page in PAGES if re.search(r'--8<-- "[^"]*:\d', page.read_text(encoding="utf-8"))]
    assert not numbered


WRITTEN = sorted(ROOT.glob("docs/techniques/*.md"))
READMES = [*ROOT.glob("packages/*/README.md"), *ROOT.glob("template/packages/*/README.md")]
TECHNIQUES = [*WRITTEN, *(file for file in READMES if file.parent.name not in {page.stem for page in WRITTEN})]
SECTIONS = [
    "The idea",
    "How to use it",
    "When not to use it",
    "The definition",
    "The ladder",
    "The default",
    "How the kernels work",
    "Compatibility",
    "Compiled kernels",
    "Results",
    "API",
]


def technique_pages(root=ROOT):
    """docs/technique_pages.py, looking at a tree."""
    spec = importlib.util.spec_from_file_location("technique_pages", ROOT / "docs" / "technique_pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.ROOT = root
    return module


@pytest.mark.parametrize("page", TECHNIQUES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_pages_of_techniques_have_one_order(page):
    """Use comes before results, whose tables are long; chapters of a page's own stand where they like."""
    if page in WRITTEN:
        text = page.read_text(encoding="utf-8")
    else:
        made, package = technique_pages(page.parents[2]), page.parent.name
        text = made.complete(made.readme_as_page(package), package)
    headings = re.findall("^## (.*)", text, re.MULTILINE)
    assert [heading for heading in headings if heading in SECTIONS] == [s for s in SECTIONS if s in headings]
    assert {"The idea", "How to use it", "When not to use it", "Results", "API"} <= {*headings}


# How the page of a technique is put together.


@pytest.fixture
def pages(tmp_path):
    """docs/technique_pages.py, looking at a tree with one package that has just begun."""
    for file, text in PACKAGE.items():
        path = tmp_path / "packages" / "soft-cap" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return technique_pages(tmp_path)


SOURCE = "src/kernel_pytorch/soft_cap"
PACKAGE = {
    "pyproject.toml": '[project.entry-points."kernel_pytorch.techniques"]\nsoft-cap = "kernel_pytorch.soft_cap:t"',
    "README.md": "# kernel-pytorch-soft-cap\n\nKeeps logits small.\n\n## Use\n\nCall it.\n\n## Measured\n\n"
    "<!-- results:begin -->\n<!-- results:end -->\n",
    f"{SOURCE}/__init__.py": 'from . import modules\n\n__all__ = [*modules.__all__, "soft_cap"]\n',
    f"{SOURCE}/modules.py": '__all__ = ["SoftCap"]\n',
    f"{SOURCE}/levels/reference.py": '"""Soft-capping,\ndefined.\n\nMore."""\nCAP = 30.0\n',
    f"{SOURCE}/levels/native.py": '"""What PyTorch offers."""\n',
}
HEADINGS = [
    "The definition",
    "The ladder",
    "Compatibility",
    "Compiled kernels",
    "Results",
    "API",
]


def test_a_package_without_a_page_has_one_from_its_readme(pages):
    page = pages.complete(pages.readme_as_page("soft-cap"), "soft-cap")
    assert page.startswith("# soft-cap\n\nKeeps logits small.\n\n## Use\n\nCall it.")
    assert re.findall("^## (.*)", page, re.MULTILINE) == ["Use", *HEADINGS]
    assert "CAP = 30.0" in page
    assert (
        "| `reference` | `reference.py` | Soft-capping, defined. |\n| `native` | `native.py` | What PyTorch offers. |"
        in page
    )
    assert "Not measured yet: there is no `results/<device>/soft-cap.json`." in page
    assert "`kernel-pytorch support soft-cap --json results/<device>`" in page
    assert "It has no kernel of its own." in page
    assert "::: kernel_pytorch.soft_cap\n" in page
    assert "members: [SoftCap, soft_cap]" in page


def test_a_page_has_its_sections_where_it_wants_them_and_the_others_at_the_end(pages):
    page = pages.complete("# Soft cap\n\n<!-- ladder: soft-cap -->\n\nThat was it.\n", "soft-cap")
    assert page.index("| `native` |") < page.index("That was it.") < page.index("## The definition")
    assert re.findall("^## (.*)", page, re.MULTILINE) == [h for h in HEADINGS if h != "The ladder"]


def test_tables_and_plots_come_from_the_results(pages, tmp_path, monkeypatch):
    device = tmp_path / "results" / "toaster"
    for file in (
        "soft-cap.json",
        "support/soft-cap.json",
        "../static/soft-cap.kernels.json",
        "soft-cap-more-soft_cap.svg",
    ):
        (device / file).parent.mkdir(parents=True, exist_ok=True)
        (device / file).write_text(file)
    for name in ("soft_cap", "hard_cap"):
        (device / f"soft-cap-{name}.svg").write_text("<svg/>")
    (tmp_path / "packages" / "soft-cap" / SOURCE / "operators.py").write_text('"""One kernel."""')
    machine = SimpleNamespace(environment=SimpleNamespace(device_type="cpu"))
    monkeypatch.setattr(pages.measured, "load", lambda file: SimpleNamespace(machine=machine, text=file.read_text()))
    monkeypatch.setattr(pages.results_page, "markdown", lambda results: f"the table of {results.text}")
    monkeypatch.setattr(pages.static_record, "load", lambda file: file.read_text())
    monkeypatch.setattr(pages.static_table, "markdown", lambda record: f"the table of {record}")
    monkeypatch.setattr(pages, "discover", lambda: {"soft-cap": "the technique"})
    monkeypatch.setattr(pages, "recorded", lambda technique, results: [technique, results])
    monkeypatch.setattr(pages, "support_tables", lambda technique, records: f"the table of {technique}: {records}")
    page = pages.complete("# Soft cap\n", "soft-cap")
    of_support = f"the table of the technique: {['the technique', tmp_path / 'results']}"
    for table in ("the table of soft-cap.json", "the table of ../static/soft-cap.kernels.json", of_support):
        assert page.count(table) == 1
    pictures = (
        '??? example "Drawn: toaster"\n\n    ![hard_cap on toaster](../assets/results/toaster-soft-cap-hard_cap.svg'
    )
    assert page.index(pictures) < page.index("    ![soft_cap on toaster]") < page.index("the table of soft-cap.json")
    assert page.count("??? example") == 1
    assert page.count("![") == 2, "and not that of soft-cap-more"
    assert "| `triton` | `operators.py` | One kernel. |" in page


def test_a_package_of_groups_has_a_ladder_for_each(pages, tmp_path):
    folder = tmp_path / "packages" / "soft-cap" / SOURCE
    (folder / "hard").mkdir()
    (folder / "levels").rename(folder / "hard" / "levels")
    assert pages.ladder("soft-cap", "").startswith("**hard**\n\n| level |")
    assert pages.ladder("soft-cap", "hard").startswith("| level |")
    assert pages.ladder("soft-cap", "hard").count("`reference`") == 1


def test_a_public_name_without_a_heading_is_named(pages):
    headings = '<h3 id="kernel_pytorch.soft_cap.SoftCap" class="doc">', '<h3 id="kernel_pytorch.soft_cap.soft_cap">'
    assert pages.undocumented("".join(headings), "soft-cap") == []
    of_a_module = '<h4 id="kernel_pytorch.soft_cap.soft_cap.soft_cap">'
    assert pages.undocumented(headings[0] + of_a_module, "soft-cap") == ["soft_cap"]


def test_a_public_module_is_asked_for_by_itself(pages, tmp_path):
    package = tmp_path / "packages" / "soft-cap" / SOURCE / "__init__.py"
    package.write_text('from . import levels\nfrom .soft_cap import soft_cap\n\n__all__ = ["levels", "soft_cap"]\n')
    assert pages.api("soft-cap", "").endswith("members: [levels, soft_cap]}\n\n::: kernel_pytorch.soft_cap.levels")


# The guide.

GUIDE = sorted(ROOT.glob("docs/guide/*.md"))


@pytest.mark.parametrize("page", GUIDE, ids=lambda page: page.stem)
def test_a_page_of_the_guide_is_short_and_says_first_what_it_is_for(page):
    text = page.read_text(encoding="utf-8")
    assert text.split("\n\n")[1].startswith("After this page you can ")
    assert len(text.split()) <= 1200


@pytest.fixture(scope="module")
def recipes_page():
    """docs/recipes_page.py."""
    spec = importlib.util.spec_from_file_location("recipes_page", ROOT / "docs" / "recipes_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_guide_shows_a_run_of_doctor(recipes_page):
    page = (ROOT / "docs" / recipes_page.DOCTOR).read_text(encoding="utf-8")
    shown = recipes_page.with_doctor(page)
    assert "1. models.py:13  graph break: Data-dependent branching" in shown
    assert recipes_page.with_doctor("no marker") == "no marker"
    assert "models.py:13" in recipes_page.diagnosed(page)[1]
    assert "/tmp" not in recipes_page.diagnosed(page)[1]


def test_the_guide_has_every_recipe(recipes_page):
    text = recipes_page.page()
    for name, recipe in recipes_page.catalogue().items():
        assert f"## {recipe.title} {{#{name}}}\n" in text
        assert f"| [`{name}`](#{name}) |" in text
    assert text.count("``` {.python}\nclass After(Same)") == len(recipes_page.catalogue())
