"""Every planted fault is found with its line, and nothing else is called a break."""

import bad_models
import pytest
import torch

from kernel_pytorch.compile_recipes import CompilerOptimizationAssistant

BREAKS = {
    "branch_on_data", "item", "mask_indexing", "printing", "disabled", "timer", "python_random", "nn_buffer", "data_ptr"
}  # fmt: skip


@pytest.fixture(scope="module", params=bad_models.MODELS, ids=lambda cls: cls.__name__)
def analysed(request):
    torch.manual_seed(0)
    model = request.param()
    inputs = model.inputs()
    return request.param, CompilerOptimizationAssistant().analyze_component(model, *inputs, shapes=[inputs] * 2)


def test_every_planted_fault_is_found_with_its_line(analysed, capsys):
    cls, report = analysed
    found = {(f.place, f.recipe if f.kind in ("graph-break", "recompile") else f.kind) for f in report.findings}
    planted = {(f"bad_models.py:{line}", name) for line, name in bad_models.plants(cls)}
    assert len(planted) >= 10
    missed = {plant for plant in planted if plant not in found and plant[1] != "module_counter"}
    assert missed == set()
    if any(name == "module_counter" for _, name in planted):  # a guard is told with the function that it is in
        assert any("self.calls" in f.what for f in report.findings)


def test_no_line_without_a_plant_is_called_a_break(analysed):
    cls, report = analysed
    planted = {f"bad_models.py:{line}" for line, name in bad_models.plants(cls) if name in BREAKS}
    assert {f.place for f in report["compilation_readiness"] if f.kind == "graph-break"} <= planted
