"""What the tests of this package share."""

import importlib
import json
import os
import select
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1]
CSRC = PACKAGE / "csrc"

SERVER = """
import contextlib, io, json, sys, textwrap, traceback
import torch
threads = torch.get_num_threads()
for line in sys.stdin:
    printed, error = io.StringIO(), ""
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    try:
        with contextlib.redirect_stdout(printed):
            exec(textwrap.dedent(json.loads(line)), {"__name__": "__main__"})
    except BaseException:
        error = traceback.format_exc()
    print(json.dumps([printed.getvalue(), error]), flush=True)
"""

emulated = False
try:
    library = importlib.import_module("kernel_pytorch.cuda_ops").LIBRARY
    missing = ""
    emulated = library.instruction_sets == ("CUDA, emulated",)  # build_emulated.py
except ImportError as error:  # no compiler, for example: the package says so, and has nothing to test
    missing = str(error)
    collect_ignore_glob = ["test_*.py"]
else:
    # Without the checkout there is nothing to build, and no benchmark.
    collect_ignore = (
        []
        if (PACKAGE / "build_library.py").is_file()
        else ["test_availability.py", "test_build.py", "test_index.py", "test_emulator.py", "test_rungs.py"]
    )


def pytest_configure(config):
    sys.path.insert(0, str(PACKAGE))  # build_library.py
    config.addinivalue_line("markers", "cpu_backend: what is promised of the CPU backend alone")


def pytest_report_header(config):
    return f"packages/cuda-ops/tests are left out: {missing}" if missing else None


def pytest_runtest_setup(item):
    if emulated and item.get_closest_marker("cpu_backend"):
        pytest.skip("of the CPU backend; CUDA kernels are emulated in its place")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    try:
        return (yield)
    except RuntimeError as error:
        if emulated and "dtype is torch.float64; on CUDA allowed are" in str(error):
            pytest.skip("CUDA kernels, which are emulated, take no float64")
        raise


@pytest.fixture
def run_python():
    """Run a program in a process of its own, with these environment variables; its output."""

    def run(program, **environment):
        command = [sys.executable, "-c", textwrap.dedent(program)]
        result = subprocess.run(
            command, env=os.environ | environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    return run


@pytest.fixture(scope="session")
def run_on():
    """`(instruction_set, program)`: run a program in the process of that instruction set, which is started once."""
    processes = {}

    def run(instruction_set, program):
        if instruction_set not in processes:
            processes[instruction_set] = subprocess.Popen(
                [sys.executable, "-W", "error", "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                env=os.environ | ({} if emulated else {"KERNEL_PYTORCH_CPU_ISA": instruction_set}),
                cwd=Path(__file__).parent,
            )  # fmt: skip
        process = processes[instruction_set]
        process.stdin.write(json.dumps(program) + "\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], 120)
        answer = process.stdout.readline() if ready else ""
        if not answer:
            del processes[instruction_set]
            process.kill()
            process.communicate()
            pytest.fail(f"the process ended with {process.returncode}" if ready else "no answer within 120 seconds")
        printed, error = json.loads(answer)
        assert not error, error
        return printed

    yield run
    for process in processes.values():
        process.communicate()
