"""Joined weights: one tensor for several Parameters, which become views of it, and the way back."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor

from .plan import Plan


class Weights:
    """The weights of a plan, joined without a second copy of them in memory.

    The Parameters stay the same objects with the same names, shapes and values. A layer's weights are copied into one
    tensor and then given back, so the most memory in use is one layer more.
    """

    def __init__(self, model: torch.nn.Module, plan: Plan) -> None:
        self._parts: list[tuple[torch.nn.Parameter, ...]] = []
        try:
            self.plan = plan.joined(self._join)
        except BaseException:
            with contextlib.suppress(RuntimeError):  # what stays joined has the same values
                self.revert()
            raise
        self._places = [
            (f"{path}.{name}", module, name, parameter.data_ptr())
            for path, module in model.named_modules()
            for name, parameter in module._parameters.items() if parameter is not None
        ]  # fmt: skip

    def _join(self, parts: Sequence[torch.nn.Parameter]) -> Tensor:
        first, rows = parts[0].detach(), sum(part.shape[0] for part in parts)
        if _adjoin(parts):
            return first.as_strided((rows, *first.shape[1:]), first.stride())
        joined = torch.empty(rows, *first.shape[1:], dtype=first.dtype, device=first.device)
        views = joined.split([part.shape[0] for part in parts])
        for part, view in zip(parts, views, strict=True):
            view.copy_(part.detach())
        for part, view in zip(parts, views, strict=True):
            part.data = view
        self._parts.append(tuple(parts))
        return joined

    def replaced(self) -> str | None:
        """The name of a Parameter that has other memory than when the weights were joined; None if there is none."""
        for path, module, name, pointer in self._places:
            parameter = module._parameters.get(name)
            if parameter is None or parameter.data_ptr() != pointer:
                return path
        return None

    @torch.inference_mode(False)
    @torch.no_grad()
    def revert(self) -> None:
        """Copy each Parameter that is still a view."""
        while self._parts:
            parts = self._parts[-1]
            if _adjoin(parts):
                for part, alone in zip(parts, [part.detach().clone() for part in parts], strict=True):
                    part.data = alone
            self._parts.pop()


def _adjoin(parts: Sequence[Tensor]) -> bool:
    """Whether these tensors lie behind each other in one storage."""
    storage, end = parts[0].untyped_storage().data_ptr(), parts[0].data_ptr()
    for part in parts:
        if not part.is_contiguous() or part.data_ptr() != end or part.untyped_storage().data_ptr() != storage:
            return False
        end += part.numel() * part.element_size()
    return True
