"""Message passing over the edges of a graph: by scatter, or by segments of edges that are sorted once.

Conventions of PyTorch Geometric: `edge_index` is `(2, E)` int64, row 0 holds sources, row 1 targets; what the sources
send is combined at the targets; a node that receives nothing gets zeros.

Scatter takes edges as they are. It writes a message `(E, N)` for each edge and adds them with `index_add`: on a GPU by
atomic operations, whose order changes from run to run, so results and gradients are not bitwise repeatable there.

Segments take `SortedEdges`. Each target reads its sources in a fixed order, with `embedding_bag`: one operator that
gathers, weights and adds, so that no message is in memory. Its gradient is the same sum over the edges sorted by
source. There are no atomic operations, so results and gradients are bitwise repeatable, whatever the number of threads.

"max" is a scatter of messages in both cases: a maximum does not depend on the order. In torch 2.13 the gradient of
`torch.segment_reduce` is wrong where several edges have the maximum and the incoming gradient is negative.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

AGGREGATIONS = ("sum", "mean", "max")


class Bags(NamedTuple):
    """The edges of each row, one row after the other."""

    index: Tensor  # (E,), the row at the other end of each edge
    pointers: Tensor  # (rows + 1,), where the edges of each row begin, and E
    places: Tensor  # (E,), where each edge of the other direction lies in this one


@dataclass(frozen=True)
class SortedEdges:
    """Edges sorted by target, and for gradients by source; made once with `of`, reused in every layer and step.

    Attributes:
        num_nodes, num_sources: targets and sources; the same, except for a graph between two kinds of nodes.
        order: `(E,)`, the place in `edge_index` of each sorted edge; edges of one target keep their order.
        by_target, by_source: the sources of each target, and the targets of each source.
        self_loops: `(num_nodes,)` bool, which nodes have an edge to themselves; None between two kinds of nodes.
    """

    num_nodes: int
    num_sources: int
    order: Tensor
    by_target: Bags
    by_source: Bags
    self_loops: Tensor | None

    @classmethod
    def of(cls, edge_index: Tensor, num_nodes: int, num_sources: int | None = None) -> SortedEdges:
        """Sort edges.

        Args:
            edge_index: `(2, E)` int64, sources and targets.
            num_nodes: number of targets, including those without edges.
            num_sources: number of sources; None if they are the targets.

        Raises:
            TypeError, ValueError: edge_index is not of that kind, or on a CPU holds a node that does not exist.
        """
        count = num_nodes if num_sources is None else num_sources
        check_edges(edge_index, num_nodes, count)
        order = edge_index[1].argsort(stable=True)
        source, target = edge_index[:, order]
        back = source.argsort(stable=True)
        forth = torch.empty_like(back).scatter_(0, back, torch.arange(back.numel(), device=back.device))
        loops = None
        if num_sources is None:
            loops = torch.zeros(num_nodes, dtype=torch.bool, device=target.device)
            loops[target[source == target]] = True
        by_target = Bags(source, _pointers(target, num_nodes), back)
        by_source = Bags(target[back], _pointers(source[back], count), forth)
        return cls(num_nodes, count, order, by_target, by_source, loops)

    @property
    def degrees(self) -> Tensor:
        """`(num_nodes,)` int64, the number of edges that end in each node."""
        return self.by_target.pointers.diff()

    @property
    def targets(self) -> Tensor:
        """`(E,)`, the target of each sorted edge."""
        return self.by_source.index[self.by_source.places]

    def to(self, device: torch.device | str) -> SortedEdges:
        """Copy to another device."""
        loops = None if self.self_loops is None else self.self_loops.to(device)
        by_target, by_source = (Bags(*(t.to(device) for t in half)) for half in (self.by_target, self.by_source))
        return SortedEdges(self.num_nodes, self.num_sources, self.order.to(device), by_target, by_source, loops)


Edges: TypeAlias = Tensor | SortedEdges


def check_edges(edge_index: Tensor, num_nodes: int, num_sources: int) -> None:
    """Raise TypeError or ValueError unless these are edges between that many nodes; values are read only on a CPU."""
    if not isinstance(edge_index, Tensor) or edge_index.dtype != torch.int64:
        found = edge_index.dtype if isinstance(edge_index, Tensor) else type(edge_index).__name__
        raise TypeError(f"edge_index: given {found}; it must be an int64 tensor of shape (2, E)")
    if edge_index.dim() != 2 or edge_index.shape[0] != 2:
        raise ValueError(f"edge_index: shape is {tuple(edge_index.shape)}; it must be (2, E)")
    if edge_index.device.type != "cpu" or torch.compiler.is_compiling() or not edge_index.shape[1]:
        return
    for row, count, name in ((0, num_sources, "sources"), (1, num_nodes, "targets")):
        low, high = (int(value) for value in edge_index[row].aminmax())
        if low < 0 or high >= count:
            raise ValueError(f"edge_index: {name} are from {low} to {high}; there are {count}, from 0 on")


def aggregate(
    x: Tensor, edges: Edges, weight: Tensor | None = None, *, how: str = "sum", num_nodes: int | None = None
) -> Tensor:
    """Combine at each target what its sources hold: `y[i] = how of weight[e] * x[j] over edges e from j to i`.

    Differentiable in x and weight; with "sum" and "mean" any number of times.

    Args:
        x: `(num_sources, N)`, any float dtype.
        edges: `(2, E)` int64 for scatter, or `SortedEdges` for segments; the head of this module compares them.
        weight: `(E,)`, a factor of each edge in the order of `edge_index`, also with `SortedEdges`; None for 1.
        how: "sum", "mean" (divided by the number of edges, whatever they weigh) or "max".
        num_nodes: targets; None for the number in `SortedEdges`, or the rows of x.

    Returns:
        `(num_nodes, N)`, dtype of x. Zeros where no edge ends. Where several edges have the maximum, they share its
        gradient.

    Raises:
        TypeError, ValueError: arguments do not fit; the message names them. Nodes that do not exist are found only on
            a CPU.
    """
    if how not in AGGREGATIONS:
        raise ValueError(f"aggregation: given {how!r}; allowed are {', '.join(AGGREGATIONS)}")
    if x.dim() != 2:
        raise ValueError(f"x: shape is {tuple(x.shape)}; it must be (nodes, features)")
    if weight is not None:
        count = (edges.order if isinstance(edges, SortedEdges) else edges[0]).numel()
        if weight.shape != (count,):
            raise ValueError(f"weight: shape is {tuple(weight.shape)}; for {count} edges it must be ({count},)")
        weight = weight.to(x.dtype)
    if isinstance(edges, SortedEdges):
        for name, given, known in (("x", x.shape[0], edges.num_sources), ("num_nodes", num_nodes, edges.num_nodes)):
            if given not in (None, known):
                raise ValueError(f"{name}: given {given} nodes; the sorted edges have {known}")
        count = edges.num_nodes
        y = _segments(x, edges, None if weight is None else weight[edges.order], how)
    else:
        count = x.shape[0] if num_nodes is None else num_nodes
        check_edges(edges, count, x.shape[0])
        y = _scatter(x, edges, weight, how, count)
    return y / degrees(edges, count, dtype=x.dtype).clamp(min=1.0)[:, None] if how == "mean" else y


def degrees(edges: Edges, num_nodes: int, weight: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Sum the weights of the edges that end in each node, `(num_nodes,)`; without weights count these edges.

    Arguments are those of `aggregate`; dtype None is that of weight, or float32.
    """
    dtype = dtype or (torch.float32 if weight is None else weight.dtype)
    if isinstance(edges, SortedEdges):
        if weight is None:
            return edges.degrees.to(dtype)
        ones = torch.ones(edges.num_sources, 1, dtype=dtype, device=weight.device)
        return aggregate(ones, edges, weight)[:, 0]
    ones = torch.ones(edges.shape[1], dtype=dtype, device=edges.device) if weight is None else weight.to(dtype)
    return ones.new_zeros(num_nodes).index_add(0, edges[1], ones)


def _pointers(rows: Tensor, count: int) -> Tensor:
    """Where each row begins in a sorted list of rows, and the length of the list."""
    return torch.searchsorted(rows, torch.arange(count + 1, device=rows.device))


def _scatter(x: Tensor, edges: Tensor, weight: Tensor | None, how: str, num_nodes: int) -> Tensor:
    messages = x.index_select(0, edges[0])
    if weight is not None:
        messages = messages * weight[:, None]
    if how == "max":
        return maximum(messages, edges[1], num_nodes)
    return messages.new_zeros(num_nodes, x.shape[1]).index_add(0, edges[1], messages)


def _segments(x: Tensor, edges: SortedEdges, weight: Tensor | None, how: str) -> Tensor:
    if how != "max":
        return _sum(x, weight, edges.by_target, edges.by_source)
    source, _, back = edges.by_target
    # The gradient of `index_select` would be a scatter.
    each = torch.arange(source.numel() + 1, device=x.device)
    messages = _sum(x, None, Bags(source, each, back), Bags(back, edges.by_source.pointers, back))
    return maximum(messages if weight is None else messages * weight[:, None], edges.targets, edges.num_nodes)


def maximum(messages: Tensor, target: Tensor, num_nodes: int) -> Tensor:
    """The largest of the rows `(E, N)` of each target, `(num_nodes, N)`; zeros for a target without rows."""
    index, y = target[:, None].expand_as(messages), messages.new_zeros(num_nodes, messages.shape[1])
    return y.scatter_reduce(0, index, messages, "amax", include_self=False)


def _sum(x: Tensor, weight: Tensor | None, bags: Bags, other: Bags) -> Tensor:
    """Compute `y[i] = sum of weight[e] * x[index[e]] over e from pointers[i] to pointers[i + 1]`."""
    if torch.compiler.is_compiling():  # TorchDynamo instantiates the class below, and PyTorch warns of that
        return bag_sum(x, weight, bags.index, bags.pointers)
    y: Tensor = _Sum.apply(x, weight, *bags, *other)
    return y


def bag_sum(x: Tensor, weight: Tensor | None, index: Tensor, pointers: Tensor) -> Tensor:
    """As `_sum`; its gradient is a scatter."""
    if not index.numel():
        return x.new_zeros(pointers.numel() - 1, x.shape[1])
    options = {"mode": "sum", "per_sample_weights": weight, "include_last_offset": True}
    return F.embedding_bag(index, x.contiguous(), pointers, **options)


class _Sum(torch.autograd.Function):
    """The weighted sum over bags; its gradient is the same over the bags of the other direction."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor | None, index: Tensor, pointers: Tensor, *bags: Tensor) -> Tensor:
        """As `_sum`."""
        return bag_sum(x, weight, index, pointers)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep everything; x only for the gradient of weight."""
        x, weight, *bags = inputs
        ctx.save_for_backward(x if weight is not None and ctx.needs_input_grad[1] else None, weight, *bags)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of x and weight."""
        x, weight, index, pointers, places, other_index, other_pointers, other_places = ctx.saved_tensors
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            other = other_index, other_pointers, other_places
            dx = _Sum.apply(dy, None if weight is None else weight[places], *other, index, pointers, places)
        if ctx.needs_input_grad[1]:
            rows = other_index[other_places]
            dweight = (x.index_select(0, index) * dy.index_select(0, rows)).sum(-1)
        return dx, dweight, *[None] * 6
