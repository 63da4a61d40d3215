"""Each break once with the user's line, and nothing on clean models."""

import linecache
import logging

import pytest
import torch
from torch import nn

from kernel_pytorch.compile_recipes.internals import break_registry
from kernel_pytorch.compile_recipes.readiness import parse, readiness
from kernel_pytorch.compile_recipes.registry import ADVICE, BY_ID, BY_WORDS, recipe_of


class Branch(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            x = x + 1
        return x


class Counter(nn.Module):
    def __init__(self):
        super().__init__()
        self.n = 0

    def forward(self, x):
        self.n += 1
        return x * self.n


def test_a_break_has_its_line_its_id_and_its_recipe():
    (found,) = readiness(Branch(), [((torch.ones(3),), None)]).breaks
    assert found.source == "if x.sum() > 0:"
    assert found.recipe == "branch_on_data"
    assert not found.eager


def test_a_break_that_is_met_twice_is_told_once():
    model = nn.Sequential(Branch(), Branch())
    assert len(readiness(model, [((torch.ones(3),), None)] * 2).breaks) == 1


def test_a_clean_model_has_no_break_and_recompiles_for_another_shape():
    model = nn.TransformerEncoderLayer(32, 2, batch_first=True)
    calls = [((torch.randn(2, n, 32),), None) for n in (4, 6)]
    found = readiness(model, calls)
    assert found.breaks == []
    assert found.error == ""
    ((_, why),) = found.recompiles
    assert "size mismatch" in why


def test_the_same_guard_with_another_number_is_one_reason():
    found = readiness(Counter(), [((torch.ones(3),), None)] * 5)
    assert found.graphs == 5
    assert len(found.recompiles) == 1


def test_what_export_refuses_is_told():
    assert readiness(nn.Linear(3, 3), [((torch.ones(3),), None)], export=True).export == ""
    refused = readiness(Branch(), [((torch.ones(3),), None)], export=True)
    assert refused.export.startswith("values decide about a branch or a size")
    file, _, number = refused.export_line.rpartition(":")
    assert "if " in linecache.getline(file, int(number))
    assert file == __file__


def test_the_users_loggers_are_as_before(capfd):
    logger = torch._logging.getArtifactLogger("torch._dynamo.symbolic_convert", "graph_breaks")
    logger = getattr(logger, "logger", logger)
    before = [(item, item.level, item.propagate, [*item.handlers]) for item in (logger, logging.getLogger("torch"))]
    readiness(Branch(), [((torch.ones(3),), None)], export=True)
    assert [(i, i.level, i.propagate, [*i.handlers]) for i, *_ in before] == before
    assert "raph break" not in "".join(capfd.readouterr())


def test_a_builtin_is_named():
    class Printing(torch.nn.Module):
        def forward(self, x):
            print("here", x.shape)  # noqa: T201
            return x + 1

    (found,) = readiness(Printing(), [((torch.randn(4),), None)]).breaks
    assert (found.gb, found.cause) == ("GB0059", "Failed to trace builtin operator `print`")


@pytest.mark.parametrize("gb", BY_ID)
def test_an_id_means_what_it_meant(gb):
    registry = break_registry()
    if gb not in registry:
        pytest.skip("this torch has no such id")
    words, recipe = BY_ID[gb]
    assert any(words.lower() in entry["Gb_type"].lower() for entry in registry[gb])
    assert recipe in ADVICE


def test_words_name_recipes_that_have_advice():
    assert {recipe for _, recipe in BY_WORDS} <= {*ADVICE}
    assert recipe_of("", "Failed to trace builtin operator", "print(x)") == "printing"
    assert recipe_of("", "something new") == ""


OLD = """Graph break: torch.compile cannot properly resume from this graph break, which results in a skip.
torch.compile will skip tracing the frame forward ({file} line 29) and fall back to eager.
The graph break occurred in the following user code:
  File "{file}", line {line}, in forward
    {source}
  File "{torch}/_dynamo/polyfills/__init__.py", line 400, in cmp_ne
    if isinstance(type(a).__ne__, types.FunctionType):
"""


def test_a_skipped_function_of_older_torch_has_its_line(tmp_path):
    file = tmp_path / "model.py"
    file.write_text("with span():\nreturn a + 1 if a.data_ptr() != 0 else a\n")
    found = [parse(OLD.format(file=file, line=line, source="", torch=torch.__path__[0])) for line in (1, 2)]
    assert [(b.line, b.eager, b.recipe) for b in found] == [
        (f"{file}:1", True, "context_manager"),
        (f"{file}:2", True, "data_ptr"),
    ]
