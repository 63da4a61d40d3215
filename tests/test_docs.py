"""Every Python block of every page runs: each page in one namespace, from top to bottom.

Source that a page shows by inclusion is fenced as `{.python}`: it is not copied, and has tests of its own.
"""

import re
import textwrap
from pathlib import Path

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
