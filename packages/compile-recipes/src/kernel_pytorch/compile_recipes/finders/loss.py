"""Cross entropy over all logits of a linear layer."""

from __future__ import annotations

import re

from torch import Tensor

from kernel_pytorch.compile_recipes.recorder import Graph, Node, down

from .products import Linears

LEAST = 512
"""Columns of a head from which on its logits count."""


def find_losses(g: Graph, lin: Linears) -> list[Node]:
    """Linear layers over a vocabulary from whose log-softmax one element of each row is taken."""
    return [n for n in lin if isinstance(n.value, Tensor) and n.value.shape[-1] >= LEAST and _ends_in_loss(n, lin)]


def _ends_in_loss(n: Node, lin: Linears) -> bool:
    def wall(d: Node) -> bool:
        return d in lin

    below = down(n, 12, wall)
    soft = any(
        re.search(r"softmax|logsumexp", b.name) or (b.name == "exp" and any(u.name == "sum" for u in down(b, 2)))
        for b in below
    )
    picks = any(re.search(r"nll_loss|gather|mul|index", b.name) for b in down(n, 16, wall))
    return soft and picks and any(isinstance(b.value, Tensor) and b.value.numel() == 1 for b in down(n, 32))
