"""Message passing against dense matrices in float64, by scatter and by segments, on graphs with holes in them."""

import copy

import pytest
import torch

from kernel_pytorch.models import GraphLayer, GraphNeuralNetwork, SortedEdges
from kernel_pytorch.models.graph import gcn_norm, pool
from kernel_pytorch.models.segments import aggregate

GRAPHS = {
    "ordinary": ([[0, 1, 2, 3, 1, 4], [1, 0, 3, 2, 2, 0]], 5),
    "nodes without edges, the last among them": ([[0, 4, 2], [4, 2, 0]], 7),
    "no edges": ([[], []], 3),
    "no nodes": ([[], []], 0),
    "duplicate edges": ([[0, 0, 1, 0, 2], [1, 1, 1, 1, 0]], 3),
    "self loops": ([[0, 1, 2, 1], [0, 2, 2, 0]], 3),
    "one target": ([[0, 1, 2, 3], [2, 2, 2, 2]], 4),
}
EACH = pytest.mark.parametrize("name", GRAPHS)
BOTH = pytest.mark.parametrize("ordered", [False, True], ids=["scatter", "segments"])
WEIGHTED = pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])


def graph(name, ordered, dtype=torch.float64, features=3):
    rows, nodes = GRAPHS[name]
    edge_index = torch.tensor(rows, dtype=torch.int64).view(2, -1)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(nodes, features, dtype=dtype, generator=generator)
    weight = torch.rand(edge_index.shape[1], dtype=dtype, generator=generator) + 0.5
    edges = SortedEdges.of(edge_index, nodes) if ordered else edge_index
    return x, edge_index, weight, edges


def dense(x, edge_index, weight, how):
    """Edge by edge, as the docstring says it."""
    received = [[] for _ in range(x.shape[0])]
    for place, (j, i) in enumerate(edge_index.T.tolist()):
        received[i].append(x[j] if weight is None else x[j] * weight[place])
    combine = {"sum": lambda m: m.sum(0), "mean": lambda m: m.mean(0), "max": lambda m: m.amax(0)}[how]
    rows = [combine(torch.stack(each)) if each else x.new_zeros(x.shape[1]) for each in received]
    return torch.stack(rows) if rows else x


@BOTH
@WEIGHTED
@pytest.mark.parametrize("how", ["sum", "mean", "max"])
@EACH
def test_what_targets_receive_and_its_gradients(name, how, weighted, ordered):
    x, edge_index, weight, edges = graph(name, ordered)
    leaves = [x.requires_grad_()] + ([weight.requires_grad_()] if weighted else [])
    weight = weight if weighted else None
    expected = dense(x, edge_index, weight, how)
    found = aggregate(x, edges, weight, how=how)
    torch.testing.assert_close(found, expected)
    if not expected.requires_grad:
        return
    dy = torch.randn(expected.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(1))
    pairs = [torch.autograd.grad(y, leaves, dy, materialize_grads=True) for y in (found, expected)]
    for ours, theirs in zip(*pairs, strict=True):
        torch.testing.assert_close(ours, theirs)


@BOTH
@EACH
def test_gradients_of_gradients(name, ordered):
    x, _, weight, edges = graph(name, ordered, features=2)
    x.requires_grad_()
    weight.requires_grad_()
    if x.numel():
        assert torch.autograd.gradcheck(lambda x, w: aggregate(x, edges, w), (x, weight))
        assert torch.autograd.gradgradcheck(lambda x, w: aggregate(x, edges, w, how="mean"), (x, weight))


@BOTH
def test_gcn_norm_is_differentiable_in_weights(ordered):
    _, _, weight, edges = graph("self loops", ordered)
    assert torch.autograd.gradcheck(lambda w: gcn_norm(edges, w, 3, torch.float64).scale, weight.requires_grad_())


def gcn(x, edge_index, weight, layer):
    """PyG's GCNConv: `add_remaining_self_loops`, then the normalised adjacency as a matrix."""
    nodes = x.shape[0]
    weight = x.new_ones(edge_index.shape[1]) if weight is None else weight
    adjacency = x.new_zeros(nodes, nodes).index_put((edge_index[1], edge_index[0]), weight, accumulate=True)
    loops = set(edge_index[0][edge_index[0] == edge_index[1]].tolist())
    missing = torch.tensor([float(i not in loops) for i in range(nodes)], dtype=x.dtype)
    adjacency = adjacency + torch.diag(missing)
    scale = adjacency.sum(1).pow(-0.5)
    scale = scale.masked_fill(scale == float("inf"), 0.0)
    return scale[:, None] * adjacency * scale @ (x @ layer.neighbours.weight.T) + layer.neighbours.bias


@BOTH
@WEIGHTED
@EACH
def test_gcn_is_the_normalised_adjacency(name, weighted, ordered):
    x, edge_index, weight, edges = graph(name, ordered)
    weight = weight if weighted else None
    layer = GraphLayer(3, 4, "gcn").double()
    parameters = [x.requires_grad_(), *layer.parameters()]
    found, expected = layer(x, edges, weight), gcn(x, edge_index, weight, layer)
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(
        torch.autograd.grad(found.square().sum(), parameters),
        torch.autograd.grad(expected.square().sum(), parameters),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("ordered", [False, True])
def test_weights_of_zero_make_no_infinity(ordered):
    """A self loop of weight 0 is the only way to a degree of 0."""
    edge_index = torch.tensor([[0, 1], [0, 1]])
    edges = SortedEdges.of(edge_index, 2) if ordered else edge_index
    found = GraphLayer(3, 2, "gcn")(torch.ones(2, 3), edges, torch.tensor([0.0, 1.0], requires_grad=True))
    assert found.isfinite().all()


@BOTH
@pytest.mark.parametrize("sizes", [(5, 2), (2, 5)], ids=["narrower", "wider"])
@pytest.mark.parametrize("how", ["sum", "mean", "max"])
def test_a_layer_is_graph_conv(how, sizes, ordered):
    """PyG's GraphConv, which adds and then multiplies: nothing else may come of the other order."""
    x, edge_index, weight, edges = graph("ordinary", ordered, features=sizes[0])
    layer = GraphLayer(*sizes, how).double()
    expected = layer.neighbours(dense(x, edge_index, weight, how)) + layer.root(x)
    torch.testing.assert_close(layer(x, edges, weight), expected)


NETWORKS = pytest.mark.parametrize(
    ("aggregation", "pooling"), [("sum", "max"), ("mean", None), ("max", "mean"), ("gcn", None), ("gcn", "sum")]
)


def network(aggregation, pooling):
    """A model, its arguments with edges of both kinds, and what it gives in float64."""
    x, edge_index, weight, edges = graph("duplicate edges", True, torch.float32, features=4)
    more = (torch.tensor([1, 0, 1]), 4) if pooling else ()
    torch.manual_seed(0)
    model = GraphNeuralNetwork(4, 3, hidden_dim=8, num_layers=2, aggregation=aggregation, pooling=pooling)
    wide = copy.deepcopy(model).double().use(techniques=())
    expected = wide(x.double(), edge_index, weight.double(), *more)
    assert not torch.allclose(expected, wide(x.double(), edge_index, None, *more), rtol=1e-3)
    assert expected.shape == ((4, 3) if pooling else (3, 3))
    assert {*model.state_dict()} == {*wide.state_dict()}
    return model, [(x, kind, weight, *more) for kind in (edge_index, edges)], expected


@NETWORKS
def test_a_network_computes_the_same_by_every_technique(aggregation, pooling):
    model, calls, expected = network(aggregation, pooling)
    for options in ({}, {"level": "reference"}, {"techniques": ()}):
        for call in calls:
            torch.testing.assert_close(model.use(**options)(*call).double(), expected, rtol=1e-4, atol=1e-5)


@NETWORKS
def test_a_network_compiles_whole_and_trains(aggregation, pooling):
    model, calls, expected = network(aggregation, pooling)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for call in calls:
        found = compiled(*call)
        torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)
        ours = torch.autograd.grad(found.square().sum(), [*model.parameters()])
        theirs = torch.autograd.grad(model(*call).square().sum(), [*model.parameters()])
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@BOTH
@pytest.mark.parametrize("how", ["sum", "mean", "max"])
def test_graphs_without_nodes_are_pooled_to_zeros(how, ordered):
    x, batch = torch.randn(4, 3), torch.tensor([3, 0, 3, 3])
    found = pool(x, batch, 6, how=how, ordered=ordered)
    assert found.shape == (6, 3)
    assert found[[1, 2, 4, 5]].eq(0).all()
    torch.testing.assert_close(found[0], x[1])
    torch.testing.assert_close(
        found[3], {"sum": torch.sum, "mean": torch.mean, "max": torch.amax}[how](x[[0, 2, 3]], 0)
    )


def test_one_graph_needs_no_batch():
    x = torch.randn(4, 3)
    torch.testing.assert_close(pool(x, None), x.mean(0, keepdim=True))


def test_segments_repeat_bit_by_bit_whatever_the_threads():
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(500, (2, 20000), generator=generator)
    x = torch.randn(500, 33, generator=generator)
    edges, threads = SortedEdges.of(edge_index, 500), torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 1):
            torch.set_num_threads(count)
            leaf = x.clone().requires_grad_()
            y = aggregate(leaf, edges, how="mean")
            found.append((y.detach(), *torch.autograd.grad(y.square().sum(), leaf)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for pair in found[1:] for a, b in zip(pair, found[0], strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="atomic operations are a matter of GPUs")
@pytest.mark.parametrize("how", ["sum", "mean", "max"])
def test_segments_repeat_bit_by_bit_on_a_gpu(how):
    edge_index = torch.randint(500, (2, 20000), generator=torch.Generator().manual_seed(0))
    x, weight = torch.randn(500, 64, device="cuda"), torch.rand(20000, device="cuda")
    edges, found = SortedEdges.of(edge_index, 500).to("cuda"), []
    for _ in range(10):
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = aggregate(leaves[0], edges, leaves[1], how=how)
        found.append((y.detach(), *torch.autograd.grad(y.square().sum(), leaves)))
    assert all(torch.equal(a, b) for pair in found[1:] for a, b in zip(pair, found[0], strict=True))
    torch.testing.assert_close(found[0][0].cpu(), aggregate(x.cpu(), edge_index, weight.cpu(), how=how))


def test_sorted_edges_keep_what_they_are_of():
    edge_index = torch.tensor([[3, 0, 1, 0, 2], [1, 1, 0, 1, 2]])
    edges = SortedEdges.of(edge_index, 4)
    assert edges.degrees.tolist() == [1, 3, 1, 0]
    assert edges.order.tolist() == [2, 0, 1, 3, 4]
    assert torch.equal(torch.stack((edges.by_target.index, edges.targets)), edge_index[:, edges.order])
    assert edges.self_loops.tolist() == [False, False, True, False]
    assert edges.to("cpu").by_source.index.tolist() == edges.by_source.index.tolist()


X, EDGES = torch.zeros(3, 2), torch.tensor([[0, 1], [1, 2]])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: SortedEdges.of(EDGES.int(), 3), TypeError, "int64"),
        (lambda: SortedEdges.of(EDGES.T[:1], 3), ValueError, r"\(2, E\)"),
        (lambda: SortedEdges.of(EDGES, 2), ValueError, "targets are from 1 to 2; there are 2"),
        (lambda: aggregate(X, -EDGES), ValueError, "sources are from -1 to 0"),
        (lambda: aggregate(X, EDGES, torch.ones(3)), ValueError, r"for 2 edges it must be \(2,\)"),
        (lambda: aggregate(X, EDGES, how="median"), ValueError, "median"),
        (lambda: aggregate(X[0], EDGES), ValueError, "nodes, features"),
        (lambda: aggregate(X, SortedEdges.of(EDGES, 4)), ValueError, "given 3 nodes; the sorted edges have 4"),
        (lambda: pool(X, torch.zeros(3, dtype=torch.int64)), ValueError, "num_graphs"),
        (lambda: pool(X, torch.zeros(2, dtype=torch.int64), 1), ValueError, "for 3 nodes"),
        (lambda: GraphNeuralNetwork(2, 2, aggregation="most"), ValueError, "most"),
        (lambda: GraphNeuralNetwork(2, 2, pooling="most"), ValueError, "most"),
        (lambda: GraphNeuralNetwork(2, 2, num_layers=0), ValueError, "at least 1"),
        (lambda: gcn_norm(SortedEdges.of(EDGES, 3, 3), None, 3), ValueError, "one kind"),
    ],
)
def test_what_does_not_fit_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
