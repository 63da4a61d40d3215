"""Checkpoints that survive a kill at any moment, and batches with a position that can be saved.

checkpoints = Checkpoints("run", {"model": model, "optimizer": optimizer, "batches": batches})
for step in range(checkpoints.resume(), steps):  # from 0 where there is no checkpoint yet
    train(model, optimizer, next(batches))
    checkpoints.save(step + 1)
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .techniques import check_integers

if TYPE_CHECKING:
    from torch.distributed.checkpoint.stateful import Stateful

PREFIX, SUFFIX, TEMPORARY = "step-", ".pt", ".tmp"


class Checkpoints:
    """Checkpoints of a training run in a folder, one file each; only the newest are kept.

    A file appears under its name only when all of it is on the disk, so a process may be killed at any moment, also
    while it saves. Only one process may write to a folder at a time.

    In addition to the parts each file holds the state of all random generators: of PyTorch on the CPU and all GPUs, of
    Python, of NumPy where it is imported, and those given. A resumed run computes what the interrupted run would have
    computed, bit for bit where its operators are deterministic.

    Args:
        folder: where the files are; made when needed.
        parts: by name, all that changes from step to step and has `state_dict` and `load_state_dict`: model, optimizer,
            schedule, gradient scaler, `ShuffledBatches`, ... For a compiled model give the module that was compiled.
        generators: by name, generators that the run draws from, other than the global ones.
        keep: number of files to keep, at least 1 (else ValueError).

    Raises:
        TypeError: a part has no `state_dict`.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        parts: Mapping[str, Stateful],
        generators: Mapping[str, torch.Generator] | None = None,
        keep: int = 2,
    ) -> None:
        if keep < 1:
            raise ValueError(f"keep: given {keep}; it must be at least 1")
        for name, part in parts.items():
            if not hasattr(part, "state_dict"):
                raise TypeError(f"parts: {name!r} is {type(part).__name__}; it needs state_dict and load_state_dict")
        self.folder, self.parts, self.generators, self.keep = Path(folder), parts, generators or {}, keep

    def files(self) -> list[Path]:
        """The existing checkpoints, in the order of steps."""
        return sorted(self.folder.glob(f"{PREFIX}*{SUFFIX}"))

    def save(self, step: int) -> Path:
        """Write a checkpoint after this many steps, delete the oldest beyond `keep`, and return the file.

        Raises:
            TypeError: step is no integer.
            ValueError: step is negative.
            pickle.UnpicklingError: a part's state holds an object that could not be loaded again; no file is left.
        """
        check_integers(step=step)
        if step < 0:
            raise ValueError(f"step: given {step}; it must be at least 0")
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / f"{PREFIX}{step:010}{SUFFIX}"
        temporary = file.with_suffix(TEMPORARY)
        content = {
            "step": step,
            "parts": {name: part.state_dict() for name, part in self.parts.items()},
            "generators": {name: generator.get_state() for name, generator in self.generators.items()},
            "random": _random_states(),
        }
        try:
            with temporary.open("wb") as stream:
                torch.save(content, stream)
                stream.flush()
                os.fsync(stream.fileno())
            _load(temporary, mmap=True)  # reads no tensor: checks that the objects can be loaded
            temporary.replace(file)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(self.folder)
        for old in [*self.files()[: -self.keep], *self.folder.glob(f"{PREFIX}*{TEMPORARY}")]:
            old.unlink()
        return file

    def resume(self) -> int:
        """Load the newest checkpoint, and return the number of steps; 0 without one, and nothing is changed then.

        Raises:
            ValueError: the checkpoint has other parts or generators than these, or its file is damaged.
        """
        files = self.files()
        if not files:
            return 0
        try:
            content = _load(files[-1])
        except Exception as error:  # whatever reading a damaged file raises
            older = f"delete it to resume from {files[-2].name}" if len(files) > 1 else "there is no older one"
            raise ValueError(f"{files[-1]}: cannot be read ({type(error).__name__}: {error}); {older}") from error
        for kind, given in (("parts", self.parts), ("generators", self.generators)):
            if content[kind].keys() != given.keys():
                held = ", ".join(content[kind]) or "none"
                raise ValueError(f"{kind}: given {', '.join(given) or 'none'}; {files[-1].name} has {held}")
        for name, part in self.parts.items():
            part.load_state_dict(content["parts"][name])
        for name, generator in self.generators.items():
            generator.set_state(content["generators"][name])
        _set_random_states(content["random"])
        return int(content["step"])


class ShuffledBatches(Iterator[Tensor]):
    """Endless batches of indices `(batch_size,)`, int64: each epoch is all of `range(length)` in another order.

    The order depends only on seed and epoch, not on any generator, so a position is two numbers. The rest of an epoch
    that does not fill a batch is dropped. ValueError if batch_size is not from 1 to length.
    """

    def __init__(self, length: int, batch_size: int, seed: int = 0) -> None:
        check_integers(length=length, batch_size=batch_size)
        if not 1 <= batch_size <= length:
            raise ValueError(f"batch_size: given {batch_size}; it must be from 1 to length, {length}")
        self.length, self.batch_size, self.seed = length, batch_size, seed
        self.epoch = self.position = 0
        self._order = self._shuffled()

    def __next__(self) -> Tensor:
        """The indices of the next batch."""
        if self.position + self.batch_size > self.length:
            self.epoch, self.position = self.epoch + 1, 0
            self._order = self._shuffled()
        self.position += self.batch_size
        return self._order[self.position - self.batch_size : self.position]

    def _shuffled(self) -> Tensor:
        # A new generator per epoch: consecutive seeds give unrelated streams.
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        return torch.randperm(self.length, generator=generator)

    def state_dict(self) -> dict[str, int]:
        """The position."""
        return {"length": self.length, "seed": self.seed, "epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Go to a position; ValueError if it is one in other data."""
        if (found := state_dict["length"]) != self.length:
            raise ValueError(f"length: the checkpoint's is {found}; it must be that of these data, {self.length}")
        self.seed, self.epoch, self.position = (state_dict[name] for name in ("seed", "epoch", "position"))
        self._order = self._shuffled()


def _load(file: Path, mmap: bool = False) -> dict[str, Any]:
    # weights_only: a file from elsewhere cannot run code.
    content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    return content


def _random_states() -> dict[str, Any]:
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    if numpy := sys.modules.get("numpy"):
        kind, keys, *rest = numpy.random.get_state()
        states["numpy"] = [kind, keys.tolist(), *rest]
    return states


def _set_random_states(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])
    if "numpy" in states and (numpy := sys.modules.get("numpy")):
        numpy.random.set_state(tuple(states["numpy"]))


def _sync_folder(folder: Path) -> None:
    """Write the new name to the disk too; Windows has no such call."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
