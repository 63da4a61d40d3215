"""Products with parameters: several of one input, gated units, and bias with activation."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from kernel_pytorch.compile_recipes.recorder import Graph, Node, down, up

from .numbers import PARTS, PRODUCTS, WALLS, WHOLE, fresh, is_float, near, rows, strip, tight

ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu2": lambda x: F.relu(x) ** 2,
    "leaky_relu": F.leaky_relu,
    "mish": F.mish,
}
Linears = dict[Node, Node]
"""For each product with a parameter, the node that it reads, without views and casts."""


def linears(g: Graph) -> Linears:
    """Every product of data with something that depends on parameters alone."""
    constant: dict[Node, bool] = {}
    for n in g.nodes:
        constant[n] = n.name == "parameter" or (bool(n.inputs) and all(constant[i] for i in n.inputs))
    found = {}
    for n in g.nodes:
        if n.name in PRODUCTS and is_float(n):
            wide = [i for i in n.inputs if is_float(i)]
            data = [i for i in wide if not constant[i]]
            if len(wide) == 2 and len(data) == 1:
                found[n] = strip(data[0])
    return found


def shared_inputs(lin: Linears) -> list[list[Node]]:
    """Groups of products that read the same tensor."""
    groups: dict[Node, list[Node]] = {}
    for n, source in lin.items():
        groups.setdefault(source, []).append(n)
    return [group for group in groups.values() if len(group) > 1]


def of_linear(n: Node, lin: Linears) -> Node | None:
    """The product whose result a node is a view, a part or a biased copy of."""
    for _ in range(8):
        if n in lin:
            return n
        data = [i for i in n.inputs if not isinstance(i.value, Tensor) or i.value.dim() > 1]
        if len(data) != 1 or not (n.name in WHOLE + PARTS or (n.name == "add" and len(n.inputs) == 2)):
            return None
        n = data[0]
    return None


def activation(g: Graph, a: Node, b: Node) -> str:
    """Which activation b is of a: first by the recorded values, then by fresh ones; "" if none."""
    if not is_float(b, 1) or not is_float(a, 1) or a.value.shape != b.value.shape or a.value.numel() < 8:
        return ""
    names = [name for name, f in ACTIVATIONS.items() if near(f(rows(a.value)), rows(b.value), 2e-2)]
    if not names:
        return ""
    new = fresh(a.value) * 1.5 - 1.0
    y = rows(g.again(b, a, new))
    return next((name for name in names if near(ACTIVATIONS[name](rows(new)), y, tight(new))), "")


def find_gated(g: Graph, lin: Linears) -> list[tuple[Node, str]]:
    """(product, activation) of every act(gate) * up whose factors come from one input, on its way to another layer."""
    found = []
    for m in g.nodes:
        if m.name == "glu" and of_linear(m.inputs[0], lin):
            found.append((m, "sigmoid"))
        same = [i for i in m.inputs if is_float(i) and is_float(m) and i.value.shape == m.value.shape]
        if m.name != "mul" or len(m.inputs) != 2 or len(same) != 2 or not any(n in lin for n in down(m, 5)):
            continue
        hits = (_gate(g, p, q, lin) for p, q in (m.inputs, m.inputs[::-1]))
        if act := next(filter(None, hits), ""):
            found.append((m, act))
    return found


def _gate(g: Graph, p: Node, q: Node, lin: Linears) -> str:
    """The activation of which p is, on the same input as q; "" if there is none."""
    other = of_linear(q, lin)
    if other is None:
        return ""
    for a in [p, *up(p, 8, lambda n: n in lin)]:
        gate = of_linear(a, lin) if is_float(a) and a is not q else None
        if gate is not None and lin[gate] is lin[other] and (act := activation(g, a, p)):
            return act
    return ""


def find_activations(g: Graph, lin: Linears) -> list[tuple[Node, Node, str]]:
    """(its input, activation, its name) of every linear layer with a bias."""
    found = []
    for n in lin:
        views = [n, *(d for d in down(n, 4, lambda d: d in lin) if is_float(d) and of_linear(d, lin) is n)]
        for base in sorted(views, key=lambda d: -d.index):  # of a product and its view, what is read next
            if n.name != "addmm" and not any(v.name == "add" for v in views if v.index <= base.index):
                continue
            below = down(base, 9, lambda d: d.name in WALLS)
            hit = next(((base, y, act) for y in below if (act := activation(g, base, y))), None)
            if hit:
                found.append(hit)
                break
    return found
