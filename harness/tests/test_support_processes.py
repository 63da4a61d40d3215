"""Two processes of one group: values by rank, tracebacks of whatever goes wrong, and a new group after that."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from kernel_pytorch.harness.support import Processes, ProcessesError


def summed(mesh, number):
    """Each adds its rank, and all know the sum."""
    value = torch.tensor([float(number + mesh.get_local_rank())])
    torch.distributed.all_reduce(value)
    return mesh.size(), value.item(), os.getpid()


def failing_on_one(mesh):
    """One raises, the other waits for it: as a wrong collective does."""
    if mesh.get_local_rank() == 1:
        raise ValueError("planted on rank 1")
    torch.distributed.barrier()


def dying_on_one(mesh):
    if mesh.get_local_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.distributed.barrier()


def hanging(mesh):
    time.sleep(60)


def not_picklable(mesh):
    return lambda: None


class Nested:
    @staticmethod
    def double(mesh, number):
        return 2 * number


@pytest.mark.slow
def test_functions_run_in_every_process_and_processes_are_kept():
    with Processes(timeout=60) as processes:
        (count, total, first), (_, same, second) = processes.call(summed, 1)
        assert (count, total, same) == (2, 3.0, 3.0)
        assert {pid for *_, pid in processes.call(summed, 2)} == {first, second}
        assert processes.call(Nested.double, 21) == [42, 42]
        with pytest.raises(
            ProcessesError, match=r"(?s)^rank 1: Traceback.*in failing_on_one.*ValueError: planted on r"
        ):
            processes.call(failing_on_one)
        assert not {pid for *_, pid in processes.call(summed, 1)} & {first, second}
        with pytest.raises(ProcessesError, match="rank 0: its process was killed by SIGKILL"):
            processes.call(dying_on_one)
    for pid in (first, second):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_what_does_not_end_is_ended():
    with Processes(1, timeout=2) as processes:
        assert processes.call(Nested.double, 1) == [2]
        with pytest.raises(ProcessesError, match="rank 0: did not end within 2 seconds and was stopped"):
            processes.call(hanging)


@pytest.mark.slow
def test_what_cannot_be_sent_is_said():
    with Processes(1, timeout=60) as processes:
        with pytest.raises(ProcessesError, match=r"rank 0: (?s:.*)[Cc]an't (get local|pickle)"):
            processes.call(not_picklable)
        with pytest.raises(Exception, match=r"[Cc]an't (get local|pickle)"):
            processes.call(Nested.double, lambda: None)
        assert processes.call(Nested.double, 1) == [2]
