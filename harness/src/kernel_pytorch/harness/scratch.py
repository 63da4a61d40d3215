"""Temporary folders that are removed however a command ends, SIGKILL included."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

VARIABLE = "KERNEL_PYTORCH_SCRATCH"
"""Names the folder of the running command, for its child processes too."""

# Standard input ends when the process that holds its other end is gone, for whatever reason.
GUARD = "import shutil, sys; sys.stdin.read(); shutil.rmtree(sys.argv[1], ignore_errors=True)"


@contextlib.contextmanager
def guarded_scratch() -> Iterator[None]:
    """Put all scratch folders below one, which a small process of its own removes if this one is killed."""
    with contextlib.ExitStack() as stack:
        folder = tempfile.mkdtemp(prefix="kernel-pytorch-")
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        # A session of its own, so that a signal to this process group does not end it.
        guard = subprocess.Popen(  # noqa: S603
            [sys.executable, "-I", "-S", "-c", GUARD, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=Path(folder).anchor,
            start_new_session=True,
        )
        stack.callback(guard.communicate)
        before = os.environ.get(VARIABLE)
        os.environ[VARIABLE] = folder
        try:
            yield
        finally:
            os.environ.pop(VARIABLE)
            if before is not None:
                os.environ[VARIABLE] = before


def scratch_root() -> str | None:
    """Where temporary folders go: below the running command's own; None, the system's choice, outside of one."""
    folder = os.environ.get(VARIABLE)
    return folder if folder and os.path.isdir(folder) else None


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    """A temporary folder, as a context manager."""
    return tempfile.TemporaryDirectory(prefix="kernel-pytorch-", dir=scratch_root())
