"""Work that is done for nothing: loops over parts, what is computed again, repeated heads, casts, masks, layouts."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor

from kernel_pytorch.compile_recipes.recorder import FACTORIES, Graph, Node, down, place_of

from .loss import LEAST
from .numbers import PARTS, PRODUCTS, WHOLE, is_float, strip
from .products import Linears, of_linear

FEWEST = 4
"""Turns of a loop from which on it is named."""
SDPA = re.compile(r"_scaled_dot_product_\w*attention")
GROWING = {"repeat", "repeat_interleave", "index_select", *WHOLE, *PARTS}
NEVER_AGAIN = re.compile(r"rand|bernoulli|dropout|empty|copy|renewed|item|_local_scalar_dense|clone|_to_copy")
"""Operators whose second call is no waste, or not the same."""
FAR_BELOW = -1e4
FARTHEST = 9  # steps from a created tensor to an operator that reads other data too

Waste = tuple[str, str, Node, int, int]
"""Kind, what it is, the node, and the bytes and launches that are for nothing."""


def find_waste(g: Graph, lin: Linears) -> Iterator[Waste]:
    """Everything of this file."""
    yield from loops(g)
    yield from computed_again(g)
    yield from casts(g, lin)
    yield from created(g)
    for n in g.nodes:
        if SDPA.match(n.name):
            yield from _of_attention(n)
        elif "batch_norm" in n.name and n.inputs and (conv := strip(n.inputs[0])).name == "convolution":
            if len(conv.users) == 1 and _is_inference(n):
                yield "conv_norm", "batch norm of a convolution, in evaluation", n, n.cost.bytes, 1
        elif n.name == "convolution" and _reads_rows(n):
            yield "channels_last", "a convolution over images in the contiguous layout", n, size(n), 0


def size(n: Node) -> int:
    """Bytes of the tensor of a node."""
    return n.value.numel() * n.value.itemsize if isinstance(n.value, Tensor) else 0


def loops(g: Graph) -> Iterator[Waste]:
    """One operator of one line, on several parts of one tensor."""
    groups: dict[tuple[str, str, str], list[Node]] = defaultdict(list)
    for n in g.nodes:
        if n.cost.launches and n.line:
            groups[n.name, n.line, n.path].append(n)
    taken = set()
    for (name, line, _), nodes in groups.items():
        sources = [next((s for i in n.inputs if (s := _part_of(i)) is not None), None) for n in nodes]
        if len(nodes) < FEWEST or None in sources or len({id(s) for s in sources}) != 1 or line in taken:
            continue
        taken.add(line)
        kind = "small_products" if name in PRODUCTS else "loop"
        yield kind, f"{len(nodes)} calls of {name} on parts of one tensor", nodes[0], 0, len(nodes) - 1


def _part_of(n: Node) -> Node | None:
    """The tensor that a node is a row, or another part, of."""
    cut = False
    while n.name in (*WHOLE, *PARTS) and n.inputs:
        cut |= n.name in ("select", "unbind", "getitem", "slice")
        n = n.inputs[0]
    return n if cut else None


def computed_again(g: Graph) -> Iterator[Waste]:
    """The same operator on the same values, more than once."""
    numbers: dict[object, int] = {}
    of: dict[Node, int] = {}
    first: dict[int, Node] = {}
    again: dict[str, list[Node]] = defaultdict(list)
    for n in g.nodes:
        key: object = n
        if n.op is not None and not n.name.startswith("renewed"):
            parts = [f"n{of[a]}" if isinstance(a, Node) else repr(a) for a in _flat((n.args, n.kwargs))]
            key = (n.name, str(n.op), tuple(parts))
        of[n] = numbers.setdefault(key, len(numbers))
        if not n.cost.launches or not n.inputs or NEVER_AGAIN.search(n.name):
            first.setdefault(of[n], n)
        elif of[n] in first:
            again[place_of(n.line, n.path)].append(n)
        else:
            first[of[n]] = n
    for nodes in again.values():
        names = ", ".join(dict.fromkeys(n.name for n in nodes))
        moved = sum(n.cost.bytes for n in nodes)
        yield "computed_again", f"computed before: {names}", nodes[0], moved, len(nodes)


def created(g: Graph) -> Iterator[Waste]:
    """Tensors that are made of Python values in every call, and meet the data: on a GPU a copy that it waits for."""
    for n in g.nodes:
        made = n.name in FACTORIES and n.line in g.placeless
        values = n.name == "lift_fresh" and isinstance(n.value, Tensor) and n.value.dim() > 0
        below = [n, *down(n, FARTHEST)] if (made or values) and n.line else []
        if any(i not in below for other in below[1:] for i in other.inputs):
            what = f"torch.{n.name} without a device" if made else "a tensor of Python values"
            yield "created", f"{what}, made in every call: on a GPU a copy from the host", n, size(n), 1


def _flat(value: object) -> list[object]:
    if isinstance(value, tuple | list):
        return [leaf for item in value for leaf in _flat(item)]
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in (key, *_flat(item))]
    return [value]


def casts(g: Graph, lin: Linears) -> Iterator[Waste]:
    """Weights that are cast in every call, and logits in float32."""
    for n in g.nodes:
        if n.name != "_to_copy" or not n.inputs or not is_float(n):
            continue
        source, before = n.inputs[0], n.inputs[0].value
        if not isinstance(before, Tensor) or before.dtype == n.value.dtype:
            continue
        if source.name == "parameter" and source.value.dim() > 1:
            yield "cast_weights", f"weights cast to {_short(n.value.dtype)} in every call", n, n.cost.bytes, 1
        wide = n.value.shape[-1] >= LEAST and n.value.dtype == torch.float32 and before.dtype.itemsize == 2
        if wide and of_linear(source, lin) is not None:
            yield "float32_logits", f"logits in float32, {size(n) / 2**20:.1f} MiB", n, n.cost.bytes, 0


def _of_attention(n: Node) -> Iterator[Waste]:
    _, k, _, *rest = [a for a in n.args if isinstance(a, Node)] if len(n.args) > 2 else [None] * 3
    if k is not None:
        source = k
        while source.name in GROWING and source.inputs and size(source.inputs[0]) == size(source):
            source = source.inputs[0]
        before = source.inputs[0] if source.inputs else source
        if source.name in GROWING - {*PARTS} and 0 < size(before) < size(source) and source.value.dim() >= 4:
            times = size(source) // size(before)
            yield "repeated_heads", f"keys and values repeated {times} times", n, 2 * size(source), 2
    mask = next((m for m in [*rest, *(a for a in n.kwargs.values() if isinstance(a, Node))] if _is_causal(m)), None)
    if mask is not None:
        yield "causal_mask", "the causal mask is given as a tensor", n, size(mask), 0


def _is_causal(n: Node) -> bool:
    """Whether a node is an additive mask that hides what comes later, and nothing else."""
    if not is_float(n) or n.value.shape[-1] != n.value.shape[-2] or n.value.shape[-1] < 2:
        return False
    hidden = n.value <= FAR_BELOW
    later = torch.ones(n.value.shape[-2:], dtype=torch.bool, device=n.value.device).triu(1)
    return bool((hidden == later).all()) and bool((n.value[~hidden.expand_as(n.value)] == 0).all())


def _is_inference(n: Node) -> bool:
    """Whether a batch norm uses the statistics that it has, and needs no pass over the data."""
    flags = [a for a in n.args if isinstance(a, bool)]
    return "no_training" in n.name or not any(flags[:1])


def _reads_rows(n: Node) -> bool:
    """Whether a convolution over images has neither data nor weights in channels_last."""
    x, w = (a.value for a in n.args[:2] if isinstance(a, Node))
    if x.dim() != 4 or w.shape[1] == 1 or w.shape[0] < 8 or w.shape[1] < 8:
        return False
    return not any(t.is_contiguous(memory_format=torch.channels_last) for t in (x, w))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
