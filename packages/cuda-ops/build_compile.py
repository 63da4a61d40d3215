"""Run the compilations of the library side by side, those that an earlier build has made already left out."""

from __future__ import annotations

import hashlib
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

# What a file takes on one core, on average; of CUDA for each architecture.
SECONDS_OF_CUDA = 13.0
SECONDS_OF_CPP = 3.0


class BuildError(RuntimeError):
    """A compiler was there and failed; the message holds its command and what it printed."""


def compile_all(work: Path, steps: Sequence[tuple[list[str], str]], say: Callable[[str], None]) -> dict[str, str]:
    """Run all compilations, as many at a time as there are cores for this process, and report each one.

    Returns:
        By object what the compiler printed when it made it.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    say(f"cuda-ops: compiling {len(steps)} files on {cores} cores, {_expected(steps, cores)} the first time")
    began = time.monotonic()
    printed = {}
    with ThreadPoolExecutor(cores) as pool:
        pending = {pool.submit(compile_object, work, *step): step[1] for step in steps}
        try:
            for count, done in enumerate(as_completed(pending), 1):
                printed[pending[done]] = done.result()
                seconds = time.monotonic() - began
                say(f"cuda-ops: {count} of {len(steps)} files after {seconds:.0f} s: {pending[done]}")
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return printed


def _expected(steps: Sequence[tuple[list[str], str]], cores: int) -> str:
    """How long all compilations take together, roughly."""
    seconds = sum(
        SECONDS_OF_CUDA * sum(word.startswith("-gencode") for word in command) or SECONDS_OF_CPP for command, _ in steps
    )
    minutes = max(1, round(seconds / cores / 60))
    return f"about {minutes} minute{'s' if minutes > 1 else ''}"


def compile_object(work: Path, command: list[str], name: str) -> str:
    """Run a command in `work`, unless the object that is there was made by it of the same sources; what it printed."""
    csrc, folder, target = work / "csrc", (work / command[-3]).parent, work / name
    sources = [
        *sorted((csrc / "include").rglob("*")),
        *sorted(folder.glob("*") if folder == csrc else folder.rglob("*")),
    ]
    found = hashlib.sha256(repr(command).encode())
    for file in sources:
        if file.is_file():
            found.update(file.read_bytes())
    key = target.with_suffix(".key")
    digest, _, printed = key.read_text().partition("\n") if key.is_file() else ("", "", "")
    if target.is_file() and digest == found.hexdigest():
        return printed
    made = f"{os.getpid()}-{name}"  # several may build at a time
    printed = run([*command[:-1], made], work)
    key.unlink(missing_ok=True)
    os.replace(work / made, target)
    key.write_text(f"{found.hexdigest()}\n{printed}")
    return printed


def run(command: Sequence[str], work: Path) -> str:
    """Run a compiler in a folder and return what it printed; that goes into the error, if there is one."""
    result = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
    if result.returncode:
        raise BuildError(f"{' '.join(command)}\n{result.stdout}{result.stderr}")
    return result.stdout + result.stderr
