"""Memory that was freed is refused by name, whatever the argument is: PyTorch's own operators end the process."""

import pytest
import torch

from kernel_pytorch.flash_attn_triton import (
    flash_attention,
    flash_attention_masked,
    flash_attention_varlen,
    flash_decode,
)
from kernel_pytorch.fused_ln_act import add_layer_norm, bias_dropout_add, softmax
from kernel_pytorch.linear_cross_entropy import cross_entropy
from kernel_pytorch.qkv_fusion import qk_norm_rope, qkv_norm_rope_cache_, rotary_embedding

LARGE = 1 << 14  # small tensors may be read although they are not there
X, ONES = torch.randn(4, 8), torch.ones(8)
HEADS, TURNS = torch.randn(1, 4, 2, 8), torch.randn(16, 4)
Q = torch.randn(1, 2, 64, 16)
PACKED = torch.randn(64, 2, 16)


OFFSET = {"of": 0}  # of what is freed, in elements: then its address is not zero


def freed(*shape, dtype=torch.int64):
    size = torch.Size(shape).numel()
    tensor = torch.zeros(OFFSET["of"] + size, dtype=dtype)[OFFSET["of"] :].view(shape)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.fixture(autouse=True, params=[0, 16], ids=["from its start", "a part"])
def _offset(request, monkeypatch):
    monkeypatch.setitem(OFFSET, "of", request.param)


CALLS = {
    "mask, added": ("mask", lambda level: softmax(torch.randn(4, LARGE), 2.0, freed(4, LARGE, dtype=torch.float32),
                                                  level=level)),
    "mask": ("mask", lambda level: softmax(torch.randn(4, LARGE), 2.0, freed(4, LARGE, dtype=torch.bool), level=level)),
    "positions": ("position_ids", lambda level: rotary_embedding(
        HEADS, HEADS, TURNS, TURNS, position_ids=freed(4), level=level)),
    "positions after a norm": ("position_ids", lambda level: qk_norm_rope(
        HEADS, HEADS, ONES, ONES, TURNS, TURNS, position_ids=freed(4), level=level)),
    "lengths of a cache": ("cache_seqlens", lambda level: qkv_norm_rope_cache_(
        X.expand(1, 4, 8), torch.randn(80, 8), None, ONES, ONES, TURNS[:4], TURNS[:4], HEADS, HEADS + 1,
        freed(1, dtype=torch.int32), num_heads=2, level=level)),
    "pages of a cache": ("block_table", lambda level: qkv_norm_rope_cache_(
        X.expand(1, 4, 8), torch.randn(80, 8), None, ONES, ONES, TURNS[:4], TURNS[:4], HEADS, HEADS + 1,
        torch.ones(1, dtype=torch.int32), freed(1, 2, dtype=torch.int32), num_heads=2, level=level)),
    "seed": ("seed", lambda level: bias_dropout_add(X, ONES, X, 0.5, freed(), level=level)),
    "seed of a norm": ("seed", lambda level: add_layer_norm(
        X, X, ONES, ONES, dropout_p=0.5, seed=freed(), level=level)),
    "seed of attention": ("seed", lambda level: flash_attention(Q, Q, Q, dropout_p=0.5, seed=freed(), level=level)),
    "mask of attention": ("mask", lambda level: flash_attention_masked(
        Q, Q, Q, freed(1, 2, 64, 64, dtype=torch.bool), level=level)),
    "starts": ("cu_seqlens_q", lambda level: flash_attention_varlen(
        PACKED, PACKED, PACKED, freed(3, dtype=torch.int32), torch.tensor([0, 32, 64]), 32, 32, level=level)),
    "lengths": ("cache_seqlens", lambda level: flash_decode(Q, Q, Q, freed(1, dtype=torch.int32), level=level)),
    "pages": ("block_table", lambda level: flash_decode(
        Q, Q, Q, torch.ones(1, dtype=torch.int32), freed(1, 1, dtype=torch.int32), level=level)),
    "targets": ("target", lambda level: cross_entropy(torch.randn(64, 8), freed(64), level=level)),
}  # fmt: skip


@pytest.mark.parametrize("level", [None, "reference", "native", "triton"])
@pytest.mark.parametrize("name", CALLS)
def test_memory_that_was_freed_is_refused(name, level):
    argument, call = CALLS[name]
    with pytest.raises(ValueError, match=rf"{argument}: shape is .* it was freed"):
        call(level)


def test_an_operator_that_is_called_directly_refuses_it_too():
    pytest.importorskip("kernel_pytorch.cuda_ops")
    if not hasattr(torch.ops.kernel_pytorch_cuda, "gated"):
        pytest.skip("the compiled library is not here")
    gate = freed(29, 100, dtype=torch.float32)
    for given in (gate, gate.requires_grad_()):
        with pytest.raises(ValueError, match=r"gate: shape is .* it was freed"):
            torch.ops.kernel_pytorch_cuda.gated(given, torch.randn(29, 100), "gelu_tanh", 1.0, 0.7, 0.0)
