"""The template: what it makes works at once, changes nothing else, and bad names are refused with the reason."""

from __future__ import annotations

import re
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from kernel_pytorch.harness.commands import new

ROOT = Path(__file__).parent.parent
# The shortest and the longest names, and one on either side of `harness`, where it is imported beside it.
NAMES = ["qk", "a-name-that-is-28-characters", "manynamesareoneandthesameone", "attention-k4", "my-technique"]
PARAMETERS = ["a", "twelveletter"]


def test_the_package_is_all_that_is_made(copy):
    before = copy.files()
    done = copy.make("logit-softcap", "--parameter", "softcap")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    after = copy.files()
    made = set(after) - set(before)
    assert {path.parts[:2] for path in made} == {("packages", "logit-softcap")}
    assert {path: after[path] for path in before} == before
    assert f"packages/logit-softcap: {len(made)} files and a link to core/," in done.stdout
    commands = done.stdout.partition("Next:\n")[2].splitlines()
    assert len(commands) == 3
    assert all(command.startswith("  .venv/bin/nox -s ") for command in commands)
    left = re.compile(r"my-technique|my_technique|MyTechnique|My technique|(?<!\\)beta")
    assert not [path for path in made if left.search(f"{path}\n{after[path].decode()}")]


def test_the_template_makes_itself(copy):
    """What is linted and tested in template/ is, byte for byte, what a contributor gets."""
    copy.make("my-technique")
    for path in new.template(ROOT):
        source = ROOT / ("LICENSE" if path.name == "LICENSE" else "template" / path)
        assert (copy.root / path).read_bytes() == source.read_bytes()


def test_the_package_has_a_link_to_what_all_share(copy):
    copy.make("logit-softcap")
    link = copy.root / "packages" / "logit-softcap" / "src" / "kernel_pytorch" / "logit_softcap" / "_core"
    assert link.is_symlink()
    assert link.resolve() == copy.root.resolve() / "core"
    assert link.readlink() == (ROOT / "packages/rmsnorm/src/kernel_pytorch/rmsnorm/_core").readlink()


def test_what_tools_leave_in_the_template_is_not_copied(tmp_path):
    package = tmp_path / "template" / "packages" / "my-technique"
    for name in ("src/my.egg-info/PKG-INFO", ".pytest_cache/CACHE", "src/__pycache__/a.pyc", "README.md"):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text("")
    (tmp_path / "LICENSE").touch()
    assert [path.name for path in new.template(tmp_path)] == ["README.md", "LICENSE"]


BAD = {
    (): "no name; give one, in kebab-case: `.venv/bin/nox -s new -- my-technique`",
    ("one", "two"): "given 2 names; give one",
    ("",): "name '' is not kebab-case",
    ("My-Technique",): "name 'My-Technique' is not kebab-case",
    ("my_technique",): "name 'my_technique' is not kebab-case",
    ("my--technique",): "name 'my--technique' is not kebab-case",
    ("3d-conv",): "name '3d-conv' is not kebab-case",
    ("../outside",): "name '../outside' is not kebab-case",
    ("name\n",): r"name 'name\n' is not kebab-case",
    ("größe",): "name 'größe' is not kebab-case",
    ("x",): "name 'x' has 1 letters; allowed are 2 to 28",
    ("a" * 29,): f"name '{'a' * 29}' has 29 letters; allowed are 2 to 28",
    ("lambda",): "name 'lambda' is a keyword of Python",
    ("match",): "name 'match' is a keyword of Python",
    ("harness",): "name 'harness' is taken: kernel_pytorch.harness is the harness",
    ("rmsnorm",): "name 'rmsnorm' is taken: there is packages/rmsnorm; choose another",
    ("page-alone",): "name 'page-alone' is taken: there is docs/techniques/page-alone.md",
    ("import-alone",): "name 'import-alone' is taken: there is packages/rmsnorm/src/kernel_pytorch/import_alone",
    ("native",): "name 'native' would hide what the template's own code calls 'native'",
    ("tensor",): "name 'tensor' would hide what the template's own code calls",
    ("fine", "--parameter"): "parameter '' is not allowed",
    ("fine", "--parameters", "a"): "given 3 names; give one",
    ("fine", "--parameter", "Alpha"): "parameter 'Alpha' is not allowed: up to 12 small letters",
    ("fine", "--parameter", "lambda"): "parameter 'lambda' is not allowed",
    ("fine", "--parameter", "a" * 13): f"parameter '{'a' * 13}' is not allowed",
    ("fine", "--parameter", "level"): "parameter 'level' is a name in the package's own code; choose another",
    ("fine", "--parameter", "fine"): "parameter 'fine' is a name in the package's own code; choose another",
}


@pytest.mark.parametrize("arguments", BAD, ids=lambda arguments: " ".join(map(repr, arguments)) or "none")
def test_a_bad_name_is_refused_with_the_reason(arguments, tmp_path, monkeypatch, capsys):
    for name in ("template", "LICENSE"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "docs" / "techniques").mkdir(parents=True)
    (tmp_path / "docs" / "techniques" / "page-alone.md").touch()
    (tmp_path / "packages" / "rmsnorm" / "src" / "kernel_pytorch" / "import_alone").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path / "docs")
    with pytest.raises(SystemExit) as stopped:
        new.main(arguments)
    printed = capsys.readouterr()
    assert (stopped.value.code, printed.out) == (2, "")
    assert printed.err.startswith(f"kernel-pytorch: {BAD[arguments]}")
    assert printed.err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_a_name_of_the_standard_library_is_nobody_elses(tmp_path):
    new.check_name("queue", ROOT)


def test_outside_a_checkout_that_is_said(tmp_path):
    with pytest.raises(new.NewError, match=r"no template/ in .* run it inside a clone"):
        new.checkout(Path(tmp_path.anchor))  # nox puts temporary folders into the checkout


@pytest.mark.parametrize("parameter", PARAMETERS)
@pytest.mark.parametrize("name", NAMES)
def test_what_is_made_is_formatted_whatever_the_name(name, parameter, copy):
    if not find_spec("ruff"):
        pytest.skip("ruff is not installed; `nox -s lint` asks it about the template itself")
    assert copy.make(name, "--parameter", parameter).returncode == 0
    for command in (["format", "--check"], ["check", "--no-cache"]):
        done = copy.run(sys.executable, "-m", "ruff", *command, f"packages/{name}")
        assert done.returncode == 0, done.stdout


def test_imports_are_in_order_again():
    lines = "from kernel_pytorch.harness import b\nfrom kernel_pytorch.my_technique import a\n"
    assert new.render(lines, "zoom") == lines.replace("my_technique", "zoom")
    assert new.render(lines, "attention").splitlines()[0] == "from kernel_pytorch.attention import a"


def unlinked(root: Path) -> list[Path]:
    """The packages of a checkout, the template's among them, that use what all share and have no link to it."""
    packages = [*sorted(root.glob("packages/*/src/kernel_pytorch/*")), root / "template" / new.LINK.parent]
    packages = [p for p in packages if any("_core" in file.read_text() for file in p.glob("**/*.py"))]
    links = [package / "_core" for package in packages]
    return [link for link in links if not link.is_symlink() or link.resolve() != (root / "core").resolve()]


def test_what_packages_share_is_one_folder():
    assert (ROOT / "core" / "__init__.py").is_file()
    assert unlinked(ROOT) == []


def test_a_copy_in_the_place_of_a_link_is_found(copy):
    (copied, other, missing, *_) = sorted(copy.root.glob("packages/*/src/kernel_pytorch/*/_core"))
    for link in (copied, other, missing):
        link.unlink()
    shutil.copytree(copy.root / "core", copied)
    other.symlink_to(ROOT / "core")
    assert unlinked(copy.root) == [copied, other, missing]


@pytest.fixture
def made(copy):
    """A copy of the checkout with a package that was just made, on the path."""
    assert copy.make("new-thing").returncode == 0
    copy.install("new-thing")
    return copy


LEVELS = Path("packages/new-thing/src/kernel_pytorch/new_thing/levels")


def verify(copy, *levels):
    """Hold levels of the package against its reference."""
    chosen = [argument for level in levels for argument in ("--level", level)]
    return copy.kernel_pytorch("verify", "new-thing", "--device", "cpu", *chosen)


def plant_wrong_native(copy):
    """Write a level that is one percent too large, in the place of the definition."""
    (copy.root / LEVELS / "native.py").write_text(
        "from kernel_pytorch.new_thing.levels import reference\n\n\n"
        "def new_thing(x, beta):\n    return 1.01 * reference.new_thing(x, beta)\n"
    )


@pytest.mark.slow
def test_what_is_made_is_right_and_a_wrong_level_is_refused(made):
    done = verify(made, "reference", "native")
    assert done.returncode == 0, done.stdout
    plant_wrong_native(made)
    done = verify(made, "native")
    assert done.returncode == 1, done.stdout
    assert "wrong: new-thing new_thing level 'native', case typical" in done.stdout
    # Where the definition itself is wrong, all levels agree on it: what was computed by hand does not.
    definition = made.root / LEVELS / "reference.py"
    definition.write_text(definition.read_text().replace("torch.sigmoid(beta * h)", "torch.sigmoid(beta + h)"))
    done = verify(made, "reference")
    assert done.returncode == 1, done.stdout
    assert done.stdout.count("wrong: ") == 1
    assert "wrong: new-thing new_thing level 'reference', case typical [shape=(61, 96)] float32: known" in done.stdout


@pytest.mark.slow
def test_what_is_made_is_found_and_does_what_it_shows(made):
    done = made.kernel_pytorch("list", "new-thing", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("new-thing: New thing "), done.stdout
    assert not [line for line in done.stdout.splitlines() if "cannot run" in line and "compile" not in line]
    readme = (made.root / "packages/new-thing/README.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    done = made.run(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_what_is_made_passes_everything(made):
    done = verify(made)
    assert done.returncode == 0, done.stdout
    done = made.pytest("packages/new-thing/tests")
    assert done.returncode == 0, done.stdout
    assert " failed" not in done.stdout
    done = made.kernel_pytorch("static", "new-thing")
    assert done.returncode == 0, done.stdout + done.stderr
    plant_wrong_native(made)
    done = made.pytest("packages/new-thing/tests/test_levels.py", "-k", "native")
    assert done.returncode == 1, done.stdout
