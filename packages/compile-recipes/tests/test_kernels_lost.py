"""Attention that leaves its fused kernel under torch.compile is counted, with its mask and its line."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from kernel_pytorch.compile_recipes import CompilerOptimizationAssistant
from kernel_pytorch.compile_recipes.kernels_lost import attention_lost, fused_operators


class Attention(nn.Module):
    """Makes another mask under torch.compile, as some releases of transformers do."""

    def __init__(self, mask_of):
        super().__init__()
        self.qkv, self.mask_of = nn.Linear(32, 96), mask_of
        self.bias = nn.Parameter(torch.zeros(8, 8))

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        mask = self.mask_of(self, x) if torch.compiler.is_compiling() else None
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # the call


def no_mask(module, x):
    return None


def trained_mask(module, x):
    return module.bias * 1  # the mask


def broadcast_mask(module, x):
    return torch.ones(1, 1, 8, 1, dtype=torch.bool, device=x.device).expand(2, 1, 8, 8)


def test_attention_that_is_kept_is_no_finding():
    report = CompilerOptimizationAssistant().analyze_component(Attention(no_mask), torch.randn(2, 8, 32))
    assert report["compilation_readiness"]["attention_lost"] == 0
    assert report["compilation_readiness"].findings == []


def test_attention_that_is_lost_is_the_first_finding():
    report = CompilerOptimizationAssistant().analyze_component(Attention(trained_mask), torch.randn(2, 8, 32))
    first = report["compilation_readiness"][0]
    assert report["compilation_readiness"]["attention_lost"] == 1
    assert (first.kind, first.evidence["eager"], first.evidence["compiled"]) == ("attention-lost", 1, 0)
    assert first.source.endswith("# the call")
    assert "needs a gradient" in first.what
    assert report["optimization_suggestions"][0].kind == "attention-lost"
    lines = Path(__file__).read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if text.endswith("# the mask"))
    assert f"test_kernels_lost.py:{line}" in first.evidence["mask"]


def test_without_fused_attention_nothing_is_compiled(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail("compiled"))
    assert attention_lost(nn.Linear(3, 3), (torch.ones(3),), None, 0).count == 0


def test_operators_are_known_by_their_names():
    names = ["_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_cudnn_attention", "bmm",
             "_scaled_dot_product_attention_math"]  # fmt: skip
    assert fused_operators(names) == 2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the rule is one of CUDA's kernels")
def test_a_mask_with_a_last_stride_of_0_loses_the_kernel_on_a_gpu():
    model = Attention(broadcast_mask).cuda().bfloat16().eval()
    x = torch.randn(2, 8, 32, device="cuda", dtype=torch.bfloat16)
    lost = attention_lost(model, (x,), None, 1)
    assert lost.count == 1
    assert "last stride of 0" in lost.calls[0].suspicion
