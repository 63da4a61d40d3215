"""Joined weights: one tensor for several Parameters, which become parts of it, and the way back."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .plan import Plan

_joined: weakref.WeakValueDictionary[tuple[int, ...], Tensor] = weakref.WeakValueDictionary()
"""Tensors that a Decoder reads now, by the addresses of their parts: a second Decoder of a model shares them."""


class Weights:
    """The weights of a plan, joined without a second copy of them in memory.

    The Parameters stay the same objects with the same names, shapes and values. A layer's weights are copied into one
    tensor and then given back, so the most memory in use is one layer more. Each Parameter has a separate storage in
    that memory, as what saves checkpoints expects.
    """

    def __init__(self, model: torch.nn.Module, plan: Plan) -> None:
        self._parts: list[tuple[torch.nn.Parameter, ...]] = []
        self._model = model
        try:
            self.plan = plan.joined(self._join)
        except BaseException:
            with contextlib.suppress(RuntimeError):  # what stays joined has the same values
                self.revert()
            raise
        self._found = dict(_properties(model))

    def _join(self, parts: Sequence[torch.nn.Parameter]) -> Tensor:
        self._parts.append(tuple(parts))
        found = _joined.get(_addresses(parts))
        if found is not None:
            return found
        first, rows = parts[0].detach(), sum(part.shape[0] for part in parts)
        joined = torch.empty(rows, *first.shape[1:], dtype=first.dtype, device=first.device)
        views = joined.split([part.shape[0] for part in parts])
        for part, view in zip(parts, views, strict=True):
            view.copy_(part.detach())
        for part, view in zip(parts, views, strict=True):
            part.data = torch.from_dlpack(view)  # a separate storage, which keeps the memory
        _joined[_addresses(parts)] = joined
        return joined

    def replaced(self) -> str | None:
        """What of the model is another than when the weights were joined: a name; None if nothing is."""
        now = dict(_properties(self._model))
        if now == self._found:
            return None
        return next(name for name in (*self._found, *now) if self._found.get(name) != now.get(name))

    @torch.inference_mode(False)
    @torch.no_grad()
    def revert(self) -> None:
        """Copy each Parameter that is still a part of a joined tensor."""
        while self._parts:
            parts = self._parts[-1]
            if _joined.pop(_addresses(parts), None) is not None:
                for part, alone in zip(parts, [part.detach().clone() for part in parts], strict=True):
                    part.data = alone
            self._parts.pop()


def _addresses(parts: Sequence[Tensor]) -> tuple[int, ...]:
    return tuple(part.data_ptr() for part in parts)


def _properties(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """By name: which modules there are, their numbers, where Parameters are and which values buffers have."""
    for path, module in model.named_modules():
        own = module.__dict__
        simple = {name: value for name, value in own.items() if isinstance(value, (int, float)) and name != "training"}
        yield path or type(module).__name__, (id(module), simple)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield f"{path}.{name}", parameter.data_ptr()
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield f"{path}.{name}", (buffer.data_ptr(), 0 if buffer.is_inference() else buffer._version)
