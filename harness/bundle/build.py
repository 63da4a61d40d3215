"""Builds the bundle: one folder that verifies and benchmarks every technique where there is no network.

Run by `nox -s bundle`, in an environment that holds hatchling.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[2]
PROJECTS = [ROOT / "harness", *sorted(file.parent for file in ROOT.glob("packages/*/pyproject.toml"))]

# The machine that the bundle is for; torch, triton and numpy are there already.
PYTHON = "3.12"
PLATFORMS = ["manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64"]
PRESENT = {"torch", "triton", "numpy"}
EXTRAS = ["test"]
MORE = ["safetensors", "nvidia-ml-py", "pytest-xdist"]

LARGEST = 30 * 2**20  # bytes of the whole bundle


def main(target: Path) -> None:
    """Build the bundle into `target`, replacing what is there."""
    shutil.rmtree(target, ignore_errors=True)
    wheels = target / "wheels"
    wheels.mkdir(parents=True)
    for project in PROJECTS:
        pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), str(project))
    download(wheels)
    copy_tests(target)
    shutil.copy2(ROOT / "harness" / "bundle" / "run.py", target / "run.py")
    size = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    if size > LARGEST:
        sys.exit(f"the bundle holds {size / 2**20:.1f} MiB; allowed are {LARGEST / 2**20:.0f}")
    print(f"{target}: {size / 2**20:.1f} MiB, {len(list(wheels.iterdir()))} wheels")


def download(wheels: Path) -> None:
    """Fetch what the projects need beyond torch, triton and numpy, with all that it needs itself."""
    wanted = sorted({requirement for project in PROJECTS for requirement in requirements(project)} | set(MORE))
    platforms = [argument for platform in PLATFORMS for argument in ("--platform", platform)]
    version = ["--python-version", PYTHON, "--implementation", "cp", "--only-binary=:all:"]
    pip("download", "--dest", str(wheels), *version, *platforms, *wanted)


def requirements(project: Path) -> list[str]:
    """What one project declares, with the extras that its tests need."""
    metadata = load(project / "pyproject.toml")["project"]
    extras = metadata.get("optional-dependencies", {})
    declared = [*metadata["dependencies"], *(item for extra in EXTRAS for item in extras.get(extra, []))]
    return [item for item in declared if not item.startswith("kernel-pytorch") and name_of(item) not in PRESENT]


def name_of(requirement: str) -> str:
    """The distribution's name, without versions and markers."""
    return re.split(r"[^\w.-]", requirement)[0]


def copy_tests(target: Path) -> None:
    """Copy the tests and the peers of every project, and the settings that tests run under."""
    for project in PROJECTS:
        shutil.copytree(
            project / "tests", target / "tests" / project.name, ignore=shutil.ignore_patterns("__pycache__")
        )
    for file in ROOT.glob("packages/*/benchmarks/peers.py"):
        place = target / "peers" / file.relative_to(ROOT / "packages")
        place.parent.mkdir(parents=True)
        shutil.copy2(file, place)
    settings = load(ROOT / "pyproject.toml")["tool"]["pytest"]["ini_options"]
    lines = ["[pytest]"]
    for name, value in settings.items():
        if name != "testpaths":
            lines += [f"{name} =", *(f"    {item}" for item in ([value] if isinstance(value, str) else value))]
    (target / "pytest.ini").write_text("\n".join(lines) + "\n", encoding="utf-8")


def load(file: Path) -> dict[str, Any]:
    """Read a TOML file."""
    return tomllib.loads(file.read_text(encoding="utf-8"))


def pip(*arguments: str) -> None:
    """Run pip in this environment; it says itself what went wrong."""
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *arguments], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
