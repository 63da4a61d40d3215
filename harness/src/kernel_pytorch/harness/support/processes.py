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
import itertools
import operator
import os
import socket
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
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
        self.count, self.timeout, self.device_type = count, timeout, device_type
        self._members: list[Worker] = []
        self._threads = ThreadPoolExecutor(count)
        self._folder = scratch_folder()
        self._stores = (f"{self._folder.name}/store-{number}" for number in itertools.count())

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
            join = functools.partial(_join, self.count, next(self._stores), self.device_type, self.timeout)
            self._members = [Worker(self.timeout, functools.partial(join, rank)) for rank in range(self.count)]
        where = (function.__module__, function.__code__.co_filename, function.__qualname__)

        def ask(rank: int) -> Any:
            outcome = self._members[rank].call(_call, where, arguments)
            failure, value = (outcome.failure, None) if outcome.failure else outcome.value
            if failure:
                raise ProcessesError(f"rank {rank}: {failure}")
            return value

        answers = [self._threads.submit(ask, rank) for rank in range(self.count)]
        try:
            wait(answers, return_when=FIRST_EXCEPTION)
            wait(answers, OTHERS_TIMEOUT)
            errors = [answer.exception() for answer in answers if answer.done()]
            if failed := [str(error) for error in errors if isinstance(error, ProcessesError)]:
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
        self._folder.cleanup()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end(self) -> None:
        list(self._threads.map(Worker.close, self._members))  # at once: a member may wait for the others to leave
        self._members = []


_mesh: list[Any] = []
"""In the child: the mesh of all members, once it has joined the group."""


def _call(where: tuple[str, str, str], arguments: tuple[Any, ...], announce: Announce) -> tuple[str, Any]:
    """In the child: the traceback of what the function raised, if it did, and its value."""
    module, file, name = where
    try:
        # The function comes from an installed module, or from the file, which is loaded once.
        installed = importlib.import_module(module) if module.startswith("kernel_pytorch.") else sys.modules.get(file)
        function = operator.attrgetter(name)(installed or load_file(Path(file), file))
        return "", function(*_mesh, *arguments)
    except Exception:
        return traceback.format_exc().rstrip(), None


def _join(count: int, store: str, device_type: str, timeout: float, rank: int) -> None:
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
