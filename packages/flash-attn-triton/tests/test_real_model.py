"""The real all-MiniLM-L6-v2, reading real text of several lengths, with the attention of this package."""

import copy

import pytest

from kernel_pytorch.flash_attn_triton import flash_attention_masked
from kernel_pytorch.harness.pretrained import embedding_cosine

pytestmark = pytest.mark.slow
SAME = 1.0 - 1e-9  # 0.99999 would not tell a mask that lets one padded token through


def with_attention(pretrained, name, attend):
    """A copy that calls `attend(q, k, v, mask, scale)`."""
    transformers = pytest.importorskip("transformers")

    def attention(module, query, key, value, attention_mask, scaling=None, **others):
        return attend(query, key, value, attention_mask, scaling).transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register(name, attention)
    masks = transformers.AttentionMaskInterface()
    transformers.AttentionMaskInterface.register(name, masks["sdpa"])
    ours = copy.deepcopy(pretrained[1])
    ours.config._attn_implementation = name
    return ours


@pytest.mark.parametrize("level", ["reference", "native", "triton"])
def test_embeddings(pretrained, level):
    masks = []

    def attend(q, k, v, mask, scale):
        masks.append(mask)
        return flash_attention_masked(q, k, v, mask, scale=scale, level=level)

    ours = with_attention(pretrained, f"kernel_pytorch_test_{level}", attend)
    assert embedding_cosine(pretrained, ours, texts=4, length=48) > SAME
    assert len(masks) == 6
    assert not masks[0].all()


def test_a_mask_that_is_left_out_is_found(pretrained):
    """The shorter text sees its padding then."""

    def attend(q, k, v, mask, scale):
        return flash_attention_masked(q, k, v, mask.new_ones(mask.shape), scale=scale, level="native")

    ours = with_attention(pretrained, "kernel_pytorch_test_unmasked", attend)
    assert embedding_cosine(pretrained, ours, texts=4, length=48) < SAME
