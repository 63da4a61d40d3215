"""Two processes with gloo that stay up: models under DistributedDataParallel and FSDP2, and models sent to a worker."""

from __future__ import annotations

import datetime
import io
import pickle
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from surroundings import trained
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from variants import Variant
from zoo import ARCHITECTURES

SECONDS = 60


class Ranks:
    """Two processes, started when they are needed first, and anew after an error that may have parted them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.starts, self.processes = folder, 0, []

    def run(self, work: str, *arguments: Any) -> Any:
        """What rank 0 makes of it. Raises RuntimeError with the traceback if one of them fails."""
        if not self.processes:
            self._start()
        for questions, _ in self.queues:
            questions.put(_packed((work, arguments)))
        found = []
        for _, answers in self.queues:
            try:
                found.append(pickle.loads(answers.get(timeout=SECONDS)))
            except Exception as error:
                self.stop()
                raise RuntimeError(f"a rank gives no answer: {error!r}") from None
        failed = [answer for fine, answer in found if not fine]
        if len(failed) == 1:  # the other waits for it, or is ahead
            self.stop()
        if failed:
            raise RuntimeError(failed[0])
        return found[0][1]

    def stop(self) -> None:
        """End the processes."""
        for process in self.processes:
            process.terminate()
            process.join()
        self.processes = []

    def _start(self) -> None:
        self.starts += 1
        context = torch.multiprocessing.get_context("spawn")
        store = f"file://{self.folder}/store{self.starts}"
        self.queues = [(context.Queue(), context.Queue()) for _ in range(2)]
        self.processes = [
            context.Process(target=_serve, args=(rank, store, *queues), daemon=True)
            for rank, queues in enumerate(self.queues)
        ]
        for process in self.processes:
            process.start()


def _packed(value: Any) -> bytes:
    """Pickled here, so that an error is seen, and without shared memory."""
    return pickle.dumps(value)


def _serve(rank: int, store: str, questions: Any, answers: Any) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=SECONDS // 2)
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timeout)
    while True:
        try:
            work, arguments = pickle.loads(questions.get())
            answer = True, WORKS[work](*arguments, rank=rank)
        except Exception:
            answer = False, traceback.format_exc()
        answers.put(_packed(answer))


def parallel(name: str, variant: Variant, wrap: str, *, rank: int) -> Any:
    """The loss of a rank and the gradients of both, each with its own part of a batch."""
    architecture = ARCHITECTURES[name]
    inputs = {n: v[rank : rank + 1] if isinstance(v, torch.Tensor) else v for n, v in architecture.inputs().items()}
    model = variant.prepare(architecture.build())
    with variant.levels():
        return trained(model, inputs, WRAPS[wrap](model))


def sent(file: bytes, inputs: Any, variant: Variant, *, rank: int) -> Any:
    """The loss and the gradients of a model that comes from another process."""
    with variant.levels():
        return trained(torch.load(io.BytesIO(file), weights_only=False), inputs)


def _distributed(model: torch.nn.Module) -> torch.nn.Module:
    return DistributedDataParallel(model, find_unused_parameters=True)


def _sharded(model: torch.nn.Module) -> torch.nn.Module:
    for module in reversed(list(model.modules())):
        for child in module.children() if isinstance(module, torch.nn.ModuleList) else ():
            if not isinstance(child, (torch.nn.ModuleList, torch.nn.Embedding, torch.nn.Linear)):
                fully_shard(child)
    return fully_shard(model)


WRAPS = {"DDP": _distributed, "FSDP2": _sharded}
WORKS = {"parallel": parallel, "sent": sent}
