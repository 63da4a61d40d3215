"""A copy of the checkout, in which packages can be made and run without touching the checkout itself."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it

ROOT = Path(__file__).parent.parent
COPIED = (
    "LICENSE", "core", "csrc", "docs", "examples", "harness", "packages", "template", "mkdocs.yml", "noxfile.py",
    "pyproject.toml", "tools",
)  # fmt: skip
"""Not tests/, which make such copies. Links stay links, and lead to what is copied."""
COMMAND = (sys.executable, "-c", "from kernel_pytorch.harness.cli import main; main()")


class Copy:
    """The copy. What is installed comes from the checkout, as in the environment that runs the tests."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "checkout"
        self.root.mkdir()
        for name in COPIED:
            source, target = ROOT / name, self.root / name
            if source.is_dir():
                ignored = shutil.ignore_patterns("__pycache__", ".*", "*.egg-info", "build")
                shutil.copytree(source, target, symlinks=True, ignore=ignored)
            else:
                shutil.copy(source, target)
        self._site = folder / "site"
        self._site.mkdir()
        self._path = [str(self._site)]

    def files(self) -> dict[Path, bytes]:
        """Everything in the copy, by path, but for what git ignores: caches, and the site."""
        found = {path.relative_to(self.root): path for path in self.root.rglob("*") if path.is_file()}
        ignored = re.compile(r"(^|/)(\.|__pycache__/)|^site/")
        return {name: path.read_bytes() for name, path in found.items() if not ignored.search(name.as_posix())}

    def make(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """What `nox -s new` runs: Python without anything installed."""
        script = Path("harness", "src", "kernel_pytorch", "harness", "commands", "new.py")
        return self.run(sys.executable, "-I", "-S", script, *arguments)

    def install(self, name: str) -> None:
        """Put a package on the path, with what an installer would have written about it."""
        package = self.root / "packages" / name
        project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
        info = self._site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
        )
        groups = project["entry-points"].items()
        lines = [line for group, e in groups for line in (f"[{group}]", *(f"{k} = {v}" for k, v in e.items()))]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        self._path.append(str(package / "src"))

    def run(self, *command: object) -> subprocess.CompletedProcess[str]:
        """Run a command at the root of the copy."""
        path = os.pathsep.join([*self._path, *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | {"PYTHONPATH": path, "COLUMNS": "160", "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(
            [str(part) for part in command], cwd=self.root, env=environment, capture_output=True, text=True, check=False
        )

    def kernel_pytorch(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the command line of the harness."""
        return self.run(*COMMAND, *arguments)

    def pytest(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        """Run tests of the copy."""
        options = ("-p", "no:cacheprovider", "--benchmark-disable", "-m", "not slow")
        return self.run(sys.executable, "-m", "pytest", *options, *arguments)


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    """A copy of the checkout for one test."""
    return Copy(tmp_path)
