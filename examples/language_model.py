"""Train a language model on the source text of Python's standard library, and see what fused functions do to its speed.

After reading it you can write a training loop that accumulates gradients, trains in mixed precision on a GPU, survives
Ctrl-C and a killed process, and generates text.

- Needs: the packages of this workspace. No GPU, no download: the data is the source of this Python.
- Runs in 45 seconds on two cores with `--quick`, in 5 minutes without; on a GPU the model is 40 times as large.
- Command: `python examples/language_model.py --quick --out run`. The same command resumes a run that was stopped.
- Last lines: a generated text, a table of step times, and a sentence with the speedup.
"""

# %% Imports
from __future__ import annotations

import argparse
import contextlib
import copy
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kernel_pytorch.harness.clock import compare_paired
from kernel_pytorch.models import LanguageModel
from kernel_pytorch.models.training import Checkpoints, ShuffledBatches


# %% Sizes
@dataclass(frozen=True)
class Sizes:
    """Sizes of the model, and of a step: `accumulate` batches of `batch` pieces of `length` bytes."""

    device: str
    dim: int
    layers: int
    heads: int
    length: int
    batch: int
    accumulate: int
    steps: int


def sizes(quick: bool) -> Sizes:
    """Sizes for this machine."""
    if torch.cuda.is_available():
        return Sizes("cuda", 1024, 12, 16, 1024, 16, 2, 100 if quick else 2000)
    return Sizes("cpu", 128, 4, 4, 128, 8, 2, 60 if quick else 600)


# %% A step
# `targets=` returns the loss: the last layer and the cross entropy are one function, which never holds the logits of a
# large vocabulary. Gradients of several batches add up before the optimizer reads them.
# --8<-- [start:step]
def step(model: LanguageModel, optimizer: torch.optim.Optimizer, batches: list[Tensor]) -> Tensor:
    """Train on batches of bytes `(B, length + 1)`; their mean loss."""
    total = torch.zeros((), device=batches[0].device)
    for tokens in batches:
        with mixed_precision(tokens.device):
            loss = model(tokens[:, :-1], targets=tokens[:, 1:]) / len(batches)
        loss.backward()
        total += loss.detach()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return total


def mixed_precision(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Products in bfloat16 on GPUs that have it; weights stay in float32, and so no gradient scaler is needed."""
    has = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.autocast("cuda", torch.bfloat16) if has else contextlib.nullcontext()


# --8<-- [end:step]
# %% Data
# Pieces of all modules, in the order of their names. The last ones are held out, to compute the loss of unseen text.
def data(s: Sizes) -> tuple[Tensor, Tensor]:
    """Pieces `(count, length + 1)` for training and for testing, uint8."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    pieces = text[: len(text) // (s.length + 1) * (s.length + 1)].view(-1, s.length + 1)
    return pieces[:-64], pieces[-64:]


def model_and_optimizer(s: Sizes) -> tuple[LanguageModel, torch.optim.Optimizer]:
    """The same initial weights each time."""
    torch.manual_seed(0)
    heads = {"num_heads": s.heads, "num_kv_heads": s.heads // 2}
    model = LanguageModel(256, s.dim, num_layers=s.layers, max_position=2 * s.length, **heads).to(s.device)
    return model, optimizer_of(model)


def optimizer_of(model: LanguageModel) -> torch.optim.Optimizer:
    """AdamW in one kernel."""
    return torch.optim.AdamW(model.parameters(), 2e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


# %% Training that can be stopped
# A checkpoint holds everything that changes: weights, optimizer, schedule, the position in the data, random generators.
# Its file appears only when it is complete. A run that is stopped loses only the steps since the last checkpoint.
def train(s: Sizes, folder: Path, every: int = 20) -> tuple[LanguageModel, list[tuple[int, float]]]:
    """Train to the end, from the newest checkpoint in the folder if there is one; return the losses of this run."""
    pieces, _ = data(s)
    model, optimizer = model_and_optimizer(s)
    batches = ShuffledBatches(len(pieces), s.batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=s.steps + 1)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "batches": batches}
    checkpoints = Checkpoints(folder, parts)
    done, losses = checkpoints.resume(), []
    if (total := schedule.total_steps - 1) != s.steps:
        raise SystemExit(f"{folder} has a run of {total} steps, not of {s.steps}: give another folder with --out")
    print(f"step {done} of {s.steps}: " + ("begin" if done == 0 else f"resume from {checkpoints.files()[-1].name}"))
    try:
        while done < s.steps:
            loss = step(model, optimizer, [pieces[next(batches)].to(s.device).long() for _ in range(s.accumulate)])
            schedule.step()
            done += 1
            losses.append((done, float(loss)))
            if done % every == 0 or done == s.steps:
                checkpoints.save(done)
                print(f"step {done} of {s.steps}: loss {losses[-1][1]:.3f} nats a byte")
    except KeyboardInterrupt:  # the step may be incomplete, so nothing is saved here
        newest = [file.name for file in checkpoints.files()[-1:]] or ["the beginning"]
        print(f"\nstopped after step {done}; the same command resumes from {newest[0]}")
        raise SystemExit(130) from None  # as the shell does; without a traceback
    return model, losses


def loss_of_unseen(model: LanguageModel, s: Sizes) -> float:
    """The loss of the held-out pieces."""
    tokens = data(s)[1].to(s.device).long()
    with torch.no_grad(), mixed_precision(tokens.device):
        return float(model(tokens[:, :-1], targets=tokens[:, 1:]))


def text_of(model: LanguageModel, s: Sizes, prompt: str = "def ") -> str:
    """A text that the model generates after a prompt."""
    tokens = torch.tensor([list(prompt.encode())], device=s.device)
    generator = torch.Generator(s.device).manual_seed(0)
    found = model.generate(tokens, s.length - len(prompt), temperature=0.7, top_k=40, generator=generator)
    return bytes(found[0].tolist()).decode(errors="replace")


# %% Before and after
# The same weights and the same batches; all four take turns, and ratios are between steps of the same round.
Train = Callable[[list[Tensor]], Tensor]


def variants(s: Sizes) -> dict[str, Train]:
    """A training step of each variant, on its own copy of the weights."""
    start, _ = model_and_optimizer(s)
    found: dict[str, Train] = {}
    for name, techniques in (("plain PyTorch", ()), ("ours", None)):
        for compiled in (False, True):
            model = copy.deepcopy(start).use(techniques=techniques)
            optimizer = optimizer_of(model)
            called = torch.compile(model, fullgraph=True) if compiled else model
            found[name + (", torch.compile" if compiled else "")] = trained_by(called, optimizer)
    return found


def trained_by(model: LanguageModel, optimizer: torch.optim.Optimizer) -> Train:
    """A step of this model. The learning rate rises slowly, so that rounding does not change the losses."""
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.02, total_iters=50)

    def trained(batches: list[Tensor]) -> Tensor:
        loss = step(model, optimizer, batches)
        warm_up.step()
        return loss

    return trained


def compare(s: Sizes, rounds: int) -> str:
    """Print step times and losses; return a sentence with the speedup."""
    pieces, _ = data(s)
    order, trainers = ShuffledBatches(len(pieces), s.batch, seed=1), variants(s)
    seconds: dict[str, list[float]] = {name: [] for name in trainers}
    losses: dict[str, list[float]] = {name: [] for name in trainers}
    for turn in range(3 + rounds):
        batches = [pieces[next(order)].to(s.device).long() for _ in range(s.accumulate)]
        for name, trained in trainers.items():
            start = time.perf_counter()
            losses[name].append(float(trained(batches)))  # waits for the GPU
            if turn >= 3:  # the first steps compile
                seconds[name].append(time.perf_counter() - start)
    base, tokens = seconds["plain PyTorch"], s.accumulate * s.batch * s.length
    print(f"\n{'training step':30}{'ms':>8}{'tokens/s':>10}{'x of plain PyTorch':>26}{'loss off by':>13}")
    for name, found in seconds.items():
        ratio = "" if found is base else speedup(base, found)
        worst = max(abs(a - b) for a, b in zip(losses[name], losses["plain PyTorch"], strict=True))
        median = statistics.median(found)
        print(f"{name:30}{median * 1e3:8.1f}{tokens / median:10.0f}{ratio:>26}{worst:13.0e}")
    best = min(("ours", "ours, torch.compile"), key=lambda name: statistics.median(seconds[name]))
    compiled = seconds["plain PyTorch, torch.compile"]
    return f"{best}: {speedup(base, seconds[best])} of plain PyTorch, {speedup(compiled, seconds[best])} of it compiled"


def speedup(before: list[float], after: list[float]) -> str:
    """The speedup of paired samples, with its interval."""
    found = compare_paired(before, after).speedup
    return f"{found.median:.2f}x ({found.low:.2f} to {found.high:.2f})"


def main(argv: list[str] | None = None) -> None:
    """Train, write, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the steps")
    parser.add_argument("--out", type=Path, help="folder of the checkpoints, to resume from; default: a temporary one")
    options = parser.parse_args(argv)
    s = sizes(options.quick)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.out or Path(temporary)
        before = loss_of_unseen(model_and_optimizer(s)[0], s)
        model, _ = train(s, folder)
        after = loss_of_unseen(model, s)
        print(f"unseen text: {before:.3f} nats a byte before, {after:.3f} after; checkpoints: {folder}")
        print(f"it writes:\n{text_of(model, s)}")
    print(compare(s, 12 if options.quick else 47))


if __name__ == "__main__":
    main()
