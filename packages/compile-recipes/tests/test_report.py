"""The report: five parts, 80 columns, JSON, a page by itself; and the model as it was."""

import copy
import json
from html.parser import HTMLParser

import pytest
import torch
from torch import nn
from torch.nn.functional import rms_norm

from kernel_pytorch.compile_recipes import CompilerOptimizationAssistant, techniques
from kernel_pytorch.compile_recipes.costs import GPUS
from kernel_pytorch.compile_recipes.records import Finding
from kernel_pytorch.compile_recipes.suggestions import suggestions


class Model(nn.Module):
    """With everything that an analysis could leave changed."""

    def __init__(self):
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(32), nn.Dropout(0.3)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.calls, self.last = 0, None

    def forward(self, x):
        self.calls += 1
        for layer in self.layers:
            x = x + self.drop(layer(self.norm(x)))
        self.last = x
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


@pytest.fixture(scope="module")
def report():
    torch.manual_seed(0)
    return CompilerOptimizationAssistant().analyze_component(Model(), torch.randn(8, 32), gpu="h200")


def test_it_has_five_parts_and_says_which(report):
    assert [f.kind for f in report["fusion_opportunities"]] == ["rms_norm", "residual_norm"]
    assert report["kernel_efficiency"]["gpu"] == "h200"
    assert report["memory_bottlenecks"]["saved"] > 0
    assert report["compilation_readiness"]["breaks"] == 0
    assert report["optimization_suggestions"][0].gain_bytes > 0
    with pytest.raises(KeyError, match="there are: compilation_readiness"):
        report["nothing"]


def test_recompiles_that_were_not_tried_are_not_counted(report):
    assert "no graph breaks; recompiles not tried, for want of shapes" in str(report)
    again = CompilerOptimizationAssistant().analyze_component(
        Model(), torch.randn(8, 32), shapes=[(torch.randn(9, 32),)]
    )
    assert "no graph breaks; 1 recompile\n" in str(again)


def test_advice_on_attention_keeps_its_mask():
    class Attend(nn.Module):
        def forward(self, x, mask):
            return (x @ x.mT * 0.25).masked_fill(mask, float("-inf")).softmax(-1) @ x

    x, mask = torch.randn(2, 6, 16), torch.zeros(2, 1, 6, dtype=torch.bool)
    found = CompilerOptimizationAssistant().analyze_component(Attend(), x, mask)["fusion_opportunities"]
    assert [f.change for f in found] == ["y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.25)"]


def test_a_change_gains_the_launches_that_it_saves(report):
    norm, _ = report["fusion_opportunities"]
    assert norm.evidence["launches"] == 4  # pow, mean, add, rsqrt and mul become one
    assert norm.gain_seconds == pytest.approx(4 * GPUS["h200"].launch_seconds)


def test_the_users_own_code_comes_first_where_changes_gain_as_much():
    def finding(what, line, gain_bytes, gain_seconds):
        return Finding("rms_norm", what, line, change="it", gain_bytes=gain_bytes, gain_seconds=gain_seconds)

    found = suggestions([
        finding("library", "/venv/lib/python3.11/site-packages/transformers/models/llama.py:70", 64, 1e-6),
        finding("no line", "", 64, 1e-6),
        finding("small", "/home/me/model.py:2", 64, 1e-7),
        finding("mine", "/home/me/model.py:1", 64, 1e-6),
        finding("large", "/venv/lib/python3.11/site-packages/transformers/models/llama.py:71", 128, 2e-6),
    ])  # fmt: skip
    assert [f.what.partition(";")[0] for f in found] == ["large", "mine", "library", "no line", "small"]


def test_it_fits_80_columns_and_its_first_ten_lines_say_most(report):
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 80
    first = lines[: lines.index("")]
    assert len(first) <= 10
    assert any(line.startswith("1. test_report.py:") and "  RMSNorm: by hand" in line for line in first)


def test_the_json_has_file_line_recipe_and_change(report, tmp_path):
    found = json.loads(report.save(tmp_path / "report.json").read_text())
    norm, _ = found["parts"]["fusion_opportunities"]["findings"]
    assert norm["line"].startswith(__file__)
    assert norm["source"].startswith("return x * torch.rsqrt")
    assert norm["change"].startswith("y = rms_norm(")
    assert norm["recipe"] == "norm_by_hand"


def test_the_page_needs_no_other_file(report, tmp_path):
    seen = []

    class Parser(HTMLParser):
        def handle_starttag(self, tag, attrs):
            seen.append((tag, dict(attrs)))

    Parser().feed(report.save(tmp_path / "report.html").read_text())
    assert not {tag for tag, _ in seen} & {"script", "link", "img", "iframe"}
    assert not any("src" in attrs or "href" in attrs for _, attrs in seen)
    with pytest.raises(ValueError, match=r"must end in \.json or \.html"):
        report.save(tmp_path / "report.txt")


def test_the_model_is_as_it_was():
    model, x = Model(), torch.randn(8, 32)
    model.layers[0].weight.grad = torch.ones(32, 32)
    hook = model.layers[0].register_forward_hook(lambda *_: None)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    CompilerOptimizationAssistant().analyze_component(model, x)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert (model.calls, model.last, model.training) == (0, None, True)
    assert torch.equal(model.layers[0].weight.grad, torch.ones(32, 32))
    assert model.layers[1].weight.grad is None
    assert list(model.layers[0]._forward_hooks) == [hook.id]


class MyRMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(32)), 1e-6

    def forward(self, x):
        y = x.to(torch.float32)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


def test_optimize_is_named_where_the_package_would_replace_the_module(report):
    if "rmsnorm" not in techniques.able():
        pytest.skip("rmsnorm is not installed")
    model = nn.Sequential(nn.Linear(32, 32), MyRMSNorm())
    found = CompilerOptimizationAssistant().analyze_component(model, torch.randn(8, 32))
    assert {f.kind: f.applies for f in found["fusion_opportunities"]} == {"rms_norm": "safe"}
    assert "forward" not in model[1].__dict__
    assert {f.kind: f.applies for f in report["fusion_opportunities"]} == {
        "rms_norm": "by hand", "residual_norm": "by hand"  # no module computes them alone
    }  # fmt: skip


@pytest.mark.parametrize(
    "norm",
    [
        nn.RMSNorm(32),
        lambda x: nn.functional.rms_norm(x, (32,)),
        lambda x: rms_norm(x, (32,)),
    ],
)
def test_the_norm_of_pytorch_is_not_by_hand(norm):
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = norm

        def forward(self, x):
            return self.norm(x)

    report = CompilerOptimizationAssistant().analyze_component(Normed(), torch.randn(8, 32))
    assert report["fusion_opportunities"].findings == []


def test_an_exception_of_the_model_is_told_with_its_line():
    class Broken(nn.Module):
        def forward(self, x):
            return x @ torch.ones(5, 5)

    report = CompilerOptimizationAssistant().analyze_component(Broken(), torch.ones(2, 3))
    (finding,) = report["compilation_readiness"]
    assert finding.kind == "error"
    assert finding.source == "return x @ torch.ones(5, 5)"
    assert "RuntimeError" in str(report)


def test_what_cannot_be_analyzed_is_refused():
    assistant = CompilerOptimizationAssistant()
    with pytest.raises(TypeError, match=r"it must be a torch\.nn\.Module"):
        assistant.analyze_component("model")
    with pytest.raises(TypeError, match="before it is compiled"):
        assistant.analyze_component(torch.compile(nn.Linear(2, 2)))
    with pytest.raises(TypeError, match="kwargs: given list; it must map names to inputs"):
        CompilerOptimizationAssistant().analyze_component(torch.nn.Linear(2, 2), kwargs=[torch.ones(2)])
    with pytest.raises(TypeError, match="kwargs: given Tensor"):
        assistant.optimize(torch.nn.Linear(2, 2), kwargs=torch.ones(2))
    with pytest.raises(ValueError, match="at most 4"):
        assistant.analyze_component(nn.Linear(2, 2), torch.ones(2), shapes=[(torch.ones(2),)] * 5)
    with pytest.raises(ValueError, match="gpu is 'b9'"):
        assistant.analyze_component(nn.Linear(2, 2), torch.ones(2), gpu="b9")


def test_launches_are_counted_on_request():
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU()).eval()
    report = CompilerOptimizationAssistant().analyze_component(model, torch.randn(4, 16), count_launches=True)
    assert report["kernel_efficiency"]["launches"] == 1
    assert "compiled by Inductor it launches 1, of 1 kernels" in " ".join(str(report).split())


def test_further_inputs_that_are_no_tuple_are_refused():
    with pytest.raises(TypeError, match=r"shapes: each is a tuple of inputs, such as \(x,\)"):
        CompilerOptimizationAssistant().analyze_component(
            torch.nn.Linear(4, 4), torch.ones(2, 4), shapes=[torch.ones(3, 4)]
        )
