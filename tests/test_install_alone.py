"""Each package, installed as a wheel with what it declares and nothing else, does what its README shows.

So does one that is installed from its source distribution: what is a link in the checkout is a folder there.

"Nothing else" is literal: the child process sees the wheel and links to the declared dependencies (and theirs). Triton,
pytest, the harness and the other packages are not hidden from it; they are not there.
"""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it

ROOT = Path(__file__).parent.parent
PROJECTS = [
    file.parent for file in [ROOT / "harness" / "pyproject.toml", *sorted(ROOT.glob("packages/*/pyproject.toml"))]
]
PROJECT_OF = {f"kernel-pytorch-{project.name}": project for project in PROJECTS}
# A CUDA build of torch declares it; a package may not need it all the same.
OPTIONAL = {"triton"}

CHILD = """
import sys
sys.path[:0] = {path!r}
import importlib
module = importlib.import_module({module!r})
assert module.__file__.startswith({path[0]!r}), module.__file__
for name in getattr(module, "__all__", []):
    getattr(module, name)
exec(compile({usage!r}, "README.md", "exec"), {{}})
present = {absent!r}.intersection(sys.modules)
assert not present, present
"""


def param(project):
    """Each takes seconds, and one that compiles a library minutes: one with a link stands for all, except with slow."""
    marks = [pytest.mark.slow] if project.name != "rmsnorm" else []
    return pytest.param(project, marks=marks, id=project.name)


@pytest.mark.parametrize("project", [*map(param, PROJECTS)])
def test_a_package_works_alone(project, tmp_path):
    pytest.importorskip("hatchling", reason="building a wheel needs hatchling")
    declared = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    needed = {project} | {PROJECT_OF[name] for name in dependencies(declared["dependencies"]) if name in PROJECT_OF}
    works_alone(project, needed, needed, tmp_path)


def test_a_package_works_alone_from_its_source_distribution(tmp_path):
    """One for all that have links: the smallest."""
    pytest.importorskip("hatchling", reason="building a source distribution needs hatchling")
    project = ROOT / "packages" / "rmsnorm"
    archive = source_distribution(project, tmp_path)
    with tarfile.open(archive) as members:
        found = {Path(*Path(member.name).parts[1:]): member.isfile() for member in members}
    core = [Path("src/kernel_pytorch/rmsnorm/_core", file.name) for file in (ROOT / "core").glob("*.py")]
    assert core
    assert all(found[path] for path in [*core, Path("LICENSE")])
    works_alone(project, {project}, {archive}, tmp_path)


def test_what_lacks_its_link_is_not_built(tmp_path):
    """As a checkout on a system without links."""
    pytest.importorskip("hatchling", reason="building a wheel needs hatchling")
    project = tmp_path / "rmsnorm"
    ignored = shutil.ignore_patterns("__pycache__", "_core")
    shutil.copytree(ROOT / "packages" / "rmsnorm", project, symlinks=True, ignore=ignored)
    done = build(project, "wheel", tmp_path)
    assert done.returncode == 1, done.stdout
    assert re.search(r"Forced include not found: .*kernel_pytorch/rmsnorm/_core/__init__\.py", done.stderr), done.stderr
    assert not list(tmp_path.glob("*.whl"))


def build(project: Path, target: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Build a wheel or a source distribution into a folder, by what is installed."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(folder)]
    return subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)


def source_distribution(project: Path, folder: Path) -> Path:
    """The archive."""
    done = build(project, "sdist", folder)
    assert done.returncode == 0, done.stderr
    (archive,) = folder.glob("*.tar.gz")
    return archive


def works_alone(project: Path, needed: set[Path], sources: set[Path], tmp_path: Path) -> None:
    """Install sources without their dependencies, and have a child process do what the README of a package shows.

    Args:
        project: the package.
        needed: the projects that are installed, itself included.
        sources: what is installed of them.
        tmp_path: for all of it.
    """
    declared = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    target, links = tmp_path / "package", tmp_path / "dependencies"
    links.mkdir()
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*install, "--target", target, *sources], check=True)
    for name in dependencies(declared["dependencies"]) - set(PROJECT_OF):
        link_distribution(name, links)
    absent = {"triton", "pytest", "kernel_pytorch.harness"} - {module_of(item) for item in needed}
    blocks = re.findall(r"^```python\n(.*?)^```", (project / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    usage = "\n".join(block for block in blocks if "transformers" not in block)  # whose models a package may take
    code = CHILD.format(path=[str(target), str(links)], module=module_of(project), usage=usage, absent=absent)
    child = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert child.returncode == 0, child.stderr


def module_of(project: Path) -> str:
    """What is imported of a package."""
    return f"kernel_pytorch.{project.name.replace('-', '_')}"


def dependencies(requirements: list[str]) -> set[str]:
    """Names of all distributions that these requirements bring, their own included."""
    found: set[str] = set()
    waiting = [(Requirement(text), "") for text in requirements]
    while waiting:
        requirement, extra = waiting.pop()
        name = requirement.name.lower()
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": extra})
        if not wanted or name in OPTIONAL or (name in found and not requirement.extras):
            continue
        found.add(name)
        for text in importlib.metadata.requires(name) or []:
            waiting.extend((Requirement(text), extra) for extra in {"", *requirement.extras})
    return found


def link_distribution(name: str, folder: Path) -> None:
    """Make one installed distribution importable from `folder`."""
    distribution = importlib.metadata.distribution(name)
    if distribution.files is None:
        pytest.skip(f"the installer of {name} left no list of its files, so it cannot be isolated")
    for top in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
        link = folder / top
        if not link.exists():
            link.symlink_to(distribution.locate_file(top))
