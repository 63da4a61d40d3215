"""Test in a separate process whether a library loads, computes and raises errors, or ends the process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

OPERATOR = "rms_norm"
SECONDS = 600  # for the import of torch on a busy machine; a library that hangs takes as long

# Each step is printed before it is taken, so that the last line names the one that failed.
PROGRAM = f"""
import json, sys
sys.path += json.loads(sys.argv[1])
print("importing torch", flush=True)
import torch
print("loading it", flush=True)
torch.ops.load_library(sys.argv[2])
if {OPERATOR!r} in sys.argv[3:]:
    operator, x = torch.ops.kernel_pytorch_cuda.{OPERATOR}, torch.ones(2, 8)
    print("calling its operator {OPERATOR}", flush=True)
    y, _ = operator(x, None, 0.0, 0.0, "none")
    assert torch.equal(y, x), f"{OPERATOR} of ones gave {{y.tolist()}}"
    print("raising an error of its operator {OPERATOR}", flush=True)
    try:
        operator(x, None, 0.0, 0.0, "wrong")
    except RuntimeError as error:
        assert "casting: given 'wrong'" in str(error), error
    else:
        raise AssertionError("no error was raised")
"""


def problem_of(library: Path, torch: Path, operators: Collection[str]) -> str | None:
    """What is wrong with a library on this machine, in one line; None if nothing is.

    Args:
        library: the shared library.
        torch: the folder of the torch that it is used with.
        operators: those that are in it. `rms_norm` is called, with and without an error, if it is among them.
    """
    # Isolated from pip's environment of a build, which hides the torch that is installed.
    places = json.dumps([*sys.path, str(torch.parent)])
    command = [sys.executable, "-I", "-c", PROGRAM, places, str(library), *operators]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"it did not end within {SECONDS} seconds"
    if ran.returncode == 0:
        return None
    step = (ran.stdout.splitlines() or ["starting Python"])[-1]
    said = (ran.stderr.strip().splitlines() or ["no message"])[-1]
    if ran.returncode < 0:
        said = f"the process ended by {signal.Signals(-ran.returncode).name}"
    return f"{step}: {said}"
