"""Recall and precision on labelled blocks of published models."""

import blocks
import pytest
import torch

from kernel_pytorch.compile_recipes.finders import find
from kernel_pytorch.compile_recipes.recorder import record

transformers = pytest.importorskip("transformers")


def found_in(name):
    config, labels = blocks.TRANSFORMERS[name]
    model, kwargs = blocks.build(transformers, name, config)
    paths = {path for path, _ in model.named_modules()}
    assert {*labels} <= paths, "a label of a module that is not there"
    graph = record(model, (), kwargs)
    with torch.no_grad():
        found = find(graph)
    return {path: {f.kind for f in found if within(f.path, path) and f.kind in blocks.KINDS} for path in labels}


def within(path, parent):
    return path == parent or path.startswith(f"{parent}.")


@pytest.mark.parametrize("name", blocks.TRANSFORMERS)
def test_what_is_found_in_a_block_is_what_its_code_computes(name):
    labels, found = blocks.TRANSFORMERS[name][1], found_in(name)
    wrong = {path: sorted(found[path] - labels[path]) for path in labels if found[path] - labels[path]}
    missed = {path: sorted(labels[path] - found[path]) for path in labels if labels[path] - found[path]}
    known = {path: sorted(kinds) for (model, path), (kinds, _) in blocks.MISSED.items() if model == name}
    assert wrong == {}
    assert missed == known


def test_there_are_enough_labels():
    assert sum(len(labels) for _, labels in blocks.TRANSFORMERS.values()) >= 100
    assert all(reason for _, reason in blocks.MISSED.values())
