"""Graph neural networks, with the conventions of PyTorch Geometric: `(x, edge_index, edge_weight, batch)`."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .segments import AGGREGATIONS, Edges, SortedEdges, aggregate, degrees
from .techniques import Names, TechniqueModule

KINDS = (*AGGREGATIONS, "gcn")
POOLINGS = (None, "mean", "sum", "max")


class GcnNorm(NamedTuple):
    """The factors of symmetric normalisation, the same for all layers of a network."""

    scale: Tensor  # (nodes, 1), one over the square root of the degree, including the self loop; 0 for degree 0
    loops: Tensor  # (nodes, 1), weights of the self loops that are added: 1 where there is none, else 0


def gcn_norm(edges: Edges, weight: Tensor | None, num_nodes: int, dtype: torch.dtype = torch.float32) -> GcnNorm:
    """Compute the factors of `GraphLayer(aggregation="gcn")`; arguments as in `aggregate`. Differentiable in weight."""
    if isinstance(edges, SortedEdges):
        has_loop = edges.self_loops
        if has_loop is None:
            raise ValueError("edges: gcn needs edges between nodes of one kind; these were sorted with num_sources")
    else:
        # As a sum, since the number of self loops is not known without waiting for the device.
        found = (edges[0] == edges[1]).to(torch.int64)
        has_loop = found.new_zeros(num_nodes).index_add(0, edges[1], found) > 0
    loops = (~has_loop).to(dtype)
    degree = degrees(edges, num_nodes, weight, dtype) + loops
    scale = torch.where(degree == 0.0, 0.0, torch.where(degree == 0.0, 1.0, degree).rsqrt())
    return GcnNorm(scale[:, None], loops[:, None])


class GraphLayer(nn.Module):
    """One step of message passing.

    `y[i] = root(x[i]) + neighbours(how of w[e] * x[j] over edges e from j to i)` with "sum", "mean" and "max": the
    formula of PyTorch Geometric's `GraphConv`, whose `lin_root` and `lin_rel` are `root` and `neighbours` here.

    `y = D^-1/2 (A + I) D^-1/2 x W + b` with "gcn": that of its `GCNConv`, whose `lin.weight` and `bias` are those of
    `neighbours` here. A node that has a self loop gets no second one.

    Args:
        in_features, out_features: of a node.
        aggregation: "sum", "mean", "max" or "gcn"; ValueError for others.

    Source: Morris et al., "Weisfeiler and Leman Go Neural", 2019, https://arxiv.org/abs/1810.02244; Kipf and Welling,
    "Semi-Supervised Classification with Graph Convolutional Networks", 2017, https://arxiv.org/abs/1609.02907.
    """

    def __init__(self, in_features: int, out_features: int, aggregation: str = "sum") -> None:
        super().__init__()
        if aggregation not in KINDS:
            raise ValueError(f"aggregation: given {aggregation!r}; allowed are {', '.join(KINDS)}")
        self.aggregation = aggregation
        self.neighbours = nn.Linear(in_features, out_features)
        self.root = None if aggregation == "gcn" else nn.Linear(in_features, out_features, bias=False)

    def forward(
        self, x: Tensor, edges: Edges, edge_weight: Tensor | None = None, norm: GcnNorm | None = None
    ) -> Tensor:
        """Compute `(nodes, out_features)` from `(nodes, in_features)`; the other arguments as in `aggregate`.

        norm is the result of `gcn_norm`, for "gcn"; it is computed if it is not given.
        """
        weight, bias = self.neighbours.weight, self.neighbours.bias
        if self.aggregation == "gcn":
            norm = norm or gcn_norm(edges, edge_weight, x.shape[0], x.dtype)
            # Scaling nodes before and after costs less than a factor for each edge.
            sent = nn.functional.linear(x, weight) * norm.scale
            return (aggregate(sent, edges, edge_weight) + norm.loops * sent) * norm.scale + bias
        assert self.root is not None
        # Sum and mean commute with the product: send the narrower of the two.
        if self.aggregation != "max" and weight.shape[0] < weight.shape[1]:
            received = aggregate(nn.functional.linear(x, weight), edges, edge_weight, how=self.aggregation) + bias
        else:
            received = self.neighbours(aggregate(x, edges, edge_weight, how=self.aggregation))
        return received + self.root(x)


class GraphNeuralNetwork(TechniqueModule):
    """Message passing, LayerNorm and ReLU in each layer; then a class of each node, or of each graph.

    Args:
        node_features: features of each node.
        num_classes: classes of nodes, or of graphs with pooling.
        hidden_dim: features between layers.
        num_layers: steps of message passing, at least 1.
        aggregation: "sum", "mean", "max", or "gcn"; see `GraphLayer`.
        pooling: None for a class of each node; "mean", "sum" or "max" over the nodes of a graph for a class of each
            graph.
        dropout: probability with which a feature is dropped after each layer, in training.
        techniques, level: as in `TechniqueModule`, with its errors; "fused-ln-act" is used, for LayerNorm and ReLU.
    """

    def __init__(
        self,
        node_features: int,
        num_classes: int,
        *,
        hidden_dim: int = 64,
        num_layers: int = 2,
        aggregation: str = "sum",
        pooling: str | None = None,
        dropout: float = 0.0,
        techniques: Names = None,
        level: str | None = None,
    ) -> None:
        super().__init__(techniques, level)
        if num_layers < 1:
            raise ValueError(f"num_layers: given {num_layers}; it must be at least 1")
        if pooling not in POOLINGS:
            raise ValueError(f"pooling: given {pooling!r}; allowed are None, mean, sum, max")
        widths = [node_features, *[hidden_dim] * num_layers]
        self.layers = nn.ModuleList(GraphLayer(*pair, aggregation) for pair in itertools.pairwise(widths))
        self.norms = nn.ModuleList(nn.LayerNorm(hidden_dim) for _ in range(num_layers))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(hidden_dim, num_classes)
        self.aggregation, self.pooling = aggregation, pooling

    def forward(
        self,
        x: Tensor,
        edges: Edges,
        edge_weight: Tensor | None = None,
        batch: Tensor | None = None,
        num_graphs: int | None = None,
    ) -> Tensor:
        """Compute logits: `(nodes, num_classes)`, or with pooling `(num_graphs, num_classes)`.

        Args:
            x: `(nodes, node_features)`; nodes without edges count.
            edges: `edge_index`, `(2, E)` int64, for scatter; `SortedEdges` for segments, which are bitwise repeatable.
            edge_weight: `(E,)`, in the order of `edge_index`; None for 1.
            batch: `(nodes,)` int64, the graph of each node, for pooling; None for one graph.
            num_graphs: needed with batch, because the last graphs may be empty; an empty graph is pooled to zeros.

        Raises:
            TypeError, ValueError: arguments do not fit; the message names them.
        """
        norm = gcn_norm(edges, edge_weight, x.shape[0], x.dtype) if self.aggregation == "gcn" else None
        for layer, layer_norm in zip(self.layers, self.norms, strict=True):
            x = layer(x, edges, edge_weight, norm)
            x = self.dropout(self.techniques.layer_norm_act(layer_norm, x, "relu"))
        if self.pooling is not None:
            x = pool(x, batch, num_graphs, how=self.pooling, ordered=isinstance(edges, SortedEdges))
        return self.head(x)


def pool(
    x: Tensor, batch: Tensor | None, num_graphs: int | None = None, *, how: str = "mean", ordered: bool = False
) -> Tensor:
    """Combine the nodes `(nodes, N)` of each graph, `(num_graphs, N)`: message passing from nodes to graphs.

    Arguments are those of `GraphNeuralNetwork.forward`; how is "sum", "mean" or "max". With ordered, nodes are first
    sorted by graph, so that the result is bitwise repeatable on a GPU too.
    """
    if batch is None:
        batch, num_graphs = torch.zeros(x.shape[0], dtype=torch.int64, device=x.device), 1
    if num_graphs is None:
        raise ValueError("num_graphs: given None; it is needed with batch, because the last graphs may be empty")
    if batch.shape != x.shape[:1]:
        raise ValueError(f"batch: shape is {tuple(batch.shape)}; for {x.shape[0]} nodes it must be ({x.shape[0]},)")
    edges = torch.stack((torch.arange(x.shape[0], device=x.device), batch))
    if ordered:
        return aggregate(x, SortedEdges.of(edges, num_graphs, x.shape[0]), how=how)
    return aggregate(x, edges, how=how, num_nodes=num_graphs)
