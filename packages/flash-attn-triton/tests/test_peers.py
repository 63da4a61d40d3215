"""FlexAttention as the benchmark calls it: the function that ours is compared with, on the cases of the test grid."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

from kernel_pytorch.flash_attn_triton import flash_attention_varlen
from kernel_pytorch.flash_attn_triton.technique import technique

FILE = Path(__file__).parents[1] / "benchmarks" / "peers.py"
CASES = [
    (operation, case)
    for operation in technique.operations
    if operation.name
    not in ("flash_attention_varlen", "flash_decode")  # which FlexAttention has not, or with other arguments
    for case in operation.test_grid.cases("cpu")
    if case.dtype == torch.float32 and "dropout" not in case.sizes
]


@pytest.fixture(scope="module")
def peers():
    spec = importlib.util.spec_from_file_location("flash_peers", FILE)
    module = sys.modules["flash_peers"] = importlib.util.module_from_spec(spec)  # where torch.compile looks for it
    spec.loader.exec_module(module)
    yield module
    del sys.modules["flash_peers"]


@pytest.fixture
def uncompiled(peers, monkeypatch):
    """FlexAttention's formula, which runs on any CPU."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    monkeypatch.setattr(peers, "compiled", lambda: flex.flex_attention)
    return peers


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("operation", "case"), CASES, ids=[f"{o.name}-{c.name}" for o, c in CASES])
def test_the_same_function(uncompiled, operation, case):
    arguments = operation.arguments(case, torch.Generator().manual_seed(0))
    function = getattr(uncompiled, operation.name.replace("flash", "flex"))
    found, expected = (call(*arguments) for call in (function, operation.reference.definition()))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_padded_sequences(peers, causal):
    q, k, v = torch.randn(12, 4, 16), torch.randn(12, 2, 16), torch.randn(12, 2, 16)
    starts = torch.tensor([0, 5, 6, 12])
    found = peers.padded_varlen(q, k, v, starts, starts.clone(), 6, 6, causal, None, None, None, None, None, False)
    expected = flash_attention_varlen(q, k, v, starts, starts, 6, 6, causal=causal, level="reference")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_dropout_is_refused(uncompiled):
    q = torch.randn(1, 1, 4, 16)
    with pytest.raises(NotImplementedError, match="no dropout"):
        uncompiled.flex_attention(q, q, q, False, None, None, None, None, None, 0.5, torch.tensor(3), False)
