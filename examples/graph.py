"""Classify the nodes of a graph from two labels, and choose between scatter and sorted segments.

After reading it you can port a network from PyTorch Geometric line by line, sort the edges of a graph once, and measure
what that gains in time and repeatability.

- Needs: the packages of this workspace and networkx, whose package holds the graph. No network.
- Runs on a CPU or a GPU, with 1 GB of memory: a minute on 2 cores, half with `--quick`.
- Command: `python examples/graph.py`
- Last lines: more than 90 % of the karate club's members on the right side, a table of scatter and segments, and which
  of them repeats bit by bit here.

A graph is a list of edges. Row 0 of `edge_index` holds sources, row 1 targets; messages go from sources to targets:

    edge_index = [[0, 0, 1],      0 ---> 1 ---> 2
                  [1, 2, 2]]      0 ----------> 2
"""

# %% Imports
from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kernel_pytorch.harness.clock import compare_paired
from kernel_pytorch.harness.quick import Comparison, compare_implementations
from kernel_pytorch.models import GraphNeuralNetwork, SortedEdges


# %% What you would write
# With PyTorch Geometric it is `GCN(34, 16, 2, 2)` and `model(x, edge_index)`: the arguments are the same. Edges that
# are sorted once take the place of `edge_index` in every call.
# --8<-- [start:use]
def network(node_features: int, num_classes: int) -> GraphNeuralNetwork:
    """Two steps of graph convolution."""
    return GraphNeuralNetwork(node_features, num_classes, hidden_dim=16, num_layers=2, aggregation="gcn", dropout=0.5)


def sorted_once(edge_index: Tensor, num_nodes: int) -> SortedEdges:
    """The same edges by target and by source, for all layers, epochs and gradients."""
    return SortedEdges.of(edge_index, num_nodes)


# --8<-- [end:use]


# %% Graphs
# The members of a karate club and who met whom; the club split around its teacher and its president. The larger graph
# grows as networks of citations do: each new node cites some of the most cited.
def networkx() -> Any:
    """Import the library, or say how to install it."""
    try:
        import networkx as library
    except ImportError as error:
        raise SystemExit("this example needs a graph: pip install networkx") from error
    return library


def edge_index_of(graph: Any) -> Tensor:
    """`(2, E)`, both directions of each edge."""
    edges = torch.tensor([*graph.edges()], dtype=torch.int64).T
    return torch.cat((edges, edges.flip(0)), 1)


def karate_club(device: torch.device) -> tuple[Tensor, Tensor]:
    """Edges, and the side that each member took: 0 or 1."""
    club = networkx().karate_club_graph()
    sides = [int(club.nodes[member]["club"] == "Officer") for member in club.nodes]
    return edge_index_of(club).to(device), torch.tensor(sides, device=device)


# %% Learning from two labels
# Only the sides of the teacher, node 0, and of the president, node 33, are given. The only feature of a member is its
# number; all other information comes through the edges.
def split_club(device: torch.device, steps: int) -> float:
    """The share of the 32 other members whose side is predicted correctly."""
    edge_index, sides = karate_club(device)
    nodes, known = len(sides), torch.tensor([0, 33], device=device)
    x, edges = torch.eye(nodes, device=device), sorted_once(edge_index, nodes)
    torch.manual_seed(0)
    model = network(nodes, 2).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01, weight_decay=5e-3)
    for _ in range(steps):
        loss = F.cross_entropy(model(x, edges)[known], sides[known])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found = model.eval()(x, edges).argmax(-1) == sides
    return (found.sum().item() - 2) / (nodes - 2)


# %% Scatter against segments
# A training step of the same network by both. Scatter writes a message for each edge; segments read the features of
# each target's sources and add them up where they are.
def step(model: GraphNeuralNetwork, edges: Tensor | SortedEdges) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """Logits and gradients of all weights."""
    weights = [*model.parameters()]

    def run(x: Tensor) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            y = model(x, edges)
            return y.detach(), *torch.autograd.grad(F.log_softmax(y, -1)[:, 0].mean(), weights)

    return run


def compare(device: torch.device, nodes: int, rounds: int) -> tuple[Comparison, dict[str, bool]]:
    """Times, and whether ten runs give the same bits, of scatter and of segments."""
    edge_index = edge_index_of(networkx().barabasi_albert_graph(nodes, 10, seed=0)).to(device)
    print(f"\n{nodes:,} nodes, {edge_index.shape[1]:,} edges, at most {int(edge_index[1].bincount().max())} of a node")
    x = torch.randn(nodes, 64, generator=torch.Generator().manual_seed(0)).to(device)
    torch.manual_seed(0)
    model = GraphNeuralNetwork(64, 8, hidden_dim=64, aggregation="gcn").to(device)
    ways = {"scatter": step(model, edge_index), "segments": step(model, sorted_once(edge_index, nodes))}
    ways["segments, sorted each time"] = lambda x: step(model, sorted_once(edge_index, nodes))(x)
    repeats = {}
    for name, way in ways.items():
        first = way(x)
        repeats[name] = all(all(map(torch.equal, way(x), first)) for _ in range(9))
    return compare_implementations(ways, x, rounds=rounds), repeats


def show(found: Comparison, repeats: dict[str, bool]) -> float:
    """Print times and repeatability; the speedup of segments over scatter."""
    times = {c.name: c for c in found.contenders}
    print(f"{'a training step':30}{'ms':>8}{'x of scatter':>24}  same bits each time")
    for name, c in times.items():
        if c.status != "measured":
            print(f"{name}: {c.status}, {c.reason}")
            continue
        speedup = compare_paired(times["scatter"].samples, c.samples).speedup
        ratio = "" if name == "scatter" else f"{speedup.median:.2f} [{speedup.low:.2f}, {speedup.high:.2f}]"
        print(f"{name:30}{c.seconds.median * 1e3:8.1f}{ratio:>24}  {'yes' if repeats[name] else 'no'}")
    gain = compare_paired(times["scatter"].samples, times["segments"].samples).speedup.median
    print(f"Sorted once, segments take {1 / gain:.0%} of the time of scatter.")
    return gain


def main(argv: Sequence[str] | None = None) -> tuple[float, float]:
    """Split the club, compare on the larger graph; accuracy and speedup."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a smaller graph and fewer rounds")
    options = parser.parse_args(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    right = split_club(device, 200)
    print(f"Karate club: the side of {right:.0%} of the 32 other members is found from two labels.")
    assert right > 0.9, right
    found, repeats = compare(device, *((4000, 8) if options.quick else (20000, 20)))
    assert repeats["segments"], "segments must repeat bit by bit"
    return right, show(found, repeats)


if __name__ == "__main__":
    main(sys.argv[1:])
