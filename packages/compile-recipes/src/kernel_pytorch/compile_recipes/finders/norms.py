"""Norms over the last dimension, in any spelling, and the residual sums before them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernel_pytorch.compile_recipes.recorder import Graph, Node, between, chain, down, up

from .numbers import NORMS, WHOLE, fresh, is_float, is_wall, rows, strip, tight

REDUCTIONS = re.compile(r"mean|sum|norm|var|bmm|std")
LARGEST_EPS = 1e-2
"""Beyond this the result is damped, and is no norm."""


@dataclass(frozen=True)
class Norm:
    """`y` is a norm of `x`."""

    kind: str  # "rms_norm" or "layer_norm"
    x: Node
    y: Node
    weight: str = ""  # name of the parameter; "" if there is none
    offset: float = 0.0  # what is added to the weight: 0 or 1
    eps: float = 0.0  # what is added to the mean square; 0 where nothing is, or where it is added to the root
    by_hand: bool = True  # whether it is made of several operators


def find_norms(g: Graph) -> list[Norm]:
    """Every norm of the graph, by hand or by one operator."""
    vectors = [n for n in g.nodes if n.name == "parameter" and isinstance(n.value, Tensor) and n.value.dim() == 1]
    found: dict[tuple[Node, str], Norm] = {}
    for r in g.nodes:
        if r.name in NORMS and r.users:
            found[r.inputs[0], NORMS[r.name]] = Norm(NORMS[r.name], r.inputs[0], r.users[0], by_hand=False)
        elif isinstance(r.value, Tensor) and r.inputs and REDUCTIONS.search(_name(r)):
            for norm in filter(None, (_norm(g, x, y, vectors) for x, y in _candidates(r))):
                found.setdefault((norm.x, norm.kind), _with_weight(g, norm, vectors))
                break
    return [norm for (x, kind), norm in found.items() if not _is_within_another(x, kind, found)]


def _name(r: Node) -> str:
    """Name of the operator whose result, or part of a result, this is."""
    return r.inputs[0].name if r.name == "getitem" else r.name


def residual_of(norm: Norm) -> Node | None:
    """The sum of two tensors of one shape that a norm is of, if it is."""
    source = strip(norm.x)
    while source.name == "mul" and source.inputs:  # a scaled sum
        source = strip(source.inputs[0])
    parts = [i for i in source.inputs if is_float(i) and i.value.shape == source.value.shape]
    return source if source.name == "add" and len(parts) == 2 else None


def is_one_call(norm: Norm) -> bool:
    """Whether one call of PyTorch's made all of it but the weight, as `F.rms_norm` does on a CPU."""
    nodes = [n for n in chain(norm.x, norm.y) if n.name not in WHOLE]
    if norm.weight and len({n.site for n in nodes}) > 1 and is_float(nodes[-2]):
        nodes = nodes[:-1] if 0.9 < float(nodes[-2].value.double().pow(2).mean()) < 1.1 else nodes
    return len(nodes) > 1 and len({n.site for n in nodes}) == 1


def _is_within_another(x: Node, kind: str, found: dict[tuple[Node, str], Norm]) -> bool:
    """A LayerNorm holds an RMSNorm of x - mean(x); a norm of a cast or of a view of x is one of x."""
    return any(
        (o == kind and z is not x and strip(x) is strip(z) and z.index < x.index)
        or (o == "layer_norm" and kind == "rms_norm" and x in down(z, 4))
        for z, o in found
    )


def _with_weight(g: Graph, norm: Norm, vectors: Sequence[Node]) -> Norm:
    """The product of a norm with its weight, where that comes after it."""
    if norm.weight:
        return norm
    for y in down(norm.y, 2, lambda n: n.name not in WHOLE):
        if y.name == "mul" and is_float(y) and y.value.shape == norm.y.value.shape:
            mine = [n for n in vectors if any(n is i or n in up(i, 3) for i in y.inputs if strip(i) is not norm.y)]
            weighted = _norm(g, norm.x, y, mine, bare=False) if mine else None
            if weighted is not None:
                return weighted
    return norm


def _candidates(r: Node) -> Iterator[tuple[Node, Node]]:
    """Pairs of which the second may be a norm of the first by way of this sum over the last dimension."""
    below = [y for y in down(r, 9, is_wall) if is_float(y)]
    for x in sorted((n for n in up(r, 6, is_wall) if is_float(n)), key=lambda n: n.index):
        v = x.value
        if v.shape[-1] < 8 or v.numel() < 4 * v.shape[-1] or v.numel() != r.value.numel() * v.shape[-1]:
            continue
        for y in below:
            inside = between(x, y) if y.value.shape == v.shape else set()
            if any(x in n.inputs for n in inside) and not any(n is not r and is_wall(n) for n in inside):
                yield x, y


def _norm(g: Graph, x: Node, y: Node, vectors: Sequence[Node], bare: bool = True) -> Norm | None:
    """What norm y is of x, by the definition, if it is one; `bare`: with or without a weight."""
    new = fresh(x.value) * 8  # so that no usual eps counts; a run on small values finds it
    a, b = rows(new), rows(g.again(y, x, new))
    tolerance = tight(new, y.value)
    for kind, h in (("rms_norm", a), ("layer_norm", a - a.mean(-1, keepdim=True))):
        h = h / h.pow(2).mean(-1, keepdim=True).sqrt().clamp(min=1e-12)
        for name, w in _weights(a, vectors, bare):
            for offset in (0.0, 1.0):
                rest = b - h * (w + offset)
                rest = rest - rest.mean(0) if kind == "layer_norm" else rest  # whatever the bias is
                if float(rest.abs().amax()) <= tolerance * float(b.abs().amax()):
                    damped = _eps(g, x, y, kind, w + offset) > LARGEST_EPS
                    return None if damped else Norm(kind, x, y, name, offset, _eps_in_root(x, y))
    return None


def _weights(a: Tensor, vectors: Sequence[Node], bare: bool) -> Iterator[tuple[str, Tensor]]:
    if bare:
        yield "", a.new_ones(a.shape[-1])
    for n in vectors:
        if len(n.value) == a.shape[-1]:
            yield n.path, n.value.detach().double()


def _eps_in_root(x: Node, y: Node) -> float:
    """The number that is added before a root is taken; 0 if there is none."""
    for n in chain(x, y):
        if re.search(r"sqrt|norm|std", n.name) or (n.name == "pow" and n.args[1] == 0.5):
            return 0.0
        if n.name == "add" and isinstance(n.args[1], float) and 0 < n.args[1] <= LARGEST_EPS:
            return float(n.args[1])
    return 0.0


def _eps(g: Graph, x: Node, y: Node, kind: str, w: Tensor) -> float:
    """What is added to the mean square, from a run on values so small that it counts, and one on zeros."""
    new = fresh(x.value) * 1e-3
    small, bias = rows(new), rows(g.again(y, x, torch.zeros_like(new))).nan_to_num(0.0)
    small = small - small.mean(-1, keepdim=True) if kind == "layer_norm" else small
    size = (rows(g.again(y, x, new)) - bias).abs().amax(-1) / (small * w).abs().amax(-1).clamp(min=1e-30)
    eps = size.clamp(min=1e-30).pow(-2) - small.pow(2).mean(-1)
    return max(float(eps.median()), 0.0)
