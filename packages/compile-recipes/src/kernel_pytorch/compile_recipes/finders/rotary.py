"""Rotary embeddings, in any spelling: pairs of the last dimension that keep their length and turn."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernel_pytorch.compile_recipes.recorder import Graph, Node, down, up

from .numbers import NORMS, PRODUCTS, fresh, is_float, near, rows, tight

LONGEST = 512
"""Columns of a head."""
NEVER = {
    "mul", "neg", "pow", "mean", "rsqrt", "silu", "gelu", "t", "parameter", "input", "_softmax", "_to_copy", "div",
    *PRODUCTS, *NORMS,
}  # fmt: skip
"""Operators that no rotation ends with."""
WALLS = {"mm", "addmm", "convolution", "_softmax", "embedding", "rsqrt", *NORMS}
PAIRS: dict[str, Callable[[Tensor], Tensor]] = {
    "halves": lambda t: t.unflatten(-1, (2, -1)),
    "interleaved": lambda t: t.unflatten(-1, (-1, 2)).mT,
}


def is_rotation(x: Tensor, y: Tensor, tolerance: float) -> str:
    """How the pairs lie that turn between x and y; "" if none do."""
    if x.shape[-1] % 2 or x.is_complex() or y.is_complex():
        return ""
    a, b = rows(x), rows(y)
    same = ((a - b).abs() < 1e-5 * a.abs().amax()).all(0)
    width = int((~same).nonzero().amax()) + 1 if not same.all() else 0
    if width < 4 or width % 2:
        return ""
    a, b = a[:, :width], b[:, :width]
    for name, pair in PAIRS.items():
        p, q = pair(a), pair(b)
        if near(q.pow(2).sum(-2), p.pow(2).sum(-2), tolerance):
            moved = torch.stack([(q - o).abs() for o in (p, -p, p.flip(-2), -p.flip(-2))]).amin(0)
            if float(moved.amax()) > 1e-3 * float(a.abs().amax()):  # more than an exchange, or other signs
                return name
    return ""


def find_rotary(g: Graph) -> list[tuple[Node, Node, str]]:
    """(tensor, turned tensor, how its pairs lie)."""
    found: list[tuple[Node, Node, str]] = []
    taken: set[Node] = set()
    for y in g.nodes:
        if not is_float(y, 3) or y.value.shape[-1] > LONGEST or y.name in NEVER:
            continue
        for x in sorted(up(y, 12, lambda n: n.name in WALLS), key=lambda n: n.index):
            if x in taken or not is_float(x, 3) or x.value.shape != y.value.shape:
                continue
            if not is_rotation(x.value, y.value, 1e-2):
                continue
            new = fresh(x.value)
            if style := is_rotation(new, g.again(y, x, new), tight(new)):
                found.append((x, y, style))
                taken |= {y, x, *down(y, 6)}
                break
    return found
