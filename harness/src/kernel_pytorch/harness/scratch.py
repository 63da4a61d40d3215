"""Temporary folders of a command and its child processes, below one that the command removes at its end."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator

VARIABLE = "KERNEL_PYTORCH_SCRATCH"
"""Names the folder of the running command, for its child processes too."""


@contextlib.contextmanager
def command_scratch() -> Iterator[None]:
    """Put all scratch folders below one: a child that is killed cannot remove its own."""
    with tempfile.TemporaryDirectory(prefix="kernel-pytorch-", ignore_cleanup_errors=True) as folder:
        os.environ[VARIABLE] = folder
        try:
            yield
        finally:
            del os.environ[VARIABLE]


def scratch_root() -> str | None:
    """The folder of the running command; None outside of one, for the system's choice."""
    return os.environ.get(VARIABLE)


def scratch_folder() -> tempfile.TemporaryDirectory[str]:
    """A temporary folder, as a context manager."""
    return tempfile.TemporaryDirectory(prefix="kernel-pytorch-", dir=scratch_root())
