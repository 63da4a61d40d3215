"""Fresh values, and comparison of results: what the proofs of all finders rest on."""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import Tensor

from kernel_pytorch.compile_recipes.recorder import Node

ROWS = 24
"""Rows of a tensor that are compared."""
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "dot")
WHOLE = (
    "view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "transpose", "permute", "t", "expand", "clone", "alias",
    "_to_copy", "detach", "_reshape_alias", "renewed", "lift_fresh", "copy",
)  # fmt: skip
"""Operators that keep all values, in another shape or dtype."""
PARTS = ("slice", "select", "split", "split_with_sizes", "chunk", "unbind", "getitem", "as_strided")
NORMS = {"native_layer_norm": "layer_norm", "_fused_rms_norm": "rms_norm"}
WALLS = (*PRODUCTS, *NORMS, "convolution", "_softmax", "embedding")
"""Operators that no pointwise pattern crosses."""


def is_float(n: Node, dims: int = 2) -> bool:
    """Whether a node has a floating-point tensor of at least so many dimensions."""
    return isinstance(n.value, Tensor) and n.value.is_floating_point() and n.value.dim() >= dims


def is_wall(n: Node) -> TypeGuard[Node]:
    """Whether no pointwise pattern crosses this operator."""
    return n.name in WALLS


def strip(n: Node) -> Node:
    """What a view or a cast is of."""
    while n.name in WHOLE and n.inputs:
        n = n.inputs[0]
    return n


def rows(t: Tensor) -> Tensor:
    """Some rows in float64, chosen at random: a regular step could meet the same position in every head."""
    t = t.detach().reshape(-1, t.shape[-1])
    chosen = torch.randperm(len(t), generator=torch.Generator().manual_seed(0))[:ROWS]
    return t[chosen.to(t.device)].double()


def fresh(x: Tensor) -> Tensor:
    """Values in which nothing holds by chance: rows of several sizes, none with a mean of zero."""
    g, count = torch.Generator(x.device).manual_seed(0), x[..., :1].numel()
    size = torch.tensor([1.0, 3.0, 0.5, 2.0], device=x.device).repeat(count // 4 + 1)[:count]
    values = torch.randn(x.shape, generator=g, device=x.device) + 0.7
    return (values * size.view(*x.shape[:-1], 1)).to(x.dtype)


def near(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Whether no element is off by more than a part of the largest."""
    return a.shape == b.shape and bool(((a - b).abs() <= tolerance * (1e-3 + b.abs().amax())).all())


def tight(*tensors: Tensor) -> float:
    """The tolerance that rounding in these dtypes asks for."""
    return 3e-2 if min(t.dtype.itemsize for t in tensors) == 2 else 1e-4
