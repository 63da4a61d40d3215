"""Recall and precision on labelled blocks of published models."""

import importlib

import blocks
import blocks_timm
import pytest
import torch

from kernel_pytorch.compile_recipes.finders import find
from kernel_pytorch.compile_recipes.recorder import record

TABLES = {"transformers": (blocks, blocks.TRANSFORMERS), "timm": (blocks_timm, blocks_timm.TIMM)}
CASES = [(library, name) for library, (_, table) in TABLES.items() for name in table]


def found_in(library, name):
    module, table = TABLES[library]
    config, labels = table[name]
    model, kwargs = module.build(imported(library), name, config)
    paths = {path for path, _ in model.named_modules()}
    assert {*labels} <= paths, "a label of a module that is not there"
    graph = record(model, (), kwargs)
    with torch.no_grad():
        found = find(graph)
    return {path: {f.kind for f in found if within(f.path, path) and f.kind in blocks.KINDS} for path in labels}


def imported(library):
    try:
        return importlib.import_module(library)
    except Exception as error:  # of torchvision, which timm imports, where it was made for another torch
        pytest.skip(f"{library}: {error}")


def within(path, parent):
    return path == parent or path.startswith(f"{parent}.")


@pytest.mark.parametrize(("library", "name"), CASES, ids=[name for _, name in CASES])
def test_what_is_found_in_a_block_is_what_its_code_computes(library, name):
    module, table = TABLES[library]
    labels, found = table[name][1], found_in(library, name)
    wrong = {path: sorted(found[path] - labels[path]) for path in labels if found[path] - labels[path]}
    missed = {path: sorted(labels[path] - found[path]) for path in labels if labels[path] - found[path]}
    known = {path: sorted(kinds) for (model, path), (kinds, _) in module.MISSED.items() if model == name}
    assert wrong == {}
    assert missed == known


@pytest.mark.parametrize(("library", "enough"), [("transformers", 100), ("timm", 100)])
def test_there_are_enough_labels(library, enough):
    module, table = TABLES[library]
    assert sum(len(labels) for _, labels in table.values()) >= enough
    assert all(reason for _, reason in module.MISSED.values())
