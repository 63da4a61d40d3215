"""Capture calls into a CUDA graph, so that a failed capture has no effect on later calls."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Make torch raise RuntimeError where an operation would wait for the GPU: the usual reason of failed captures.

    Call a function inside it before capturing it, so that no capture begins that has to fail.
    """
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        # torch announces, once per process, that this mode does not find every wait.
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextlib.contextmanager
def captured(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> Iterator[None]:
    """Capture like `torch.cuda.graph`, and restore the random generator if that fails.

    A capture that fails leaves torch's generator of the device in capture mode, and every random number of the process
    is an error from then on. A copy of its state is not in that mode.
    """
    try:
        with torch.cuda.graph(graph, stream=stream):
            yield
    except BaseException:
        generator = torch.cuda.default_generators[stream.device.index]
        generator.graphsafe_set_state(generator.clone_state())
        raise
