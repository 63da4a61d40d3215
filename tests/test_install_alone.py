"""Each package, installed as a wheel with what it declares and nothing else, does what its README shows.

"Nothing else" is literal: the child process sees the wheel and links to the declared dependencies (and theirs). Triton,
pytest, the harness and the other packages are not hidden from it; they are not there.
"""

import importlib.metadata
import re
import subprocess
import sys
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


@pytest.mark.parametrize("project", PROJECTS, ids=lambda project: project.name)
def test_a_package_works_alone(project, tmp_path):
    pytest.importorskip("hatchling", reason="building a wheel needs hatchling")
    declared = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    target, links = tmp_path / "package", tmp_path / "dependencies"
    links.mkdir()
    needed = {project} | {PROJECT_OF[name] for name in dependencies(declared["dependencies"]) if name in PROJECT_OF}
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*install, "--target", target, *needed], check=True)
    for name in dependencies(declared["dependencies"]) - set(PROJECT_OF):
        link_distribution(name, links)
    absent = {"triton", "pytest", "kernel_pytorch.harness"} - {module_of(item) for item in needed}
    usage = "\n".join(
        re.findall(r"^```python\n(.*?)^```", (project / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    )
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
