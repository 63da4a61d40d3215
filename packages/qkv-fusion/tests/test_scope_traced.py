"""What a forward reads of its module, where a compiler traces it, is what it reads in eager."""

import pytest
import torch
import torch._dynamo.testing
from torch.nn import functional as F

from kernel_pytorch.qkv_fusion import fuse


class Asking(torch.nn.Module):
    """Reads what torch.nn.Module keeps of a module, and an attribute that may be the class's or its own."""

    window = 5

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (torch.nn.Linear(8, n, bias=False) for n in (8, 4, 4))
        self.register_buffer("factor", torch.full((), 2.0))

    def forward(self, x):
        y = (
            F.dropout(torch.cat((self.q_proj(x), self.k_proj(x), self.v_proj(x)), -1), 0.5, self.training)
            * self.factor
            * self.window
        )
        counts = [len(list(self.named_children())), len(list(self.parameters())), len(list(self.buffers()))]
        return y, torch.tensor([float(self.training), *counts, self.window])


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("way", ["compiled", "exported"])
def test_what_a_forward_reads_of_its_module_is_the_same_where_it_is_traced(training, way):
    """In evaluation dropout ran in compiled models, whatever their mode; the attribute is set after `fuse`."""
    model, x = fuse(Asking()).train(training), torch.randn(3, 8)
    model.window = 7
    torch._dynamo.reset()
    if way == "compiled":
        traced = torch.compile(model, backend="eager", fullgraph=True)
    else:
        traced = torch.export.export(model, (x,), strict=True).module()
    torch.manual_seed(0)
    wanted = model(x)
    torch.manual_seed(0)
    torch.testing.assert_close(traced(x), wanted)
    assert wanted[1].tolist() == [float(training), 3.0, 1.0, 1.0, 7.0]


def test_a_model_with_dropout_is_evaluated_without_it_where_it_is_compiled():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    model = transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=64)).eval()
    ids = torch.randint(64, (2, 9))
    stock = model(ids).last_hidden_state
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(fuse(model), backend="eager")(ids).last_hidden_state, stock)


def test_layers_that_are_compiled_one_by_one_share_a_graph():
    """Ten would be two more than the limit of graphs, beyond which layers run in eager."""
    layers = torch.nn.Sequential(*(fuse(Asking()).eval() for _ in range(10)))
    torch._dynamo.reset()
    compiles = torch._dynamo.testing.CompileCounter()
    for layer in layers:
        layer.compile(backend=compiles, fullgraph=True)
        layer(torch.randn(3, 8))
    assert compiles.frame_count == 1
