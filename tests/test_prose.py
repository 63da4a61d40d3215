"""Prose gives reasons, generated tables give numbers: no measured number is typed into a page or a docstring.

Comments and docstrings are plain English: the actor of a sentence is named.
"""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),  # the changelog is history, and keeps its numbers
        *(page for folder in ("csrc", "harness") for page in ROOT.glob(f"{folder}/*.md")),
        *(page for folder in ("docs", "packages", "template") for page in ROOT.glob(f"{folder}/**/*.md")),
    ]
)
RENDERED = sorted(
    [
        *ROOT.glob("harness/src/kernel_pytorch/harness/[!_]*.py"),
        *(path for path in ROOT.glob("packages/*/src/kernel_pytorch/**/*.py") if "kernels" not in path.parts),
    ]
)
"""Modules whose docstrings are shown on the site."""

TIME = r"[nµum]s\b|(?:micro|milli|nano)?seconds?\b|minutes?\b"
UNIT = rf"x(?![\w.])| ?(?:%|times\b|{TIME}|[MGT]i?B(?:/s)?\b|TFLOP/s|[MG]Hz)"
NUMBER = re.compile(rf"(?<![\w.-])(?:\d[\d.,]*(?:{UNIT})|0\.\d\d+)")
"""A number with a unit of measurement, or a ratio with two digits."""

ALLOWED = {
    r"99 ?% interval|99 % of the resulting medians|band of 2\s% that": "definitions of the interval and its verdict",
    r"below some 100 microseconds": "definition: longer kernels are measured otherwise",
    r"64 MiB": "definition: the size of a chunk of logits",
    r"2 MB in float32": "arithmetic: bytes of a gradient of a given shape",
    r"10,000 times|20 times as much": "definitions of inputs for tests",
}
"""Phrases with numbers that are no measurements, and why."""

CODE = re.compile(r"^(?P<indent> *)(?P<fence>`{3,}).*?^(?P=indent)(?P=fence)$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
GENERATED = re.compile(r"<!-- (\w+):begin -->.*?<!-- \1:end -->", re.DOTALL)


def prose(text: str) -> str:
    """A text without its code and its generated parts."""
    return GENERATED.sub("", CODE.sub("", text))


def measured(text: str) -> list[str]:
    """The numbers in prose that look like measurements."""
    text = re.sub(r"\s+", " ", prose(text))
    return NUMBER.findall(re.sub("|".join(ALLOWED), "", text, flags=re.IGNORECASE))


def docstrings(path: Path) -> str:
    """The docstrings of a module and of everything in it."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, documented)]
    return "\n\n".join(ast.get_docstring(node) or "" for node in nodes)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_page_has_a_measured_number_in_its_prose(page):
    assert measured(page.read_text("utf-8")) == []


def test_no_rendered_docstring_has_a_measured_number():
    found = {str(path.relative_to(ROOT)): measured(docstrings(path)) for path in RENDERED}
    assert {path: numbers for path, numbers in found.items() if numbers} == {}


def test_every_exception_is_needed():
    texts = [page.read_text("utf-8") for page in PAGES] + [docstrings(path) for path in RENDERED]
    whole = re.sub(r"\s+", " ", " ".join(map(prose, texts)))
    for phrase in "|".join(ALLOWED).split("|"):
        found = re.search(phrase, whole, re.IGNORECASE)
        assert found, f"no longer there: {phrase}"
        assert NUMBER.search(found[0]), f"would not be found anyway: {phrase}"


@pytest.mark.parametrize(
    "text",
    ["1.06 to 1.4x over", "2.4 times as fast", "took 12 % longer", "from 6.3 to 3.9 microseconds", "79 µs a call",
     "5 ms", "at 3.9 TB/s", "442 MiB", "0.84 of a copy", "| 0.94 | |"],
)  # fmt: skip
def test_a_measured_number_is_found(text):
    assert measured(text)


@pytest.mark.parametrize(
    "text",
    ["tiles of 128 x 256", "torch 2.13.0", "`dropout_p=0.15`", "capability 9.0", "at most 80 lines", "softcap=30.0",
     "```text\n3.4 ms\n```\n", "<!-- results:begin -->\n3.4 ms, 2.0x\n<!-- results:end -->", "48 KiB of shared memory"],
)  # fmt: skip
def test_what_is_no_measurement_is_left_alone(text):
    assert not measured(text)


VAGUE = re.compile(
    r"(?:^|[.:!?] +)Of (?!course)|(?i:\b(?:nobody|whoever|somebody|alike|likewise|as many as)\b"
    r"|\bstands?\b(?!-| in\b| for\b)|\b(?:is|are) (?:told|asked)\b|\bof (?:its|their|one's|his) own\b)"
)
"""Phrases that hide the actor of a sentence, or that a reader has to translate."""


def said(path: Path) -> list[str]:
    """The lines of the comments and docstrings of a file of Python, C++ or CUDA."""
    if path.suffix != ".py":
        return re.findall(r"//[ \t]*(.*)", path.read_text("utf-8"))
    found = []
    for token in tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline):
        if token.type == tokenize.COMMENT:
            found.append(token.string.lstrip("# "))
        elif token.type == tokenize.STRING and token.string.lstrip("rRuU").startswith('"""'):
            found += [line.strip() for line in token.string.lstrip("rRuU").strip('"').splitlines()]
    return found


def test_comments_and_docstrings_name_the_actor():
    folders = "core", "harness/src", "packages/*/src", "docs", "examples", "tools", "template"
    files = [file for folder in folders for file in ROOT.glob(f"{folder}/**/*.py") if "tests" not in file.parts]
    assert len(files) > 400
    kernels = [file for file in ROOT.glob("csrc/**/*") if file.suffix in (".h", ".cuh", ".cpp", ".cu")]
    assert len(kernels) > 100
    files += kernels
    assert not [f"{f.relative_to(ROOT)}: {line}" for f in sorted(files) for line in said(f) if VAGUE.search(line)]


@pytest.mark.parametrize(
    "text", ["Of each row.", "It is told so.", "a kernel of its own", "Whoever looks", "where nobody looks"]
)
def test_a_vague_sentence_is_found(text):
    assert VAGUE.search(text)
