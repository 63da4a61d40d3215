"""Checks of arguments that are this package's own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ._core.arguments import check_choice, check_device, check_filled, check_number, shape_of
from ._core.call import Bound
from ._core.operation import Operation
from .rules.activations import ACTIVATIONS


def check_activation(activation: str) -> None:
    """Raise ValueError, listing the activations, unless this is one of them."""
    check_choice("activation", activation, ACTIVATIONS)


def check_dropout(p: float, seed: Tensor | None, x: Tensor, name: str = "dropout_p") -> None:
    """Raise unless p is a probability below one, and the seed None or an int64 scalar on the device of x."""
    check_number(name, p)
    if not 0.0 <= p < 1.0:
        raise ValueError(f"{name}: given {p}; it must be at least 0 and below 1")
    if seed is None:
        return
    if not isinstance(seed, Tensor):
        raise TypeError(f"seed: given {type(seed).__name__}; it must be a torch.Tensor, such as torch.tensor(3)")
    if seed.dtype != torch.int64:
        raise TypeError(f"seed: dtype is {seed.dtype}; allowed is torch.int64")
    if seed.dim() != 0:
        raise ValueError(f"seed: shape is {shape_of(seed)}; it must be ()")
    check_device("seed", seed, x)
    check_filled("seed", seed)


class SeededOperation(Operation):
    """A function whose last arguments are the probability of dropout and the seed.

    Where no seed is given one is drawn, but not for level "native", which has PyTorch's own dropout.
    """

    def uncached(self, *arguments: Any) -> Any:
        """As `Operation.uncached`."""
        return self._with_seed(*arguments) if self._draws(arguments) else super().uncached(*arguments)

    def bind(self, arguments: tuple[Any, ...], again: bool) -> Bound:
        """As `Operation.bind`."""
        return Bound(self._with_seed) if self._draws(arguments) else super().bind(arguments, again)

    def _draws(self, arguments: tuple[Any, ...]) -> bool:
        p, seed = arguments[-3:-1]
        if seed is not None or (isinstance(p, float) and p == 0.0):
            return False
        return self.level_of(*arguments) != "native" and p > 0.0

    def _with_seed(self, *arguments: Any) -> Any:
        *given, _, level = arguments
        return self(*given, draw_seed(given[0].device), level)


def draw_seed(device: torch.device) -> Tensor:
    """Draw a seed, an int64 scalar on that device, from torch's generator of it, without synchronizing."""
    return torch.randint(2**63 - 1, (), dtype=torch.int64, device=device)


def names_of(modules: Iterable[torch.nn.Module]) -> str:
    """The classes of these as messages print them."""
    return ", ".join(type(module).__name__ for module in modules) or "nothing"
