"""What Triton's machine code needs, by the tools that Triton brings: `cuobjdump`; `ptxas` where there is a stack."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from kernel_pytorch.harness.scratch import scratch_folder

RESOURCES = re.compile(r"Function (?P<name>\S+):\s+REG:(?P<registers>\d+) STACK:(?P<stack>\d+)")
TARGET = re.compile(r"^\.target (?P<name>\w+)", re.MULTILINE)
SPILLS = re.compile(r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill")


class ToolMissingError(RuntimeError):
    """A tool that compiling or reading the result needs is not there, or cannot be run."""


def measure_resources(name: str, cubin: bytes, ptx: str, capability: int) -> dict[str, int]:
    """Read registers, bytes of stack and spilled bytes of one kernel, by their names in `Compiled`.

    Raises:
        ToolMissingError: `cuobjdump` or `ptxas` is not there or cannot be run.
    """
    with scratch_folder() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        printed = _run(_tool("cuobjdump", capability), "--dump-resource-usage", str(path)).stdout
        registers, stack = parse_resources(printed, name)
        found = {"registers": registers, "stack_bytes": stack, "spill_bytes": 0}
        if stack == 0:
            return found
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        target = TARGET.search(ptx)
        assert target is not None, "PTX without a target"
        options = ["-v", f"--gpu-name={target['name']}", "-o", str(path), str(source)]
        log = _run(_tool("ptxas", capability), *options).stderr
    return found | {"spill_bytes": parse_spills(log, stack)}


def parse_resources(printed: str, name: str) -> tuple[int, int]:
    """Registers and stack of a kernel, from what `cuobjdump --dump-resource-usage` printed."""
    for found in RESOURCES.finditer(printed):
        if found["name"] == name:
            return int(found["registers"]), int(found["stack"])
    raise ValueError(f"cuobjdump printed nothing about {name}:\n{printed}")


def parse_spills(log: str, stack: int) -> int:
    """Spilled bytes from what `ptxas -v` printed about a kernel that has a stack.

    Triton passes further options to ptxas. Where they led to another stack than here, all of it counts as spilled.
    """
    frames = [(int(f["stack"]), max(int(f["stores"]), int(f["loads"]))) for f in SPILLS.finditer(log)]
    spilled = [spills for frame, spills in frames if frame == stack]
    return max(spilled) if spilled else stack


def _tool(name: str, capability: int) -> str:
    """Path of a tool as Triton finds it: bundled, or what TRITON_<NAME>_PATH says."""
    from triton import knobs
    from triton.backends.nvidia.compiler import get_ptxas

    try:
        return knobs.nvidia.cuobjdump.path if name == "cuobjdump" else get_ptxas(capability).path
    except RuntimeError as error:
        raise ToolMissingError(
            f"{name} is not where Triton looks for it; Triton's Linux wheel brings it in triton/backends/nvidia/bin, "
            f"and TRITON_{name.upper()}_PATH names another ({error})"
        ) from error


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603
    except OSError as error:
        raise ToolMissingError(f"{command[0]} cannot be run: {error}") from error
    except subprocess.CalledProcessError as error:
        raise ToolMissingError(f"{' '.join(command)} failed: {error.stderr.strip() or error.stdout.strip()}") from error
