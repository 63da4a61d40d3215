#!/usr/bin/env python3
"""Verify or benchmark every technique on a machine with a GPU, torch and Triton, and no network.

    python3 bundle/run.py verify --out DIR     every level against float64, what works with what, then the tests, those
                                               of the GPU included
    python3 bundle/run.py bench  --out DIR     one results file per technique; `kernel-pytorch report DIR` draws them

The bundle may be read-only: what is unpacked goes into a temporary folder. Needs Python 3.12 on x86-64 Linux with
torch, triton and numpy; everything else is in `wheels/`. `--peers` lets the libraries that packages compare themselves
with take part, as far as they are installed. What else follows DIR goes to `kernel-pytorch`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

BUNDLE = Path(__file__).resolve().parent
PROCESSES = 12
NEEDED = ("torch", "triton", "numpy")


def main() -> int:
    """Run one of the two jobs; the exit code is 0 only if everything was right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=["verify", "bench"])
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for what was found out")
    parser.add_argument("--peers", action="store_true", help="let other libraries take part, where installed")
    arguments, more = parser.parse_known_args()
    if arguments.peers:
        more += [argument for file in sorted(BUNDLE.glob("peers/*/*/peers.py")) for argument in ("--peers", str(file))]
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        print(f"run.py: this Python ({sys.executable}) has no {', '.join(missing)}", file=sys.stderr)
        return 2
    out = arguments.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kernel-pytorch-") as folder:
        environment = unpack(Path(folder))
        command = [sys.executable, "-m", "kernel_pytorch.harness", arguments.job, "--json", str(out), *more]
        code = subprocess.run(command, cwd=folder, env=environment, check=False).returncode
        if arguments.job == "verify":
            command[3:] = ["support", "--json", str(out)]
            code = code or subprocess.run(command, cwd=folder, env=environment, check=False).returncode
            code = code or run_tests(Path(folder), environment, out)
    return code


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
        "KERNEL_PYTORCH_ACTIVATIONS": str(BUNDLE / "activations.safetensors"),
    }


def run_tests(folder: Path, environment: dict[str, str], out: Path) -> int:
    """Run the tests that need no checkout, and leave their record beside the verification."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", str(BUNDLE / "pytest.ini")]
    command += [f"--rootdir={BUNDLE}", f"--junit-xml={out / 'tests.xml'}", str(BUNDLE / "tests")]
    if (folder / "site" / "xdist").is_dir():  # as many as a GPU holds beside each other, each with a CUDA context
        command += ["-n", str(min(PROCESSES, os.cpu_count() or 1)), "--benchmark-disable"]
    return subprocess.run(command, cwd=folder, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
