"""Models without a fault: nothing is called a break or a fusion that is none."""

import pytest
import torch
from torch import nn

from kernel_pytorch.compile_recipes import CompilerOptimizationAssistant


class Network(nn.Module):
    """Convolutions written by hand, with a residual and pooling."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16)
        self.body = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(2))
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        x = self.norm(self.stem(x))
        for layer in self.body:
            x = x + torch.relu(layer(x))
        return self.head(x.mean((2, 3)))


class Graph(nn.Module):
    """Messages along edges, summed at their targets."""

    def __init__(self):
        super().__init__()
        self.message, self.update = nn.Linear(32, 16), nn.Linear(32, 16)

    def forward(self, x, edges):
        source, target = edges
        messages = self.message(torch.cat((x[source], x[target]), -1)).tanh()
        summed = torch.zeros_like(x).index_add(0, target, messages)
        ones = torch.ones(len(source), 1, device=x.device)
        counts = torch.zeros(len(x), 1, device=x.device).scatter_add(0, target[:, None], ones)
        return self.update(torch.cat((x, summed / counts.clamp(min=1)), -1))


CLEAN = {
    "network": (Network, lambda: (torch.randn(2, 3, 16, 16),), {"channels_last", "computed_again"}),
    "graph": (Graph, lambda: (torch.randn(10, 16), torch.randint(0, 10, (2, 30))), {"bias_act"}),
    "recurrent": (lambda: nn.GRUCell(8, 8), lambda: (torch.randn(4, 8), torch.randn(4, 8)), set()),
    "embedding": (lambda: nn.EmbeddingBag(20, 8), lambda: (torch.randint(0, 20, (4, 5)),), set()),
}


@pytest.mark.parametrize("name", CLEAN)
@pytest.mark.parametrize("training", [True, False])
def test_a_clean_model_is_called_clean(name, training):
    make, inputs, allowed = CLEAN[name]
    report = CompilerOptimizationAssistant().analyze_component(make().train(training), *inputs())
    assert [f for f in report["compilation_readiness"] if f.kind != "note"] == []
    assert {f.kind for f in report["fusion_opportunities"]} <= allowed
