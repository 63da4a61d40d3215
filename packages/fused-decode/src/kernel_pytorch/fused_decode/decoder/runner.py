"""Runs steps: captured as CUDA graphs on a GPU, called on a CPU; and brings their tokens to the host."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .step import Step

BEHIND = 2
"""How many steps the host reads behind the GPU."""


class Runner:
    """Replays of a step; greedy and sampling are a graph each, captured when first needed."""

    def __init__(self, step: Step) -> None:
        self.step, self.device = step, step.tokens.device
        self._graphs: dict[bool, torch.cuda.CUDAGraph] = {}
        on_gpu = self.device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if on_gpu else None
        slots = (2 * BEHIND, step.tokens.shape[0])
        self._slots = torch.zeros(slots, dtype=torch.int64, pin_memory=on_gpu)
        self._events = [torch.cuda.Event() for _ in range(len(self._slots))] if on_gpu else []

    def prepare(self, sample: bool) -> None:
        """Capture the step while no row is in use, so that nothing is written.

        A failed capture leaves no graph, and gives its memory back.
        """
        if self.device.type != "cuda" or sample in self._graphs:
            return
        self.step.caches.lengths.fill_(-1)
        with torch.cuda.device(self.device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):  # kernels are compiled and their memory is found before the capture
                for _ in range(2):
                    self.step(sample)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                    self.step(sample)
            except BaseException:
                graph.reset()
                raise
        self._graphs[sample] = graph

    def tokens(self, sample: bool, count: int, rows: int) -> Iterator[list[int]]:
        """The tokens that the step chose last, and those of the `count - 1` steps that follow.

        On a GPU they come `BEHIND` steps late, while the GPU works on; who has enough stops asking.
        """
        if self.device.type != "cuda":
            for index in range(count):
                if index:
                    self.step(sample)
                yield self.step.chosen[:rows].tolist()
            return
        with torch.cuda.device(self.device):
            for index in range(count + BEHIND):
                if index < count:
                    if index:
                        self._graphs[sample].replay()
                    self._slots[index % len(self._slots)].copy_(self.step.chosen, non_blocking=True)
                    self._events[index % len(self._slots)].record()
                if index >= BEHIND:
                    slot = (index - BEHIND) % len(self._slots)
                    self._events[slot].synchronize()
                    yield self._slots[slot][:rows].tolist()

    def close(self) -> None:
        """Give the graphs' memory back."""
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()
