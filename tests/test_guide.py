"""The guide: its glossary, its tables of what was measured, and that the site shows each of its pages."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
GUIDE = ROOT / "docs" / "guide"
GLOSSARY = GUIDE / "glossary.md"
TERM = re.compile(r"^\*\*(.+)\*\*\n:   (.+(?:\n    .+)*)", re.MULTILINE)


@pytest.fixture
def tables(monkeypatch):
    """docs/guide_tables.py."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    sys.modules.pop("guide_tables", None)
    import guide_tables

    return guide_tables


def test_the_glossary_is_sorted_and_short_and_has_no_term_that_the_site_does_not_use():
    terms = dict(TERM.findall(GLOSSARY.read_text(encoding="utf-8")))
    assert len(terms) >= 40
    assert list(terms) == sorted(terms, key=str.casefold)
    pages = [page for page in ROOT.glob("docs/**/*.md") if page != GLOSSARY]
    text = re.sub(r"\s+", " ", " ".join(page.read_text(encoding="utf-8") for page in pages)).casefold()
    assert [term for term in terms if term.casefold() not in text] == []
    for term, meaning in terms.items():
        sentences = re.sub(r"\[.*?\]\(.*?\)", "", " ".join(meaning.split()))
        assert len(re.findall(r"\.(?: |$)", sentences.strip())) <= 2, term


def test_every_page_of_the_guide_is_in_the_navigation():
    listed = re.findall(r"guide/([\w-]+)\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    made = {"patterns"}  # by docs/recipes_page.py
    assert sorted(listed) == sorted({page.stem for page in GUIDE.glob("*.md")} | made)


def test_pages_have_the_tables_that_they_ask_for(tables):
    for page in GUIDE.glob("*.md"):
        filled = tables.fill(page.read_text(encoding="utf-8"))
        asked = set(re.findall("<!-- ([\\w-]+) -->", filled))
        assert asked <= {"doctor"}, "no hook knows it"
    assert tables.fill("as it is") == "as it is"


def test_ceilings_are_of_every_device_with_its_date(tables):
    lines = tables.ceilings().splitlines()
    devices = {file.parent.name for file in ROOT.glob("results/*/rmsnorm.json")}
    assert len(lines) - 2 >= len(devices) > 1
    assert all(line.count("|") == lines[0].count("|") for line in lines)
    (h200,) = [line for line in lines if "NVIDIA H200" in line]
    assert re.search(r"torch 2\.\d+\S*, 20\d\d-\d\d-\d\d", h200)
    copy, cached, product, single = (float(cell) for cell in h200.split("|")[2:6])
    assert copy < 4.8 < cached, "the data sheet's bandwidth lies between memory and cache"
    assert single < product < 989, "dense bf16 of the data sheet"


def test_the_kernels_of_both_levels_are_compared(tables):
    text = tables.triton_and_cuda()
    assert text.startswith("NVIDIA H200, torch")
    assert "| case | `native` | `compile` | `triton` | `cuda` |" in text
    assert re.search(r"\| Llama 3.1 8B, prefill 2048 .* µs \|", text)
    assert re.search(r"\| CUDA \| \d+ to \d+ \| \d+, in `csrc/", text)
    assert len(tables.tuned().splitlines()) >= 4


def test_the_deployment_page_has_the_figures_of_its_example(tables):
    page = tables.fill((GUIDE / "deployment.md").read_text(encoding="utf-8"))
    assert re.search(r"> To the first answer of a fresh process: .* eager\.\n>\n> .*, torch 2\S+, 20\d\d-", page)


def test_what_was_not_measured_is_not_there(tables, monkeypatch, tmp_path):
    for name in ("ROOT", "DEVICE"):
        monkeypatch.setattr(tables, name, tmp_path)
    assert len(tables.ceilings().splitlines()) == len(tables.tuned().splitlines()) == 2
    assert tables.triton_and_cuda().startswith("Not measured yet: there is no ")
    assert tables.served() == "Not measured yet."


# The pages of examples.

SCRIPT = '''"""Do one thing.

    python examples/one_thing.py
"""

from x import y

# %% First
# Why it is
# done.
a = 1
# a comment of the code


# %% Second
# --8<-- [start:two]
def two():
    return 2
    # --8<-- [end:two]
'''
EXAMPLE = """# One thing

Do one thing.

    python examples/one_thing.py

The whole script is `examples/one_thing.py`.

``` {.python}
from x import y
```

## First

Why it is
done.

``` {.python}
a = 1
# a comment of the code
```

## Second

``` {.python}
def two():
    return 2
```
"""


@pytest.fixture
def examples(monkeypatch):
    """docs/examples_pages.py."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import examples_pages

    return examples_pages


def test_a_script_becomes_a_page(examples):
    assert examples.page("one_thing", SCRIPT) == EXAMPLE


def test_every_example_has_a_page_with_all_of_its_code(examples):
    assert len(examples.scripts()) >= 4
    for script in examples.scripts():
        source = script.read_text(encoding="utf-8")
        text = examples.page(script.stem, source)
        code = "\n".join(re.findall(r"^``` {.python}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
        compile(code, str(script), "exec")
        assert re.findall(r"^(?:def|class) (\w+)", code, re.MULTILINE) == re.findall(
            r"^(?:def|class) (\w+)", source, re.MULTILINE
        )
        assert text.count("\n## ") == len(re.findall("^# %%", source, re.MULTILINE))
        assert "--8<--" not in text
