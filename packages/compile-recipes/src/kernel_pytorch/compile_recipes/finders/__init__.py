"""Fusion opportunities, found by what values are and not by how the code spells them.

Anchors are few: sums over the last dimension, and products of matrices. Whether y is a norm, an activation, a rotation
or attention of x is decided by the definition: the part of the graph between the two runs again on values in which
nothing holds by chance, and the result is compared with the definition's.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernel_pytorch.compile_recipes.recorder import Graph, Node, chain, up

from .attention import FAR, Attention, find_attention
from .loss import find_losses
from .norms import Norm, find_norms, is_one_call, residual_of
from .products import find_activations, find_gated, linears, shared_inputs
from .rotary import find_rotary
from .waste import find_waste, size

__all__ = ["Found", "find"]


@dataclass(frozen=True)
class Found:
    """A pattern.

    Attributes:
        kind: "rms_norm", "layer_norm", "residual_norm", "shared_linear", "attention", "attention_math", "gated_mlp",
            "bias_act", "activation", "rotary", "loss", or what `waste` names.
        what: what was proven, in words.
        node: the operator that ends it.
        moved: bytes that one eager forward would not read or write if this were one operator, at least.
        launches: how many launches it would save.
    """

    kind: str
    what: str
    node: Node
    moved: int = 0
    launches: int = 0

    @property
    def line(self) -> str:
        """`file:line` of the user's code."""
        return self.node.line

    @property
    def path(self) -> str:
        """Name of the module that it is in."""
        return self.node.path


def find(g: Graph) -> list[Found]:
    """Every pattern of a graph, each once per module."""
    lin = linears(g)
    found: list[Found] = []
    for norm in find_norms(g):
        found += _of_norm(norm, g)
    for group in shared_inputs(lin):
        names, more = ", ".join(dict.fromkeys(n.path or n.line for n in group)), len(group) - 1
        what = f"{len(group)} products of one input: {names}"
        found.append(Found("shared_linear", what, group[0], more * size(lin[group[0]]), more))  # it is read once
    found += [_of_attention(attention, g) for attention in find_attention(g, lin)]
    # An activation, its product and a bias each write what the next one reads.
    found += [Found("gated_mlp", f"{act}(gate) * up", m, 2 * size(m), 1) for m, act in find_gated(g, lin)]
    for base, y, act in find_activations(g, lin):
        by_hand = sum(n.cost.launches for n in chain(base, y)) > 1
        found.append(
            Found("activation", f"{act} by hand, of a linear layer with a bias", y, *_saving(y, base))
            if by_hand
            else Found("bias_act", f"bias and {act}", y, 2 * size(y), 1)
        )
    found += [Found("rotary", f"pairs in {style}", y, *_saving(y, x)) for x, y, style in find_rotary(g)]
    for n in find_losses(g, lin):
        what = f"cross entropy of {_shape(n)} logits, {size(n) / 2**20:.1f} MiB"
        found.append(Found("loss", what, n, 2 * size(n)))
    found += [Found(*waste) for waste in find_waste(g, lin)]
    return list({(f.kind, f.line, f.path, f.what): f for f in found}.values())


def _of_norm(norm: Norm, g: Graph) -> list[Found]:
    found = []
    if norm.by_hand and norm.y.path not in g.stock and not is_one_call(norm):
        offset = f", offset {norm.offset:g}" if norm.offset else ""
        weight = f", weight {norm.weight}" if norm.weight else ""
        eps = f", eps {norm.eps!r}" if norm.eps else ""
        found.append(Found(norm.kind, f"by hand{weight}{offset}{eps}", norm.y, *_saving(norm.y, norm.x)))
    if residual_of(norm) is not None:
        found.append(Found("residual_norm", f"sum and {norm.kind}", norm.y, size(norm.x), 1))
    return found


def _of_attention(attention: Attention, g: Graph) -> Found:
    fused = attention.second.path in g.stock or attention.first.site == attention.second.site
    kind = "attention_math" if fused else "attention"
    what = (
        f"equal to {attention.call}" if attention.call else "not proven equal to one call: a cap, dropout or grouping"
    )
    inside = chain(attention.first, attention.second)
    beside = [i for n in inside[:-1] for i in n.inputs if i not in (attention.first, *inside)]
    if attention.call and any(n.name == "input" and size(n) for b in beside for n in (b, *up(b, FAR))):
        what += " here; a mask depends on inputs, and is kept as it is"
    return Found(kind, what, attention.second, *_saving(attention.second, *attention.first.inputs))


def _saving(y: Node, *x: Node) -> tuple[int, int]:
    """Bytes that the operators between move, beyond one reading of x and one writing of y, and all launches but one."""
    inside = set().union(*(chain(n, y) for n in x))
    moved = sum(n.cost.bytes for n in inside) - sum(map(size, x)) - size(y)
    return max(moved, 0), max(sum(n.cost.launches for n in inside) - 1, 0)


def _shape(n: Node) -> str:
    return "x".join(map(str, n.value.shape))
