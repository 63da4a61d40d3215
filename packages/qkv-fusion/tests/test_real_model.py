"""The real all-MiniLM-L6-v2, reading real text, with three projections of each attention in one product."""

import copy

import pytest

from kernel_pytorch.harness.pretrained import embedding_cosine
from kernel_pytorch.qkv_fusion import LinearGroup, fuse, unfuse

pytestmark = pytest.mark.slow
SAME = 1.0 - 1e-9  # the same numbers, added in another order


def test_embeddings_of_a_fused_model(pretrained):
    ours = fuse(copy.deepcopy(pretrained[1]))
    assert sum(isinstance(module, LinearGroup) for module in ours.modules()) == 6
    assert embedding_cosine(pretrained, ours, texts=8, length=128) > SAME
    for (name, before), after in zip(pretrained[1].named_parameters(), unfuse(ours).parameters(), strict=True):
        assert before.equal(after), name


def test_keys_in_the_place_of_values_are_found(pretrained):
    ours = copy.deepcopy(pretrained[1])
    for layer in ours.encoder.layer:
        attention = layer.attention.self
        attention.key, attention.value = attention.value, attention.key
    fuse(ours)
    assert embedding_cosine(pretrained, ours) < 0.999
