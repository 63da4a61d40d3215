"""Processes of one `torch.distributed` group on this machine, for checks of sharded tensors.

Each process is a `Worker` that joins the group before its first call and is called many times. The processes meet
through a file in a temporary folder, so that no port has to be chosen: gloo on the CPU, NCCL with one GPU each.
"""

from __future__ import annotations

import atexit
import contextlib
import datetime
import functools
import importlib
import operator
import os
import socket
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from kernel_pytorch.harness.isolation import Announce, Worker
from kernel_pytorch.harness.peers import load_file
from kernel_pytorch.harness.scratch import scratch_folder

OTHERS_TIMEOUT = 3.0
"""Seconds that the other processes get to answer once one has failed: they may wait for it forever."""


class ProcessesError(RuntimeError):
    """A process raised, died, or did not end in time; the message holds its traceback."""


class Processes:
    """Calls a function in every process of a group at once. A context manager; the processes end with it.

    After a failure the next call starts a new group: the others wait for what the failed process did not finish.

    Attributes:
        count: number of processes.
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
        self._members: list[Worker] = []
        self._folder: TemporaryDirectory[str] | None = None
        self._threads = ThreadPoolExecutor(count)

    def call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call `function(mesh, *arguments)` in every process; `mesh` is a one-dimensional DeviceMesh of all of them.

        Args:
            function: defined at the top of a module or of any Python file, such as a test.
            *arguments: picklable.

        Returns:
            Its values by rank; picklable too.

        Raises:
            ProcessesError: it failed in one of the processes.
        """
        if not self._members:
            self._folder = scratch_folder()
            about = (self.count, f"{self._folder.name}/store", self.device_type, self.timeout)
            joins = [functools.partial(_join, rank, *about) for rank in range(self.count)]
            self._members = [Worker(self.timeout, join) for join in joins]
        where = (function.__module__, function.__code__.co_filename, function.__qualname__)
        answers = [self._threads.submit(_ask, worker, where, arguments) for worker in self._members]
        try:
            wait(answers, return_when=FIRST_EXCEPTION)
            wait(answers, OTHERS_TIMEOUT)
            errors = {rank: answer.exception() for rank, answer in enumerate(answers) if answer.done()}
            if failed := [f"rank {rank}: {e}" for rank, e in errors.items() if isinstance(e, ProcessesError)]:
                raise ProcessesError("\n".join(failed))
            return [answer.result() for answer in answers]
        except BaseException:
            for worker in self._members:
                worker.kill()
            wait(answers)
            self._end()
            raise

    def close(self) -> None:
        """End the processes: they exit by themselves if they wait for work, and are killed otherwise."""
        self._end()
        self._threads.shutdown()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end(self) -> None:
        # At once: a member may wait for the others to leave.
        list(self._threads.map(Worker.close, self._members))
        self._members = []
        if self._folder is not None:
            self._folder.cleanup()


def _ask(worker: Worker, where: tuple[str, str, str], arguments: tuple[Any, ...]) -> Any:
    """The value of one process. Raises ProcessesError with what it said, or with how it ended."""
    outcome = worker.call(_call, where, arguments)
    failed, content = (True, outcome.failure) if outcome.failure else outcome.value
    if failed:
        raise ProcessesError(content)
    return content


def _call(where: tuple[str, str, str], arguments: tuple[Any, ...], announce: Announce) -> tuple[bool, Any]:
    """In the child: whether the function raised, and its traceback or value."""
    try:
        return False, _find(*where)(*_mesh, *arguments)
    except Exception:
        return True, traceback.format_exc().rstrip()


_mesh: list[Any] = []
"""In the child: the mesh of all members, once it has joined the group."""


def _join(rank: int, count: int, store: str, device_type: str, timeout: float) -> None:
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
    atexit.register(_leave)
    _mesh.append(init_device_mesh(device_type, (count,)))


def _leave() -> None:
    with contextlib.suppress(Exception):  # the other members may have ended
        torch.distributed.destroy_process_group()


def _find(module: str, file: str, name: str) -> Callable[..., Any]:
    """The function of that name: of an installed module, else of the file, which is loaded once."""
    installed = importlib.import_module(module) if module.startswith("kernel_pytorch.") else sys.modules.get(file)
    found: Callable[..., Any] = operator.attrgetter(name)(installed or load_file(Path(file), file))
    return found
