"""Which stock module of PyTorch computes which activation."""

from collections.abc import Callable
from functools import partial

import torch

# Those that PyTorch has a module of.
STOCK: dict[str, Callable[[], torch.nn.Module]] = {
    "gelu": torch.nn.GELU,
    "gelu_tanh": partial(torch.nn.GELU, "tanh"),
    "silu": torch.nn.SiLU,
    "relu": torch.nn.ReLU,
    "tanh": torch.nn.Tanh,
    "sigmoid": torch.nn.Sigmoid,
    "identity": torch.nn.Identity,
}


def name_of(module: torch.nn.Module) -> str | None:
    """The name of the activation that a stock module computes, or None if it is none of these."""
    if type(module) is torch.nn.GELU:
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(module.approximate)
    return next((name for name, stock in STOCK.items() if type(module) is stock), None)


def module_of(activation: str) -> torch.nn.Module:
    """A stock module that computes an activation: the inverse of `name_of`.

    Raises:
        TypeError: PyTorch has no module of that activation.
    """
    if activation not in STOCK:
        raise TypeError(f"activation: {activation!r} has no module in PyTorch; those of {', '.join(STOCK)} have")
    return STOCK[activation]()
