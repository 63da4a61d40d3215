"""Did torch.compile compile? It may hand a call back to eager PyTorch without a word that a figure would show."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class Graphs:
    """What Dynamo did between two moments."""

    def __init__(self) -> None:
        self._before = self._compiled()
        self._breaks_before = self._breaks()

    def problem(self) -> str:
        """Why a figure would not be that of compiled code; empty if it would."""
        breaks = {reason for reason, count in self._breaks().items() if count > self._breaks_before.get(reason, 0)}
        if breaks:
            return f"is not compiled as a whole, graph breaks: {'; '.join(sorted(_first_line(b) for b in breaks))}"
        if self._compiled() == self._before:
            return "is not compiled: no graph reached a compiler and the call ran eagerly"
        return ""

    @staticmethod
    def _compiled() -> int:
        """Graphs that went past Dynamo, whose "eager" backend runs what was captured as it stands."""
        return sum(torch._dynamo.utils.counters["aot_autograd"].values())

    @staticmethod
    def _breaks() -> dict[str, int]:
        return dict(torch._dynamo.utils.counters["graph_break"])


@contextlib.contextmanager
def count_graphs() -> Iterator[Graphs]:
    """Watch Dynamo while the body calls something for the first time since `torch._dynamo.reset`.

    A function that was compiled too often raises meanwhile, where it would otherwise go on in eager PyTorch.
    """
    from torch._dynamo import config

    with config.patch(fail_on_recompile_limit_hit=True):
        yield Graphs()


def _first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "")
