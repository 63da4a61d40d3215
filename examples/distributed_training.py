"""Train a language model on several devices, with sharded checkpoints that another number of devices can resume.

After reading it you can choose how devices divide the work, accumulate gradients without needless sends, train a model
that does not fit on one device, and resume after a process was killed.

- Needs: the packages of this workspace. No GPU, no download: the data is the source of this Python.
- Runs in 20 seconds on two cores with `--quick`; ranks of GPUs exchange through NCCL, those of CPUs through gloo.
- Command: `torchrun --nproc-per-node=2 examples/distributed_training.py --parallel fsdp --quick --out run`. Without
  torchrun there is one rank. The same command resumes a run that ended early, also with another number of ranks, and
  `--parallel fsdp` resumes what `ddp` saved, `fsdp+tp` what `tp` saved, and the other way round.
- Last line: the losses and the speed.
"""

# %% Imports
from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import os
import shutil
import sysconfig
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from kernel_pytorch.models import LanguageModel, distributed
from kernel_pytorch.models.training import ShuffledBatches

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
Both = tuple[torch.nn.Module, torch.optim.Optimizer]


# %% Sizes
# A batch is that of all ranks together, so the losses do not depend on the number of ranks.
@dataclass(frozen=True)
class Sizes:
    """Sizes of the model, and of a step: `accumulate` batches of `batch` pieces of `length` bytes."""

    dim: int
    layers: int
    heads: int
    length: int
    batch: int
    accumulate: int
    steps: int


def sizes(quick: bool) -> Sizes:
    """Sizes for this machine."""
    found = Sizes(1024, 12, 16, 1024, 64, 2, 2000) if HAS_GPU else Sizes(128, 4, 8, 128, 8, 2, 400)
    return replace(found, steps=found.steps // 10) if quick else found


# %% Ranks
# torchrun starts the processes, and ends all when one fails. A rank fails that waits for another beyond the timeout:
# the groups of `init_device_mesh` would wait for PyTorch's default time. With GPUs, gloo serves tensors on the CPU.
def start(parallel: str, timeout: datetime.timedelta) -> DeviceMesh:
    """Ranks as a table: those of a row divide layers, and rows read different parts of a batch."""
    alone = {} if dist.is_torchelastic_launched() else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    if HAS_GPU:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("cpu:gloo,cuda:nccl" if HAS_GPU else "gloo", timeout=timeout, **alone)
    ranks = dist.get_world_size()
    columns = {"tp": ranks, "fsdp+tp": min(2, ranks)}.get(parallel, 1)
    if ranks % columns:
        raise SystemExit(f"--parallel {parallel} needs an even number of ranks; there are {ranks}")
    table = torch.arange(ranks).view(-1, columns)
    groups = [dist.new_subgroups_by_enumeration(each.tolist(), timeout)[0] for each in (table.T, table)]
    return DeviceMesh.from_group(groups, DEVICE, table, mesh_dim_names=("dp", "tp"))


# %% The model of a rank
# The order matters: checkpointed activations, tensor_parallel, fully_sharded, the optimizer, whose groups each hold
# parameters of one kind.
def model_and_optimizer(s: Sizes, mesh: DeviceMesh, options: argparse.Namespace) -> Both:
    """The same initial weights each time, divided among the ranks."""
    torch.manual_seed(0)
    heads = {"num_heads": s.heads, "num_kv_heads": s.heads // 2}
    model: torch.nn.Module = LanguageModel(256, s.dim, num_layers=s.layers, max_position=s.length, **heads).to(DEVICE)
    if options.checkpoint_activations:  # the backward computes each block again
        for block in model.blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    if "tp" in options.parallel:
        distributed.tensor_parallel(model, mesh["tp"])
    if "fsdp" in options.parallel:
        more: dict[str, Any] = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if HAS_GPU else {}
        if options.offload:  # parameters, gradients and the optimizer's state lie in the memory of the CPU
            more["offload_policy"] = CPUOffloadPolicy(pin_memory=HAS_GPU)
        distributed.fully_sharded(model, mesh["dp"], **more)
    elif options.parallel == "ddp":
        model = distributed.data_parallel(model, mesh["dp"]).model
    groups = [{"params": kind} for kind in distributed.parameter_kinds(model)]
    return model, torch.optim.AdamW(groups, 2e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


# %% A step
# Gradients of several batches add up before the optimizer reads them, and only the last backward sends them. GPUs
# multiply in bfloat16: by autocast, unless `fully_sharded` has cast the parameters.
def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> Tensor:
    """Train on this rank's part of batches of bytes, `(B, length + 1)` each; return its mean loss."""
    total, autocast = torch.zeros((), device=DEVICE), HAS_GPU and not isinstance(model, FSDPModule)
    for index, tokens in enumerate(batches):
        with sends_gradients(model, index == len(batches) - 1):
            with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
                loss = model(tokens[:, :-1], targets=tokens[:, 1:]) / len(batches)
            loss.backward()
        total += loss.detach()
    distributed.clip_gradients(model, 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total


def sends_gradients(model: torch.nn.Module, sends: bool) -> contextlib.AbstractContextManager[None]:
    """Say whether a backward adds up gradients over the ranks that read different parts."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(sends)
    elif isinstance(model, DistributedDataParallel) and not sends:
        return model.no_sync()
    return contextlib.nullcontext()


# %% Data
# Pieces of all modules, in the order of their names. Every rank draws the same indices and reads its part of them.
def data(s: Sizes) -> Tensor:
    """Pieces `(count, length + 1)`, uint8."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    return text[: len(text) // (s.length + 1) * (s.length + 1)].view(-1, s.length + 1)


# %% Checkpoints
# Each rank writes its part from a copy, while training goes on. The names of tensors do not depend on the ranks, so any
# number of ranks can read them. A folder is complete when it has `.metadata`, which is written last.
class ShardedCheckpoints:
    """Checkpoints `step-N` of a model, its optimizer and `parts` that have `state_dict`; the newest two are kept."""

    def __init__(self, folder: Path, timeout: datetime.timedelta, both: Both, parts: dict[str, Any]) -> None:
        self.folder, self.both, self.parts, self.saving = folder, both, parts, None
        # A group for the thread that saves: exchanges of the main thread must not mix with those of another.
        self.group = dist.new_group(timeout=timeout, backend="gloo")

    def state(self) -> dict[str, Any]:
        """This rank's parts of all that changes; the names are the same under `ddp` and `fsdp`."""
        model, optimizer = get_state_dict(*self.both)
        return {"model": model, "optimizer": optimizer, **self.parts}

    def resume(self) -> int:
        """Load the newest complete checkpoint; the number of its steps, 0 without one."""
        newest = self.complete()[-1:]
        dist.broadcast_object_list(found := newest or [None], group=self.group)  # what rank 0 saw
        if found[0] is None:
            return 0
        state, saved = self.state(), dcp.FileSystemReader(found[0]).read_metadata().state_dict_metadata
        if missing := {f"model.{name}" for name in state["model"]} - saved.keys():  # tp divides packed layers
            raise SystemExit(f"{found[0]} has no {min(missing)}: resume with tp what tp saved, without it the rest")
        dcp.load(state, checkpoint_id=found[0], process_group=self.group)
        set_state_dict(*self.both, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        return int(found[0].name.removeprefix("step-"))

    def save(self, step: int) -> None:
        """Copy everything, and begin to write the copy."""
        self.wait()
        folder = self.folder / f"step-{step:010}"
        self.saving = dcp.async_save(self.state(), checkpoint_id=folder, process_group=self.group)

    def wait(self) -> None:
        """Wait until the last checkpoint is complete."""
        if self.saving is not None:
            self.saving.result()
        for old in self.complete()[:-2] if dist.get_rank() == 0 else ():
            shutil.rmtree(old)

    def complete(self) -> list[Path]:
        """The complete checkpoints, in the order of steps."""
        return sorted(file.parent for file in self.folder.glob("step-*/.metadata"))


# %% Training
# Rank 0 writes the loss of each step into losses.txt. A resumed run drops the lines after its checkpoint.
def train(s: Sizes, folder: Path, options: argparse.Namespace) -> tuple[int, float]:
    """Train to the end, from the newest checkpoint in the folder if there is one; steps of this run and seconds."""
    mesh, pieces = start(options.parallel, options.timeout), data(s)
    group, rank, ranks = mesh.get_group("dp"), mesh.get_local_rank("dp"), mesh.size(0)
    if s.batch % ranks:
        raise SystemExit(f"{ranks} ranks do not divide a batch of {s.batch} pieces: use a divisor")
    model, optimizer = both = model_and_optimizer(s, mesh, options)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=s.steps + 1)
    batches = ShuffledBatches(len(pieces), s.batch)
    checkpoints = ShardedCheckpoints(folder, options.timeout, both, {"schedule": schedule, "batches": batches})
    first = checkpoints.resume()
    if (total := schedule.total_steps - 1) != s.steps:
        raise SystemExit(f"{folder} has a run of {total} steps, not of {s.steps}: give another folder with --out")
    if dist.get_rank() == 0:
        print(f"step {first} of {s.steps}: " + ("begin" if first == 0 else "resume"), flush=True)
    log, begin = folder / "losses.txt" if dist.get_rank() == 0 else Path(os.devnull), time.perf_counter()
    lines = log.read_text().splitlines(keepends=True)[:first] if log.exists() else []
    with log.open("w", buffering=1) as file:
        file.writelines(lines)
        for done in range(first + 1, s.steps + 1):
            mine = [pieces[next(batches).view(ranks, -1)[rank]].to(DEVICE).long() for _ in range(s.accumulate)]
            loss = step(model, optimizer, mine)
            schedule.step()
            dist.all_reduce(loss, group=group)
            file.write(f"{done} {float(loss) / ranks!r}\n")
            if done % options.every == 0 or done == s.steps:
                checkpoints.save(done)
    checkpoints.wait()
    return s.steps - first, time.perf_counter() - begin


def main(argv: list[str] | None = None) -> None:
    """Start, train, end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parallel", choices=("ddp", "fsdp", "tp", "fsdp+tp"), default="ddp")
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps")
    parser.add_argument("--out", type=Path, help="folder of checkpoints and losses, to resume from; all ranks see it")
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--checkpoint-activations", action="store_true", help="keep the inputs of blocks alone")
    parser.add_argument("--offload", action="store_true", help="fsdp: keep parameters and optimizer on the CPU")
    parser.add_argument("--timeout", type=float, default=300, help="seconds that a rank waits for another")
    options = parser.parse_args(argv)
    if options.offload and "fsdp" not in options.parallel:
        parser.error(f"--offload is of fsdp, not of {options.parallel}")
    if dist.is_torchelastic_launched() and options.out is None:
        parser.error("--out is missing: the ranks need one folder")
    if options.every < 1 or options.timeout <= 0:
        parser.error(f"--every, --timeout: given {options.every} and {options.timeout}; both must be above 0")
    options.timeout, s = datetime.timedelta(seconds=options.timeout), sizes(options.quick)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.out or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        steps, took = train(s, folder, options)
        if dist.get_rank() == 0:
            losses = [float(line.split()[1]) for line in (folder / "losses.txt").read_text().splitlines()]
            speed = steps * s.accumulate * s.batch * s.length / took
            print(f"{options.parallel}, ranks: {dist.get_world_size()}. Nats a byte: {losses[0]:.3f} at first, "
                  f"{losses[-1]:.3f} after {len(losses)} steps, {speed:.0f} tokens/s.")  # fmt: skip
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
