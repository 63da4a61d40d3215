"""Two processes of one `torch.distributed` group on this machine, for what only shows when tensors are sharded.

The processes are started once and called many times. They meet through a file in a temporary folder, so no port is
chosen and no two runs meet by accident: gloo on the CPU, NCCL where each process has a GPU of its own.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import importlib.util
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from kernel_pytorch.harness.scratch import scratch_root

GOODBYE_TIMEOUT = 5.0
"""Seconds for an idle process to leave the group."""

START_TIMEOUT = 300.0
"""Seconds for new processes to import what they need and to meet; a busy machine may take long."""

OTHERS_TIMEOUT = 3.0
"""Seconds that the other processes get to say what they know, once one has failed: they may wait for it forever."""


class ProcessesError(RuntimeError):
    """A process raised, died, or did not end in time; the message holds its traceback."""


class Processes:
    """Calls a function in every process of a group at once. A context manager; the processes end with it.

    After a failure the next call starts a new group: what a failed process left half-way, the others wait for.

    Attributes:
        count: how many there are.
        timeout: seconds that one call may take.
        device_type: "cpu", or "cuda" for as many GPUs.
    """

    def __init__(self, count: int = 2, *, timeout: float = 120.0, device_type: str = "cpu") -> None:
        if count < 1:
            raise ValueError(f"count: given {count}; it must be at least 1")
        if not timeout > 0:
            raise ValueError(f"timeout: given {timeout}; it must be above 0 seconds")
        if device_type not in ("cpu", "cuda"):
            raise ValueError(f"device_type: given {device_type!r}; allowed are 'cpu', 'cuda'")
        if device_type == "cuda" and torch.cuda.device_count() < count:
            raise ValueError(f"count: given {count}; there are {torch.cuda.device_count()} GPUs here")
        self.count, self.timeout, self.device_type = count, timeout, device_type
        self._context = multiprocessing.get_context("spawn")  # a forked child cannot use CUDA
        self._folder: str | None = None
        self._processes: list[Any] = []
        self._connections: list[Connection] = []

    def call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call `function(mesh, *arguments)` in every process; `mesh` is a one-dimensional DeviceMesh of all of them.

        Args:
            function: defined at the top of a module, or of any Python file: a test's will do.
            *arguments: picklable.

        Returns:
            What it returned, by rank; picklable too.

        Raises:
            ProcessesError: it failed in one of the processes.
        """
        started = not self._processes
        if started:
            self._start()
        try:
            for connection in self._connections:
                connection.send((function.__module__, function.__code__.co_filename, function.__qualname__, arguments))
            return self._answers(self.timeout + (START_TIMEOUT if started else 0.0))
        except BaseException:
            self._kill()
            raise

    def close(self) -> None:
        """End the processes: they leave by themselves if they wait for work, and are killed if they do not."""
        for connection in self._connections:
            connection.close()
        deadline = time.monotonic() + GOODBYE_TIMEOUT
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self._kill()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="kernel-pytorch-", dir=scratch_root())
        for rank in range(self.count):
            ours, theirs = self._context.Pipe()
            arguments = (theirs, rank, self.count, str(Path(self._folder) / "store"), self.device_type, self.timeout)
            process = self._context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def _answers(self, limit: float) -> list[Any]:
        """The values by rank, once all have answered; raises as soon as it is known that they will not."""
        deadline = time.monotonic() + limit
        values: dict[int, Any] = {}
        failures: dict[int, Any] = {}
        while len(values) + len(failures) < self.count:
            pending = [rank for rank in range(self.count) if rank not in values and rank not in failures]
            ready = wait([self._connections[rank] for rank in pending], max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in pending:
                if self._connections[rank] in ready:
                    raised, content = self._receive(rank)
                    (failures if raised else values)[rank] = content
            if failures:
                deadline = min(deadline, time.monotonic() + OTHERS_TIMEOUT)
        if not failures and len(values) < self.count:
            missing = [rank for rank in range(self.count) if rank not in values]
            failures = dict.fromkeys(missing, f"did not end within {limit:g} seconds and was stopped")
        if failures:
            raise ProcessesError("\n".join(f"rank {rank}: {failures[rank]}" for rank in sorted(failures)))
        return [values[rank] for rank in range(self.count)]

    def _receive(self, rank: int) -> tuple[bool, Any]:
        """Whether the process failed, and its value, its traceback, or how it ended."""
        try:
            return self._connections[rank].recv()
        except (EOFError, OSError):
            return True, self._epitaph(rank)

    def _epitaph(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(GOODBYE_TIMEOUT)
        code = process.exitcode
        if code is not None and code < 0:
            return f"its process was killed by {signal.Signals(-code).name}"
        return f"its process exited with code {code}"

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        for connection in self._connections:
            connection.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._processes, self._connections, self._folder = [], [], None


def _serve(connection: Connection, rank: int, count: int, store: str, device_type: str, timeout: float) -> None:
    """A child's loop: meet the others, then run what arrives."""
    # Ctrl-C reaches the whole process group; the parent decides what becomes of the children.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        mesh = _meet(rank, count, store, device_type, timeout)
    except Exception:
        connection.send((True, traceback.format_exc().rstrip()))
        return
    while True:
        try:
            *where, arguments = connection.recv()
        except EOFError:
            break
        try:
            connection.send((False, _find(*where)(mesh, *arguments)))
        except Exception:
            connection.send((True, traceback.format_exc().rstrip()))
    with contextlib.suppress(Exception):  # the others may be gone
        torch.distributed.destroy_process_group()


def _meet(rank: int, count: int, store: str, device_type: str, timeout: float) -> Any:
    """Join the group; the mesh of all its members."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)  # the processes share the machine
    if any(name == "lo" for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's own name may have no address
    if device_type == "cuda":
        torch.cuda.set_device(rank)
    distributed.init_process_group(
        "nccl" if device_type == "cuda" else "gloo",
        store=distributed.FileStore(store, count),
        rank=rank,
        world_size=count,
        timeout=datetime.timedelta(seconds=timeout),
    )
    return init_device_mesh(device_type, (count,))


def _find(module: str, file: str, name: str) -> Callable[..., Any]:
    """The function of that name: of an installed module, else of the file, which is loaded once."""
    found: Any = _module(module, file)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _module(module: str, file: str) -> ModuleType:
    if module.startswith("kernel_pytorch."):
        return importlib.import_module(module)
    if file not in sys.modules:
        spec = importlib.util.spec_from_file_location(file, file)
        if spec is None or spec.loader is None:
            raise ModuleNotFoundError(f"{file} is no Python file")
        sys.modules[file] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[file])
    return sys.modules[file]
