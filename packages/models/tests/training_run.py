"""Training runs that end themselves: `python training_run.py FOLDER STEPS STAGE:COUNT ...`, for `test_training.py`.

One run follows the other in the same folder, each a process of its own, and the last is not killed. Printed are the
exit status of each, and the steps of the checkpoints that are there then. They are forks of one process that has
imported PyTorch, which takes seconds.

STAGE is where SIGKILL strikes, COUNT at which save or step: "write" when half of a file is written, "fsync" before it
is on the disk, "replace" before it has its name, "unlink" before old ones are deleted, "step" after a step.
"""

import os
import random
import signal
import sys
from pathlib import Path

import numpy as np
import torch

from kernel_pytorch.models import Checkpoints, ShuffledBatches


def strike(stage, count):
    """Let the process end at the given stage."""
    owner, name = {
        "write": (torch, "save"), "fsync": (os, "fsync"), "replace": (Path, "replace"), "unlink": (Path, "unlink"),
    }[stage]  # fmt: skip
    own, calls = getattr(owner, name), [0]

    def struck(*args, **kwargs):
        calls[0] += 1
        if calls[0] == count:
            if stage == "write":
                args[1].write(b"half of it")
                args[1].flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return own(*args, **kwargs)

    setattr(owner, name, struck)


def train(folder, steps, stage, count):
    """Train; a line of losses.txt for each step."""
    if stage not in ("step", ""):
        strike(stage, count)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    noise = torch.Generator().manual_seed(5)
    data = torch.randn(20, 4, generator=torch.Generator().manual_seed(9))
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    scaler = torch.amp.GradScaler("cpu", growth_interval=3)
    batches = ShuffledBatches(20, 6, seed=3)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "scaler": scaler, "batches": batches}
    checkpoints = Checkpoints(folder / "checkpoints", parts, {"noise": noise})
    start = checkpoints.resume()
    for step in range(start + 1, steps + 1):
        x = data[next(batches)]
        x = x + 0.1 * torch.randn(x.shape, generator=noise) + 0.1 * random.random() + 0.1 * float(np.random.rand())
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        with (folder / "losses.txt").open("a") as stream:
            stream.write(f"{step} {loss.item().hex()} {scaler.get_scale()} {schedule.get_last_lr()[0].hex()}\n")
        if stage == "step" and step - start == count:
            os.kill(os.getpid(), signal.SIGKILL)
        if step % 2 == 0:
            checkpoints.save(step)
    torch.save(model.state_dict(), folder / "final.pt")


def main(folder, steps, *stages):
    """Run until the last is done."""
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])  # imports Dynamo
    for stage in (*stages, ":0"):
        name, count = stage.split(":")
        child = os.fork()
        if child == 0:
            train(folder, steps, name, int(count))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        files = sorted((folder / "checkpoints").glob("*.pt"))
        for file in files:
            torch.load(file, weights_only=True)
        print(stage, os.waitstatus_to_exitcode(status), *(int(file.stem[5:]) for file in files), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
