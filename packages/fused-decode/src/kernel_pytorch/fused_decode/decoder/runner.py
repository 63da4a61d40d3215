"""Runs steps: captured as CUDA graphs on a GPU, called on a CPU; and says whose tokens the host can read."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator

import torch

from .prompt import Prompts
from .step import Step

BEHIND = 2
"""How many steps the host reads behind the GPU."""


class Runner:
    """Replays of a step; each way to choose is a graph, captured when first needed."""

    def __init__(self, step: Step) -> None:
        self.step, self.device = step, step.tokens.device
        self._graphs: dict[str, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}  # with their logits
        on_gpu = self.device.type == "cuda"
        self._pool = torch.cuda.graph_pool_handle() if on_gpu else None
        self._stream: torch.cuda.Stream | None = None
        self._events = [torch.cuda.Event() for _ in range(2 * BEHIND)] if on_gpu else []
        self.prompts = Prompts(step.plan, step.caches, self._capture if on_gpu else None)

    def prepare(self, how: str) -> None:
        """Capture the step while no row is in use, so that nothing is written.

        A failed capture leaves no graph, and gives its memory back.
        """
        if self.device.type != "cuda" or how in self._graphs:
            return
        self.step.caches.lengths.fill_(-1)
        self._graphs[how] = self._capture(lambda: self.step(how))

    def _capture(self, call: Callable[[], torch.Tensor]) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """Capture a call after it ran twice, with what it returns."""
        with torch.cuda.device(self.device):
            for _ in range(2):  # kernels are compiled and their memory is found before the capture
                call()
            self._stream = stream = self._stream or _new_stream(self.device)
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                    found = call()
            except BaseException:
                graph.reset()
                raise
        return graph, found

    @torch.no_grad()
    def run(self, how: str) -> None:
        """Run one step."""
        if self.device.type != "cuda":
            self.step(how)
            return
        graph, self.step.last_logits = self._graphs[how]
        with torch.cuda.device(self.device):
            graph.replay()

    def steps(self, how: str, count: int) -> Iterator[int]:
        """From 0 on, the numbers of steps whose tokens are in `history`; 0 is the choice that was made before.

        On a GPU they come `BEHIND` steps late, while the GPU works on; who has enough stops asking.
        """
        if self.device.type != "cuda":
            for index in range(count):
                if index:
                    self.run(how)
                yield index
            return
        caches = self.step.caches
        with torch.cuda.device(self.device):
            for index in range(count + BEHIND):
                if index < count:
                    if index:
                        self.run(how)
                    if not self.step.has_kernel(how):
                        caches.history.copy_(caches.written, non_blocking=True)
                    self._events[index % len(self._events)].record()
                if index >= BEHIND:
                    self._events[(index - BEHIND) % len(self._events)].synchronize()
                    yield index - BEHIND

    def close(self) -> None:
        """Give the graphs' memory back."""
        self.prompts.close()
        for graph, _ in self._graphs.values():
            graph.reset()
        self._graphs.clear()


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    """A stream that nothing else has used or will use, to capture on.

    PyTorch keeps a workspace of cuBLAS for each stream, and frees all of them whenever `torch.compile` records a CUDA
    graph, also those that graphs of others have captured. On a new stream the workspace is allocated during the
    capture, from the graph's own pool, which nothing else can use. PyTorch's streams come from a list of 32 that all
    code shares. The stream is never destroyed: its address would find the workspace again.
    """
    stream = ctypes.c_void_p()
    driver = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    if error := driver.cuStreamCreate(ctypes.byref(stream), 1):  # CU_STREAM_NON_BLOCKING
        raise RuntimeError(f"cuStreamCreate: CUDA driver error {error}")
    return torch.cuda.ExternalStream(stream.value, device)
