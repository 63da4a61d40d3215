"""Verification from Python, and what it shares with `benchmark.bench`: what the commands print, as records."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from kernel_pytorch.harness.availability import parse_device
from kernel_pytorch.harness.discovery import discover
from kernel_pytorch.harness.errors import UserError
from kernel_pytorch.harness.isolation import Workers
from kernel_pytorch.harness.results import VerificationReport
from kernel_pytorch.harness.technique import Operation, Technique
from kernel_pytorch.harness.verification import Verification, report
from kernel_pytorch.harness.verification import verify as verify_technique


@contextlib.contextmanager
def without_deprecations() -> Iterator[None]:
    """Leave out the warnings that `torch.jit` is deprecated."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".torch.jit.*deprecated")
        yield


@without_deprecations()
def verify(
    name: str | Technique,
    *,
    levels: Sequence[str] | None = None,
    device: torch.device | str | None = None,
    exhaustive: bool = False,
    workers: Workers | None = None,
    on_trial: Callable[[Verification], None] = lambda verification: None,
) -> VerificationReport:
    """Check every level of a technique's public functions against the definition in float64.

    Forward and gradients, on awkward and adversarial inputs; the rules are those of `kernel_pytorch.harness.oracle`.
    Each of the report's `levels` lists its `failures`.

    Args:
        name: of an installed technique, as `kernel-pytorch list` prints it, or its declaration.
        levels: names of the levels to check; all of them if None.
        device: cpu, cuda or cuda:1; CUDA where there is a GPU if None.
        exhaustive: run torch.compile on every case too, not on the core cases alone.
        workers: processes that the cases run in, so that one that crashes costs itself alone; None for this process.
        on_trial: called with each verification when it is done.

    Raises:
        UserError: no such technique, level or device; the message lists those that exist.
    """
    where, technique = parse_device(None if device is None else str(device)), find_technique(name)
    check_names(technique.name, "level", levels, level_names(technique.operations))
    chosen = None if levels is None else list(levels)
    found = []
    for verification in verify_technique(technique, where, levels=chosen, exhaustive=exhaustive, workers=workers):
        found.append(verification)
        on_trial(verification)
    return report(technique, found, where)


def find_technique(name: str | Technique) -> Technique:
    """The installed technique of that name. Raises UserError if there is none, listing those that exist."""
    return discover().get(name) if isinstance(name, str) else name


def level_names(operations: Iterable[Operation]) -> list[str]:
    """Names of all levels and peers, each once."""
    return list(dict.fromkeys(itertools.chain.from_iterable([i.name for i in o.implementations] for o in operations)))


def check_names(owner: str, what: str, given: Sequence[str] | None, known: Sequence[str]) -> None:
    """Raise TypeError for a string instead of a list of names, UserError for a name that does not exist."""
    if isinstance(given, str):
        raise TypeError(f"{what}s: given {given!r}; allowed is a list of names, such as [{given!r}]")
    for each in given or ():
        if each not in known:
            raise UserError(f"{owner} has no {what} {each!r}; there are: {', '.join(known)}")
