#!/usr/bin/env python3
"""Verify or benchmark every technique on a machine with a GPU, torch and Triton, and no network.

    python3 bundle/run.py verify --out DIR     every level against float64, what works with what, then the tests, those
                                               of the GPU included
    python3 bundle/run.py bench  --out DIR     one results file per technique; `kernel-pytorch report DIR` draws them

The bundle may be read-only: what is unpacked goes into a temporary folder. Needs Python 3.12 on x86-64 Linux with
torch, triton and numpy; everything else is in `wheels/`. `--technique NAME` does it for one of them; `--peers` lets
the libraries that packages compare themselves with take part, as far as they are installed. What else follows DIR goes
to `kernel-pytorch verify` or `kernel-pytorch bench`.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

BUNDLE = Path(__file__).resolve().parent
PROCESSES = {"verify": 4, "support": 4, "tests": 10}
"""Processes that fit on one GPU, each with a CUDA context, and that 16 cores keep busy."""
NEEDED = ("torch", "triton", "numpy")
PATIENCE = 10.0  # seconds that a job has to end by itself


def main() -> int:
    """Do one of the two jobs; the exit code is 0 only if everything was right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=["verify", "bench"])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for what was found out")
    parser.add_argument("--peers", action="store_true", help="let other libraries take part, where installed")
    parser.add_argument("--technique", metavar="NAME", help="only this one, and its tests alone")
    arguments, more = parser.parse_known_args()
    chosen = [arguments.technique] if arguments.technique else []
    if arguments.peers:
        more += [argument for file in sorted(BUNDLE.glob("peers/*/*/peers.py")) for argument in ("--peers", str(file))]
    problem = why_not(arguments.technique, arguments.out)
    if problem:
        print(f"run.py: {problem}", file=sys.stderr)
        return 2
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kernel-pytorch-") as folder:
        environment = unpack(Path(folder))
        program = [sys.executable, "-m", "kernel_pytorch.harness"]
        if arguments.job == "bench":
            full = [] if {"--full", "--quick"} & {*more} else ["--full"]
            command = [*program, "bench", *chosen, "--json", str(out), *full, *more]
            return until_it_ends(subprocess.Popen(command, cwd=folder, env=environment))
        jobs = {
            "verify": [*program, "verify", *chosen, "--json", str(out), "--jobs", share("verify"), *more],
            "support": [*program, "support", *chosen, "--json", str(out), "--jobs", share("support")],
            "tests": tests(BUNDLE.joinpath("tests", *chosen), Path(folder), out),
        }
        return side_by_side(jobs, Path(folder), environment, out)


def why_not(technique: str | None, out: Path) -> str:
    """Why the job cannot be done, or nothing."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        return f"this Python ({sys.executable}) has no {', '.join(missing)}"
    if out.exists() and not out.is_dir():
        return f"--out: {out} is a file; give a folder"
    known = sorted(folder.name for folder in BUNDLE.glob("tests/*") if folder.is_dir())
    if technique and technique not in known:
        return f"--technique: given {technique!r}; there are {', '.join(known)}"
    triton, numpy = (tuple(map(int, version(name).split(".")[:2])) for name in ("triton", "numpy"))
    if triton < (3, 7) and numpy >= (2, 4) and not Path("/dev/nvidiactl").exists():
        return "no GPU here, and Triton 3.6's interpreter, which would stand in for it, needs numpy below 2.4"
    return ""


def until_it_ends(process: subprocess.Popen[bytes]) -> int:
    """The exit code of a process, after Ctrl-C too."""
    try:
        return process.wait()
    except KeyboardInterrupt:
        return stop(process)


def stop(process: subprocess.Popen[bytes]) -> int:
    """Give a process that a terminal has interrupted the time to keep what it has; tell those that know nothing yet."""
    for way in (signal.SIGINT, signal.SIGTERM):
        try:
            return process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            process.send_signal(way)
    return process.wait()


def unpack(folder: Path) -> dict[str, str]:
    """Unpack every wheel, and return an environment in which Python finds them."""
    for wheel in sorted((BUNDLE / "wheels").glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder / "site")
    path = [str(folder / "site"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "4",  # of every process; there are many
    }


def side_by_side(jobs: dict[str, list[str]], folder: Path, environment: dict[str, str], out: Path) -> int:
    """Run jobs at once: right or wrong does not depend on who else runs, and most of their time is compilation.

    What each prints goes to a log in `out`, and to the terminal when it ends. What is wrong in one of them is no
    reason to leave the others out; the exit code is 0 only if all of theirs are.
    """
    logs = {name: out / f"{name}.log" for name in jobs}
    running = {}
    try:
        for name, command in jobs.items():
            with logs[name].open("wb") as log:
                running[name] = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
            print(f"{name}: started, writes {logs[name]}", flush=True)
        codes = []
        while running:
            time.sleep(1.0)
            for name in [name for name, process in running.items() if process.poll() is not None]:
                codes.append(running.pop(name).returncode)
                print(f"\n{logs[name].read_text(errors='replace')}\n{name}: exit code {codes[-1]}", flush=True)
        return max(codes, key=abs)
    except KeyboardInterrupt:
        print(f"run.py: interrupted; what the jobs printed is in {', '.join(map(str, logs.values()))}", file=sys.stderr)
        return 130
    finally:
        for process in running.values():
            stop(process)


def tests(chosen: Path, folder: Path, out: Path) -> list[str]:
    """The command that runs the tests that need no checkout, and leaves their record beside the verification.

    Those of the packages' support tables ask what `kernel-pytorch support` asks.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(BUNDLE / "pytest.ini")]
    command += [f"--rootdir={BUNDLE}", f"--junit-xml={out / 'tests.xml'}", str(chosen)]
    command += [f"--ignore={file}" for file in BUNDLE.glob("tests/*/test_support.py") if file.parent.name != "harness"]
    if (folder / "site" / "xdist").is_dir():  # one by one, since a few take minutes
        command += ["-n", share("tests"), "--maxschedchunk", "1", "--benchmark-disable"]
    return command


def share(job: str) -> str:
    """How many processes a job may have: fewer where there are fewer cores."""
    return str(max(1, min(PROCESSES[job], (os.cpu_count() or 1) * PROCESSES[job] // 16)))


if __name__ == "__main__":
    sys.exit(main())
