"""What nox installs where: which torch, which packages, and what is compiled before; `noxfile.py` uses it.

Which torch is decided in one place, `torch_requirements`, by what follows `--`; see the top of `noxfile.py`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).parent.parent
PACKAGES = sorted(file.parent for file in ROOT.glob("packages/*/pyproject.toml"))
PROJECTS = [ROOT / "harness", *PACKAGES]
COMPILED = [package for package in PACKAGES if (package / "build_library.py").is_file()]

TORCH = "2.13.0"
TRITON_OF_TORCH = {
    "2.10": "3.6.0",
    "2.11": "3.6.0",
    "2.12": "3.7.1",
    "2.13": "3.7.1",
    "2.14": "3.8.0",
    "2.15": "3.9.0",
}
OLDEST = "2.10.0"
VERSIONS = """
import importlib.util, sys, torch
triton = "Triton " + __import__("triton").__version__ if importlib.util.find_spec("triton") else "no Triton"
print(f"torch {torch.__version__}, {triton}, Python {sys.version.split()[0]}")
"""


def torch_choice(session: nox.Session) -> tuple[str, list[str]]:
    """Take `--torch X` out of the arguments; X is a version, `installed`, or empty where nothing was said."""
    arguments = list(session.posargs)
    if "--torch" not in arguments:
        return "", arguments
    place = arguments.index("--torch")
    if place + 1 == len(arguments):
        session.error("--torch needs a version or the word `installed`")
    choice = arguments[place + 1]
    del arguments[place : place + 2]
    return choice, arguments


def packages_named(arguments: list[str]) -> list[Path]:
    """The packages that the arguments of `kernel-pytorch bench` name; none where they mean all."""
    flags = ("--quick", "--full", "--peers", "--resume", "--overheads")
    positional = [a for before, a in zip(["", *arguments], arguments, strict=False) if free_standing(before, flags)]
    return [package for package in PACKAGES if package.name in positional]


def projects_named(arguments: list[str]) -> list[Path]:
    """The packages that the arguments of `kernel-pytorch bench` name, and their dependencies; all if they name none."""
    return with_siblings(packages_named(arguments))


def projects_of_paths(arguments: list[str]) -> list[Path]:
    """The packages that hold all the folders and files passed to pytest, and their dependencies; else all."""
    chosen: list[Path] = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        path = (ROOT / argument.partition("::")[0]).resolve()
        if argument.startswith("-") or not path.exists() or not free_standing(before, ("-x", "-q", "-v", "-s")):
            continue
        holds = [package for package in PACKAGES if path.is_relative_to(package)]
        if not holds:
            return PROJECTS
        chosen += holds
    return with_siblings(chosen)


def free_standing(before: str, flags: tuple[str, ...]) -> bool:
    """Whether an argument is no value of the option before it; `flags` are options without a value."""
    return not before.startswith("-") or before in flags or "=" in before


def with_siblings(chosen: list[Path]) -> list[Path]:
    """These packages and every project that they name as a dependency; all projects for none."""
    if not chosen:
        return PROJECTS
    found, pending = {ROOT / "harness"}, list(chosen)
    while pending:
        found.add(project := pending.pop())
        metadata = nox.project.load_toml(project / "pyproject.toml")["project"]
        named = list(itertools.chain(metadata["dependencies"], *metadata.get("optional-dependencies", {}).values()))
        names = {re.split(r"[\s\[<>=!~;]", item)[0] for item in named}
        pending += [p for p in PROJECTS if f"kernel-pytorch-{p.name}" in names and p not in found]
    return [project for project in PROJECTS if project in found]


def prepare(
    session: nox.Session,
    choice: str,
    extras: list[str],
    *,
    more: list[str] = (),
    bare: list[str] = (),
    projects: list[Path] = PROJECTS,
) -> None:
    """Install torch, what the packages declare, `more`, `bare` (without dependencies), then `projects` in place.

    What this environment holds already is left alone. Libraries are compiled before they are installed, since pip
    hides what a build prints; all sessions share them.
    """
    if not has_gpu():
        # What is compiled here is compiled to be tested here; `static` looks at all architectures.
        session.env.setdefault("KERNEL_PYTORCH_CUDA_ARCHS", os.environ.get("KERNEL_PYTORCH_CUDA_ARCHS", "sm_90a"))
    # Where bytecode is not kept, each process compiles PyTorch's modules once more, for 3 to 8 seconds.
    kept = Path(session.virtualenv.location) / "bytecode"
    session.env.update(PYTHONDONTWRITEBYTECODE="", PYTHONPYCACHEPREFIX=str(kept))
    needed = [*third_party(extras), *more, "hatchling", "editables"]
    install_once(session, needed, torch=choice, bare=bare)
    stamp = Path(session.virtualenv.location) / "kernel-pytorch-projects.json"
    installed = json.loads(stamp.read_text()) if stamp.is_file() else {}
    present = {project: content_digest(project) for project in projects}
    missing = [project for project in projects if installed.get(project.name) != present[project]]
    for project in missing:
        if project in COMPILED:
            session.run("python", str(project / "build_library.py"))
    if missing:
        session.log(f"installing in place: {', '.join(project.name for project in missing)}")
        editables = [argument for project in missing for argument in ("-e", str(project))]
        session.install("--quiet", "--no-build-isolation", "--no-deps", *editables)
        stamp.write_text(json.dumps(installed | {project.name: present[project] for project in missing}))


def content_digest(project: Path) -> str:
    """Digest of what an installation in place depends on: the declaration, and what is compiled."""
    files = [project / "pyproject.toml", *project.glob("build_*.py"), *sorted((project / "csrc").rglob("*"))]
    contents = [file.read_bytes() for file in files if file.is_file()]
    return hashlib.sha256(repr(contents).encode()).hexdigest()


def third_party(extras: list[str]) -> list[str]:
    """What all packages declare, with these extras, without torch and each other."""
    found: set[str] = set()
    for project in PROJECTS:
        metadata = nox.project.load_toml(project / "pyproject.toml")["project"]
        optional = metadata.get("optional-dependencies", {})
        found.update(metadata["dependencies"], *(optional.get(extra, []) for extra in extras))
    return sorted(item for item in found if not re.match(r"torch\b|kernel-pytorch", item))


def install_once(
    session: nox.Session, requirements: list[str], *, torch: str | None = None, bare: list[str] = ()
) -> None:
    """Install these, with the torch of that choice, and `bare` without dependencies, unless they are here already."""
    environment = Path(session.virtualenv.location)
    stamp = environment / "kernel-pytorch.stamp"
    asked = repr([sys.version, requirements, bare, torch])
    digest = hashlib.sha256(asked.encode()).hexdigest()
    if stamp.is_file() and stamp.read_text().startswith(digest):
        session.log(f"nothing to install: {stamp.read_text().partition(' ')[2]}")
        return
    stamp.unlink(missing_ok=True)
    (environment / "kernel-pytorch-projects.json").unlink(missing_ok=True)
    with_torch = torch_requirements(session, torch)
    what = ", ".join(item.partition(";")[0] for item in with_torch[:2])
    session.log(f"installing {what + ' and ' if what else ''}{len(requirements)} packages; downloads can take minutes")
    # Python compiles what it imports, which is a small part of torch and transformers.
    session.install("--quiet", "--no-compile", *with_torch, *requirements)
    if bare:
        session.install("--quiet", "--no-deps", *bare)
    summary = "as before" if torch is None else run_silently(session, "python", "-c", VERSIONS).splitlines()[-1]
    session.log(f"installed: {summary}" if torch is not None else "installed")
    stamp.write_text(f"{digest} {summary}")


def torch_requirements(session: nox.Session, choice: str | None) -> list[str]:
    """Requirements for pip that give the environment the chosen torch; see the top of noxfile.py."""
    if choice is None:
        return []
    link = Path(run_silently(session, "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    link /= "torch-of-the-interpreter.pth"
    link.unlink(missing_ok=True)
    if choice == "installed":
        _, packages = interpreter_with_torch(session)
        session.run("python", "-m", "pip", "uninstall", "--quiet", "--yes", "torch", "triton", silent=True)
        link.write_text(f"{packages}\n")
        return []
    version = choice or TORCH
    triton = TRITON_OF_TORCH.get(".".join(version.split(".")[:2]))
    if triton is None:
        known = ", ".join(TRITON_OF_TORCH)
        session.error(f"no Triton is known for torch {version}; known are torch {known}, and 2.10 is the oldest")
    if not choice:
        stop_before_cuda_without_gpu(session)
    # Triton 3.6's interpreter makes scalars of arrays, which numpy has refused since 2.4.
    more = ["numpy<2.4"] if triton == "3.6.0" else []
    return [f"torch=={version}", f"triton=={triton}; sys_platform == 'linux'", *more]


def stop_before_cuda_without_gpu(session: nox.Session) -> None:
    """Ask pip which torch it would take; stop if that is gigabytes of CUDA on a machine that has no NVIDIA GPU."""
    report = Path(session.create_tmp()) / "pip-would-take.json"
    # Without fast-deps pip downloads the whole wheel to read its metadata, even in a dry run.
    question = ["--dry-run", "--ignore-installed", "--no-deps", "--use-feature=fast-deps", "--report", str(report)]
    run_silently(session, "python", "-m", "pip", "install", "-qq", *question, f"torch=={TORCH}")
    metadata = json.loads(report.read_text())["install"][0]["metadata"]
    needs = [item for item in metadata.get("requires_dist", []) if item.startswith(("nvidia-", "cuda-"))]
    session.log(f"pip takes torch {metadata['version']}, {'built for CUDA' if needs else 'built without CUDA'}")
    if needs and not has_gpu():
        session.error(
            f"stopped before a large download: torch {metadata['version']} here is the CUDA build (with CUDA itself "
            "about 2 GB to fetch, 5 GB on disk), and this machine shows no NVIDIA GPU. Choose one:\n"
            f"  add `-- --torch {TORCH}`     to take it all the same: it runs on the CPU too\n"
            "  add `-- --torch installed`  to use the torch that this Python has already\n"
            "  set PIP_INDEX_URL or PIP_EXTRA_INDEX_URL to PyTorch's CPU builds: the address is on pytorch.org, "
            "Get Started"
        )


def has_gpu() -> bool:
    """Whether this machine shows an NVIDIA GPU."""
    return Path("/dev/nvidia0").exists() or shutil.which("nvidia-smi") is not None


def interpreter_with_torch(session: nox.Session) -> tuple[str, Path]:
    """The interpreter that runs nox or, if nox lives in an environment without torch, the one beneath; its packages."""
    code = "import importlib.util as u; spec = u.find_spec('torch'); print(spec.origin if spec else '')"
    pythons = dict.fromkeys([sys.executable, getattr(sys, "_base_executable", sys.executable)])
    origins = {p: subprocess.run([p, "-c", code], capture_output=True, text=True).stdout.strip() for p in pythons}
    found = [(python, Path(origin).parent.parent) for python, origin in origins.items() if origin]
    if not found:
        session.error(f"no torch in any of these interpreters: {', '.join(pythons)}")
    return found[0]


def run_silently(session: nox.Session, *command: str, **options: object) -> str:
    """Run and return what was printed on standard output; errors stay visible when the command fails."""
    return session.run(*command, silent=True, stderr=None, log=False, **options)
