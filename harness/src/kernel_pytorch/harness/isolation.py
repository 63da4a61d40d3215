"""Run functions in other processes, so that one that crashes, hangs or exits does not affect the others.

A CUDA fault poisons its process, an abort ends it, and a deadlock never returns. A worker process is therefore replaced
when it dies, raises, exceeds its limit or leaves its GPU faulty; the caller goes on with the next case. `Worker` runs
one case after the other, `Workers` several at once, and `support.Processes` one function in all members of a
`torch.distributed` group.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, TypeVar

Item = TypeVar("Item")
Found = TypeVar("Found")

Announce = Callable[[str], None]

GOODBYE_TIMEOUT = 5.0
"""Seconds for an idle process to tidy up before it is killed."""

START_TIMEOUT = 300.0
"""Seconds for a new process to import what it needs; a busy machine may take long."""


@dataclass(frozen=True)
class CallOutcome:
    """The result of one call.

    Attributes:
        value: what the function returned; None if it did not return.
        failure: why it did not return; empty if it did.
        stage: the last stage that the function announced.
    """

    value: Any = None
    failure: str = ""
    stage: str = ""


class Worker:
    """Calls functions in a child process. A context manager; the child ends with it.

    Attributes:
        timeout: seconds that one call may take.
        prepare: called in every child before anything else; picklable. None for nothing.
    """

    def __init__(self, timeout: float, prepare: Callable[[], object] | None = None) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout: given {timeout}; it must be above 0 seconds")
        self.timeout = timeout
        self.prepare = prepare
        self._context = multiprocessing.get_context("spawn")  # a forked child cannot use CUDA
        self._process: Any = None
        self._connection: Connection | None = None

    def call(self, function: Callable[..., Any], *arguments: Any, on_stage: Announce | None = None) -> CallOutcome:
        """Call `function(*arguments, announce)` in the child.

        Args:
            function: importable by name in the child. Its last argument is a function that it may call with the name
                of what it is about to do.
            *arguments: picklable.
            on_stage: called in this process with each announced stage.

        Returns:
            The value, or the failure.
        """
        if self._connection is None:
            self._connection, theirs = self._context.Pipe()
            self._process = self._context.Process(target=_serve, args=(theirs, self.prepare), daemon=True)
            self._process.start()
            theirs.close()
        connection, stage, limit = self._connection, "", START_TIMEOUT
        deadline = time.monotonic() + limit
        try:
            connection.send((function, arguments))
            while connection.poll(max(0.0, deadline - time.monotonic())):
                kind, content = connection.recv()
                if kind == "started":
                    limit = self.timeout
                    deadline = time.monotonic() + limit
                elif kind == "stage":
                    stage = content
                    if on_stage is not None:
                        on_stage(content)
                else:
                    if kind != "value":  # a call that raised may have left the device faulty too
                        self.close()
                    failed = kind == "raised"
                    return CallOutcome(None if failed else content, content if failed else "", stage)
        except (EOFError, OSError):
            self._process.join()
            code = self._process.exitcode
            killed = code is not None and code < 0
            how = f"was killed by {signal.Signals(-code).name}" if killed else f"exited with code {code}"
            self.close()
            return CallOutcome(failure=f"its process {how}", stage=stage)
        except BaseException:
            self.close()
            raise
        self.close()
        return CallOutcome(failure=f"did not end within {limit:g} seconds and was stopped", stage=stage)

    def close(self) -> None:
        """End the child: it exits by itself if it waits for work, and is killed otherwise."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.join(GOODBYE_TIMEOUT)
            self._process.kill()
            self._process.join()
        self._process = self._connection = None

    def kill(self) -> None:
        """Kill the child; a thread that waits in `call` gets a failure."""
        if self._process is not None and self._process.pid is not None:
            self._process.kill()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Workers:
    """Several workers at once, for cases that are not timed.

    A context manager; the children end with it, busy ones at once.
    """

    def __init__(self, processes: int, timeout: float, prepare: Callable[[], object] | None = None) -> None:
        if processes < 1:
            raise ValueError(f"processes: given {processes}; at least 1 is needed")
        self._all = [Worker(timeout, prepare) for _ in range(processes)]
        self._free: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self._all:
            self._free.put(worker)
        self._busy: set[Worker] = set()
        self._closed = False
        self._threads = ThreadPoolExecutor(processes)

    def call(self, function: Callable[..., Any], *arguments: Any) -> CallOutcome:
        """Call `function(*arguments, announce)` in the child of the next free worker.

        Raises:
            RuntimeError: the workers have been closed.
        """
        worker = self._free.get()
        self._busy.add(worker)
        try:
            if self._closed:
                raise RuntimeError("these workers have been closed")
            return worker.call(function, *arguments)
        finally:
            self._busy.discard(worker)
            self._free.put(worker)

    def map(self, ask: Callable[[Item], Found], items: Iterable[Item]) -> Iterator[Found]:
        """`ask(item)` for each item, in the order of the items, one thread of this process per worker.

        `ask` leaves long work to `call`.
        """
        return self._threads.map(ask, items)

    def close(self) -> None:
        """End all children and the threads that wait for them."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        while self._busy:
            for worker in tuple(self._busy):
                worker.kill()
            time.sleep(0.01)
        for worker in self._all:
            worker.close()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def set_environment(values: dict[str, str]) -> None:
    """Set variables of this process: with `functools.partial`, what a `Worker` prepares its child with."""
    os.environ.update(values)


def _serve(connection: Connection, prepare: Callable[[], object] | None) -> None:
    """The child's loop."""
    # Ctrl-C reaches the whole process group; the parent decides when the child ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        if prepare is not None:
            prepare()
    except Exception as error:
        connection.send(("raised", f"raised {type(error).__name__} before the first call: {error}"))
        return
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            sys.exit()
        # Receiving the function has imported its module, which does not count towards the limit.
        try:
            connection.send(("started", None))
            try:
                value = function(*arguments, lambda stage: connection.send(("stage", stage)))
                connection.send(("value" if _is_usable() else "last value", value))  # raises if it cannot be pickled
            except BrokenPipeError:
                raise
            except Exception as error:
                connection.send(("raised", f"raised {type(error).__name__}: {error}"))
        except BrokenPipeError:  # the parent was interrupted
            sys.exit()


def _is_usable() -> bool:
    """Whether the GPU still works: a fault persists, even if the function caught its error."""
    torch = sys.modules.get("torch")
    try:
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True
