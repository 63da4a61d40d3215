"""The page for a first technique, followed to the letter in a copy of the checkout.

Commands run as they are printed, with these differences. Nothing is fetched: where the page calls nox, what its session
runs is run in the present environment, with the new package put on the path instead of installed, and the line that
installs nox itself is left out. Tests run in one process. Linters and mkdocs take part where
they are there. Lines that the page leaves out (`...`) are not compared, nor are figures that a machine decides.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import pytest

from kernel_pytorch.harness.commands import new

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "contributing" / "first-technique.md"
NAME = "logit-softcap"
FENCE = re.compile(r"^``` ?(?P<info>[^\n]+)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
TITLE = re.compile(r'\{\.(\w+) title="([^"]+)"\}')
INSTALLS_NOX = "python3 -m venv .venv && .venv/bin/pip install -q nox"
# Times, shares, errors, and counts that a version of torch or Triton may change.
MEASURED = re.compile(
    r"[\d.,]+(e-\d+)?( ?(s|ms|µs|ns)\b| ?%| (passed|skipped|compilations|known|distinct|where|is allowed)\b)"
    r"|\((got|truth) [^)]*\)|-?[\d.]+ of [\d.]+ elements"
)


class Step(NamedTuple):
    """A command of the page, with what it is said to print."""

    command: str
    expected: str


class File(NamedTuple):
    """A file of the page: as a whole, or as a change."""

    kind: str
    path: Path
    body: str


def steps(page: str) -> Iterator[Step | File]:
    """What there is to do, in order."""
    fences = [(found["info"], found["body"]) for found in FENCE.finditer(page)]
    for (info, body), following in zip(fences, [*fences[1:], ("", "")], strict=True):
        if title := TITLE.fullmatch(info):
            yield File(title[1], Path(title[2]), body)
        elif info == "bash":
            *before, last = body.splitlines()
            yield from (Step(command, "...") for command in before)
            yield Step(last, following[1] if following[0] == "text" else "...")


def apply(file: File, root: Path) -> None:
    """Write a file, or make the change: what goes out must stand there once."""
    target = root / file.path
    if file.kind != "diff":
        target.write_text(file.body)
        return
    text = target.read_text()
    for hunk in re.split(r"^@@\n", file.body, flags=re.MULTILINE):
        lines = hunk.splitlines(keepends=True)
        assert all(line[0] in " +-" for line in lines), hunk
        before = "".join(line[1:] for line in lines if line[0] != "+")
        after = "".join(line[1:] for line in lines if line[0] != "-")
        assert text.count(before) == 1, f"{file.path}: stands there {text.count(before)} times:\n{before}"
        text = text.replace(before, after)
    target.write_text(text)


def run(command: str, copy) -> subprocess.CompletedProcess[str]:
    """Run a command of the page; see the top of this file for what differs."""
    if command.startswith(".nox/tests/bin/kernel-pytorch "):
        return copy.kernel_pytorch(*shlex.split(command)[1:])
    nox = re.fullmatch(r"\.venv/bin/nox -s (?P<sessions>[\w ]+?)(?: -- (?P<arguments>.*))?", command)
    if nox is None:
        return copy.run("bash", "-c", command)
    arguments = shlex.split(nox["arguments"] or "")
    for session in nox["sessions"].split():
        done = SESSIONS[session](copy, *arguments)
        if done.returncode:
            break
    return done


def make(copy, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`nox -s new`, and what the next session would do first: install what was made."""
    done = copy.make(*arguments)
    copy.install(NAME)
    return done


def bench(copy, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Measure."""
    return copy.kernel_pytorch("bench", *arguments)


def lint(copy) -> subprocess.CompletedProcess[str]:
    """Format, style and types, as far as the tools are there."""
    done = copy.run(sys.executable, "-c", "")
    tools = {
        "ruff": [["format", "--check", f"packages/{NAME}"], ["check", f"packages/{NAME}"]],
        "mypy": [[f"packages/{NAME}/src"]],
    }
    for tool, calls in tools.items():
        for arguments in calls:
            if find_spec(tool) and not done.returncode:
                done = copy.run(sys.executable, "-m", tool, *arguments)
    return done


def docs(copy) -> subprocess.CompletedProcess[str]:
    """The site, where mkdocs is there."""
    there = find_spec("mkdocs") and find_spec("material") and find_spec("mkdocstrings")
    return copy.run(sys.executable, *(["-m", "mkdocs", "build", "--strict", "--quiet"] if there else ["-c", ""]))


SESSIONS = {
    "new": make,
    "tests": lambda copy, *arguments: copy.pytest(*arguments),
    "bench": bench,
    "static": lambda copy, *arguments: copy.kernel_pytorch("static", *(arguments or [NAME])),
    "lint": lint,
    "docs": docs,
}


def masked(line: str) -> str:
    """A line without what depends on the machine, and without the room that this takes in a table."""
    # pytest adds the minutes to what takes longer than one, and fills the terminal's width.
    line = re.sub(r"={2,}", "=", re.sub(r" \(\d+:\d\d:\d\d\)(?= =|$)", "", line))
    return re.sub(r"\s+", " ", MEASURED.sub("#", line)).strip()


def difference(printed: str, expected: str) -> str:
    """The first line that the page has and the command has not printed there; empty if there is none."""
    lines = [masked(line) for line in printed.splitlines()]
    place, may_skip = 0, False
    for line in map(masked, expected.splitlines()):
        if line == "...":
            may_skip = True
            continue
        found = lines.index(line, place) if line in lines[place:] else None
        if found is None or (found > place and not may_skip):
            return line
        place, may_skip = found + 1, False
    return "" if may_skip or place == len(lines) else f"nothing, but there is: {lines[place]}"


def outside(path: Path) -> bool:
    """Whether a file is neither of the package nor of its results."""
    return not path.as_posix().startswith((f"packages/{NAME}/", "results/"))


@pytest.mark.slow
def test_the_page_does_what_it_says(copy, monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # the page shows what a CPU prints
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("MYPYPATH", f"harness/src:packages/{NAME}/src")
    before = copy.files()
    for step in steps(PAGE.read_text()):
        if isinstance(step, File):
            apply(step, copy.root)
        elif step.command != INSTALLS_NOX:
            done = run(step.command, copy)
            report = f"$ {step.command}\n{done.stdout}\n{done.stderr}"
            # Only what is shown to be wrong may end so.
            assert done.returncode == int("E AssertionError: " in step.expected), report
            assert not (missing := difference(done.stdout, step.expected)), f"not printed: {missing}\n{report}"
    after = copy.files()
    assert {
        path for path in before.keys() | after.keys() if before.get(path) != after.get(path) and outside(path)
    } == set()


FILES = ["levels/reference.py", "functional.py", "technique.py", "kernels.py", "operators.py", "README.md"]
COMMANDS = ["new", "tests", "bench", "lint static docs"]


def test_the_page_is_six_files_and_four_commands():
    page = PAGE.read_text()
    found = list(steps(page))
    files = {step.path.as_posix() for step in found if isinstance(step, File)}
    assert len(files) == len(FILES)
    assert all(any(path.endswith(f"/{name}") for path in files) for name in FILES)
    first, *commands = [step.command for step in found if isinstance(step, Step)]
    assert first == INSTALLS_NOX
    told = [re.match(r"\.venv/bin/nox -s ([\w ]+?)(?: -- |$)", command) for command in commands]
    assert list(dict.fromkeys(name[1] for name in told if name)) == COMMANDS
    assert "six files, four commands" in page
    for command, name in zip(commands, told, strict=True):
        before = page.partition(f"```bash\n{command}")[0].rstrip().rpartition("\n\n")[2]
        assert (name is None) == before.startswith("*Optional, to see it:*"), command
    assert page.count("```") == 2 * len(FENCE.findall(page))


def test_what_the_page_says_of_a_stock_module_works(copy):
    """The file that it shows, in the package that the template makes."""
    (text,) = [found["body"] for found in FENCE.finditer(PAGE.read_text()) if found["info"] == "{.python}"]
    copy.make("my-technique")
    copy.install("my-technique")
    (copy.root / "packages/my-technique/src/kernel_pytorch/my_technique/replacements.py").write_text(text)
    done = copy.run(sys.executable, "-c", PATCHES)
    assert done.returncode == 0, done.stderr


PATCHES = """
import torch
from kernel_pytorch.my_technique.replacements import patch, unpatch
model = torch.nn.Sequential(torch.nn.SiLU(), torch.nn.SiLU(inplace=True), torch.nn.ReLU())
x = torch.randn(5, 8)
stock = model(x.clone())
report = patch(model)
assert report.replaced == {"0": "my_technique"}, report
assert report.left == {"1": "it writes into its input, which this package never does"}, report
torch.testing.assert_close(model(x.clone()), stock)
unpatch(model)
assert all("forward" not in vars(module) for module in model.modules())
"""


def test_contributing_counts_the_steps_and_files_of_the_page():
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("## A new technique")[2].partition("\n## ")[0]
    files = {step.path for step in steps(PAGE.read_text()) if isinstance(step, File)}
    made = {new.render_path(path, NAME) for path in new.template(ROOT)}
    told = re.search(r"you edit (\d+) of the (\d+) files and add (\d+)", section)
    assert [int(count) for count in told.groups()] == [len(files & made), len(made), len(files - made)]
    assert f"{len(made)} files, of a technique" in section
    for path in files:
        assert re.search(rf"[`/]{re.escape(path.name)}`", section), path
    numbered = re.findall(r"^(\d+)\. ", section, flags=re.MULTILINE)
    assert int(re.search(r"it is (\d+) steps", section)[1]) == len(numbered) == int(numbered[-1])


PRINTED = "made\n│ triton │ 26 of 26 │  67% │\nin 27 s\n"


@pytest.mark.parametrize(
    ("expected", "missing"),
    [
        (PRINTED, ""),
        ("made\n...\nin 3.5 s", ""),
        ("...\n│ triton │ 26 of 26 │ 9% │\n...", ""),
        ("...", ""),
        ("...\nin 87.46s (0:01:27)", ""),
        ("made\n...\n== in 87.46s (0:01:27) ==", "= in # ="),
        ("...\n│ triton │ 25 of 26 │ 67% │\n...", "│ triton │ 25 of 26 │ # │"),
        ("made\nin 27 s", "in #"),
        ("in 27 s\n...", "in #"),
        ("made\n...\nmade", "made"),
        ("made", "nothing, but there is: │ triton │ 26 of 26 │ # │"),
    ],
)
def test_what_is_not_printed_is_found(expected, missing):
    assert difference(PRINTED, expected) == missing


def test_a_change_that_does_not_fit_is_found(tmp_path):
    (tmp_path / "file").write_text("one\ntwo\ntwo\n")
    apply(File("diff", Path("file"), " one\n-two\n+three\n"), tmp_path)
    assert (tmp_path / "file").read_text() == "one\nthree\ntwo\n"
    with pytest.raises(AssertionError, match="stands there 0 times"):
        apply(File("diff", Path("file"), "-four\n"), tmp_path)
