"""Settings that cost, and silence where nothing is wrong."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kernel_pytorch.compile_recipes.recorder import record
from kernel_pytorch.compile_recipes.settings import setting_findings


class Dropping(nn.Module):
    def __init__(self, mindful):
        super().__init__()
        self.layer, self.mindful = nn.Linear(8, 8), mindful

    def forward(self, x):
        return F.dropout(self.layer(x), 0.1, self.training if self.mindful else True)  # here


def kinds(model, x, saved=0):
    found = setting_findings(model, (x,), None, record(model, (x,)), saved)
    return [(f.kind, f.what) for f in found]


def test_dropout_in_evaluation():
    x = torch.randn(4, 8)
    ((kind, what),) = kinds(Dropping(False).eval(), x)
    assert (kind, what) == ("setting", "dropout is active in evaluation")
    assert kinds(Dropping(True).eval(), x) == []
    assert kinds(Dropping(False).train(), x) == []


def test_a_part_in_training_mode_inside_a_model_in_evaluation():
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).eval()
    model[1].train()
    ((_, what),) = kinds(model, torch.randn(4, 8))
    assert what == "1 modules are in training mode inside a model in evaluation: 1"


def test_training_mode_without_a_parameter_to_train():
    model = nn.Linear(8, 8).requires_grad_(False)
    ((_, what),) = kinds(model, torch.randn(4, 8))
    assert what == "training mode, though no parameter needs a gradient"
    assert kinds(nn.Linear(8, 8), torch.randn(4, 8)) == []


def test_gradients_in_evaluation_are_a_note():
    model, x = nn.Linear(8, 8).eval(), torch.randn(4, 8)
    assert [kind for kind, _ in kinds(model, x, saved=128)] == ["note"]
    with torch.no_grad():
        assert kinds(model, x, saved=128) == []


def test_eager_attention_of_transformers():
    transformers = pytest.importorskip("transformers")
    config = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    x = torch.randint(0, 10, (1, 8))
    for implementation, expected in (("eager", 1), ("sdpa", 0)):
        model = transformers.BertModel(transformers.BertConfig(**config, attn_implementation=implementation))
        assert len(kinds(model.eval(), x)) == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="precision and launches are settings of a GPU")
def test_precision_and_launches_on_a_gpu():
    found = [what for _, what in kinds(nn.Linear(8, 8).cuda(), torch.randn(4, 8, device="cuda"))]
    assert any("float32 on a GPU" in what for what in found)
    assert any("without tensor cores" in what for what in found)
    assert any("host takes longer" in what for what in found)
