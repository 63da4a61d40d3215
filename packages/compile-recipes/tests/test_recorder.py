"""The graph of one eager run is whole, and a part of it can be run again."""

import linecache

import torch
from torch import nn

from kernel_pytorch.compile_recipes.recorder import Shape, record


class Odd(nn.Module):
    """What graph capture stumbles over: a branch on data, a view written in place, a helper, dropout."""

    def __init__(self):
        super().__init__()
        self.body, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x):
        y = self.body(x)
        if y.sum().item() > 1e9:
            y = y * 0
        out = torch.zeros_like(y)
        out[:, :4] = y[:, 4:]
        return self.drop(helper(out)) + 1


def helper(x):
    return x.relu_()  # in place


def node_of(graph, value):
    return next(n for n in graph.nodes if n.value is value)


def test_a_part_runs_again_as_the_module_does():
    torch.manual_seed(0)
    model, x, new = Odd(), torch.randn(2, 8), torch.randn(2, 8)
    graph = record(model, (x,))
    again = graph.again(graph.nodes[-1], node_of(graph, x), new)
    assert torch.equal(again, model.eval()(new))  # dropout is the identity in a record
    assert graph.rerun > 0


def test_nodes_have_the_users_line_and_the_path_of_the_module():
    graph = record(Odd(), (torch.randn(2, 8),))
    by_name = {n.name: n for n in graph.nodes}
    assert by_name["addmm"].path == "body"
    relu = by_name["relu"]
    file, _, line = relu.line.rpartition(":")
    assert file == __file__
    assert "in place" in linecache.getline(file, int(line))


def test_a_value_written_later_is_the_old_one_for_its_reader():
    def forward(x):
        y = x * 2
        z = y + 1
        y.zero_()
        return z, y

    module = nn.Identity()
    module.forward = forward
    x = torch.ones(3)
    graph = record(module, (x,))
    assert torch.equal(next(n for n in graph.nodes if n.name == "mul").value, torch.full((3,), 2.0))
    assert torch.equal(next(n for n in graph.nodes if n.name == "add").value, torch.full((3,), 3.0))


def test_beyond_the_memory_limit_operators_have_no_value_and_still_count():
    model, x = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6))), torch.randn(64, 32)
    whole, cut = record(model, (x,)), record(model, (x,), memory_limit=3 * x.nbytes)
    assert whole.dropped == 0
    assert cut.dropped > 0
    assert any(isinstance(n.value, Shape) for n in cut.nodes)
    assert sum(n.cost.flops for n in cut.nodes) == sum(n.cost.flops for n in whole.nodes) == 6 * 2 * 64 * 32 * 32


def test_a_broadcast_tensor_counts_its_distinct_bytes():
    module = nn.Identity()
    module.forward = lambda x: x.expand(1000, 8) + 1
    graph = record(module, (torch.randn(1, 8),))
    assert graph.nodes[-1].cost.bytes == 4 * (8 + 8000)


def test_an_operator_that_refuses_new_values_proves_nothing():
    module = nn.Identity()
    module.forward = lambda x: x[x > 0].view(3, 2) + x.sum()
    x = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, -1.0])
    graph = record(module, (x,))
    assert graph.again(graph.nodes[-1], node_of(graph, x), -x).isnan().all()
