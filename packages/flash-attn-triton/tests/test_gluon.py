"""The forward in Gluon: what it is chosen for, what it compiles to, and on compute capability 9.0 what it computes."""

import json
import os
import subprocess
import sys
from unittest import mock

import pytest
import torch

from kernel_pytorch.flash_attn_triton import flash_attention_with_lse
from kernel_pytorch.flash_attn_triton.levels import reference
from kernel_pytorch.harness.launches import count_launches

triton = pytest.importorskip("triton")
pytest.importorskip("triton.experimental.gluon")
gluon_launch = pytest.importorskip("kernel_pytorch.flash_attn_triton.kernels.gluon_launch")
geometry = pytest.importorskip("kernel_pytorch.flash_attn_triton.kernels.geometry")

HALVES = (torch.bfloat16, torch.float16)
ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(not ON_HOPPER, reason="needs compute capability 9.0: Gluon has no interpreter")


def make(batch, heads, kv_heads, queries, keys, depth, dtype=torch.bfloat16, device="cpu"):
    shapes = (batch, heads, queries, depth), *[(batch, kv_heads, keys, depth)] * 2
    return [torch.randn(shape, device=device).to(dtype) for shape in shapes]


def reason(q, k, v, sinks=None, right=0, *, scale=0.125, left=-1, softcap=0.0, bias=None, dropout=0.0, architecture=90):
    """Why the kernel does not run on an architecture, None if it does."""
    seed = torch.tensor(1) if dropout else None
    g = geometry.Geometry(q, k, v, bias, None, sinks, seed, scale, left, right, softcap, dropout, None, None, 0, 0)
    with mock.patch.object(gluon_launch, "architecture", return_value=architecture):
        return gluon_launch.why_not(g, q, k, v, sinks, right)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("depth", [64, 128])
@pytest.mark.parametrize("right", [-1, 0])
def test_what_it_is_for(dtype, depth, right):
    assert reason(*make(2, 4, 2, 17, 33, depth, dtype), right=right) is None
    views = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in make(2, 4, 2, 17, 33, depth, dtype)]
    assert reason(*views, right=right) is None
    assert reason(*(t[:, :, :1] for t in views), right=right) is None


def test_what_it_is_not_for():
    q, k, v = make(2, 4, 2, 17, 33, 64)
    gaps = torch.empty(2, 4, 17, 72, dtype=q.dtype)[..., 4:68], torch.empty(2, 4, 17, 68, dtype=q.dtype)[..., :64]
    expected = {
        "compute capability 9.0": (reason(q, k, v, architecture=100), reason(q, k, v, architecture=None)),
        "it takes float16 and bfloat16": (reason(*make(1, 1, 1, 9, 9, 96)), reason(q.float(), k.float(), v.float())),
        "it has no window": (
            reason(q, k, v, sinks=torch.ones(4)),
            reason(q, k, v, left=5),
            reason(q, k, v, right=3),
            reason(q, k, v, softcap=2.0),
            reason(q, k, v, dropout=0.5),
            reason(q, k, v, bias=torch.ones(1, 1, 17, 33)),
        ),
        "nothing to attend to": (reason(q, k[:, :, :0], v[:, :, :0]),),
        "scale is": (reason(q, k, v, scale=0.0), reason(q, k, v, scale=-1.0)),
        "the copy engine cannot read": (*(reason(gap, k, v) for gap in gaps), reason(q, k[:1].expand(2, 2, 33, 64), v)),
    }
    for message, found in expected.items():
        for said in found:
            assert said is not None
            assert message in said


def test_without_gluon_the_other_kernel_runs(monkeypatch):
    assert reason(*make(1, 1, 1, 9, 9, 64)) is None  # imports it
    monkeypatch.delattr(sys.modules[gluon_launch.__package__], "gluon_forward")
    with mock.patch.dict(sys.modules, {"triton.experimental.gluon": None}):
        del sys.modules[f"{gluon_launch.__package__}.gluon_forward"]
        assert "no Gluon" in reason(*make(1, 1, 1, 9, 9, 64))
    assert reason(*make(1, 1, 1, 9, 9, 64)) is None


def choice(q, k, v, faster, sinks=None):
    g = geometry.Geometry(q, k, v, None, None, sinks, None, 0.125, -1, 0, 0.0, 0.0, None, None, 0, 0)
    with mock.patch.object(gluon_launch, "architecture", return_value=90), mock.patch.object(
        gluon_launch, "FASTER", faster
    ):  # fmt: skip
        return gluon_launch.chosen(g, q, k, v, sinks, 0)


def test_one_table_switches_it_on():
    tensors = make(1, 2, 2, 9, 9, 64)
    switched_on = {(64, torch.bfloat16, True)}
    assert choice(*tensors, frozenset()) is None
    assert choice(*tensors, switched_on) == gluon_launch.CONFIGURATIONS[64, True]
    assert choice(*make(1, 2, 2, 9, 9, 128), switched_on) is None
    assert choice(*tensors, switched_on, sinks=torch.ones(2)) is None


def test_who_asks_for_it_is_told_why_not():
    tensors = make(1, 2, 2, 9, 9, 64)
    with gluon_launch.gluon_forward():
        assert choice(*tensors, frozenset()) == gluon_launch.CONFIGURATIONS[64, True]
        with pytest.raises(NotImplementedError, match="cannot run here: it has no window"):
            choice(*tensors, frozenset(), sinks=torch.ones(2))
    assert not gluon_launch.is_asked_for()


COMPILE = """
import json, sys, torch
from kernel_pytorch.flash_attn_triton import flash_attention
from kernel_pytorch.flash_attn_triton.levels import LADDER
from kernel_pytorch.flash_attn_triton.technique import technique
from kernel_pytorch.harness.static import triton_code
from kernel_pytorch.harness.static.gate import violations
from kernel_pytorch.harness.static.launches import record_launches, use_architecture
from kernel_pytorch.harness.technique import Case
use_architecture(90)
operation = technique.operation("flash_attention")
case = Case("", torch.float16, {"shape": (1, 4, 300, int(sys.argv[1])), "causal": sys.argv[2] == "causal"})
LADDER.unavailable = lambda *arguments: None
gluon = operation.implementation("triton (Gluon)")
launches = record_launches(operation, gluon.name, gluon.load(), case, bench=True)
forward = [launch for launch in launches if launch.function.__name__ == "hopper_forward_kernel"]
found = [triton_code._read(launch, "sm_90") for launch in forward]
broken = violations(technique, found, complete=False)
json.dump([[c.model_dump(mode="json") for c in found], [str(v) for v in broken]], sys.stdout)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs Triton's compiler")
@pytest.mark.parametrize(
    ("depth", "mask"),
    [
        (64, "full"),
        *(
            pytest.param(n, mask, marks=pytest.mark.slow)
            for n, mask in ((64, "causal"), (128, "full"), (128, "causal"))
        ),
    ],
)
def test_it_compiles_to_matrix_and_copy_instructions(depth, mask):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    ran = subprocess.run(  # another process: in this one Triton may interpret
        [sys.executable, "-c", COMPILE, str(depth), mask], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    (found,), broken = json.loads(ran.stdout)
    assert broken == []
    assert set(found["matrix"]) == {"wgmma"}
    assert found["loads"]["bulk"] > 0
    assert found["loads"]["accesses"] == {}  # all of q, k and v
    assert found["stores"]["bulk"] > 0
    assert set(found["stores"]["accesses"]) == {"32"}  # lse


LENGTHS = [(1, 200), (17, 200), (63, 200), (65, 200), (127, 129), (129, 127), (200, 1), (200, 17), (200, 63), (200, 65),
           (200, 129), (1, 1), (384, 384), (300, 700), (700, 300), (577, 1025), (1000, 1)]  # fmt: skip
LAYOUTS = {
    "heads first": lambda t: t,
    "tokens first": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "part of a row": lambda t: torch.cat((t, t), -1)[..., t.shape[-1] :],
}


def truth(q, k, v, causal):
    return reference.flash_attention_with_lse(
        q.double(), k.double(), v.double(), causal, q.shape[-1] ** -0.5, None, None, None, None, 0.0, None, False
    )  # fmt: skip


def assert_close(found, expected, dtype, factor):
    error = (found.double() - expected).abs().max()
    assert error <= factor * torch.finfo(dtype).eps * expected.abs().max(), error


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("depth", [64, 128])
@pytest.mark.parametrize(("queries", "keys"), LENGTHS)
def test_lengths_groups_and_layouts(queries, keys, depth, causal):
    """Tails of tiles on both sides, queries that see nothing, first tiles that a query sees nothing of."""
    for kv_heads, layout, dtype in ((1, "part of a row", HALVES[0]), (2, "tokens first", HALVES[1]),
                                    (4, "heads first", HALVES[0])):  # fmt: skip
        q, k, v = (LAYOUTS[layout](t) for t in make(2, 4, kv_heads, queries, keys, depth, dtype, "cuda"))
        with gluon_launch.gluon_forward(), count_launches() as launched:
            o, lse = flash_attention_with_lse(q, k, v, causal=causal, level="triton")
        assert launched == ["hopper_forward_kernel"]
        expected_o, expected_lse = truth(q, k, v, causal)
        assert_close(o, expected_o, dtype, 4)
        torch.testing.assert_close(lse, expected_lse.float(), rtol=1e-5, atol=1e-4)
        blind = expected_lse.isinf()
        assert (o[blind] == 0).all()


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("depth", [64, 128])
def test_several_items_a_program(depth, causal):
    q, k, v = make(16, 8, 2, 1000, 1000, depth, device="cuda")
    with gluon_launch.gluon_forward():
        o, lse = flash_attention_with_lse(q, k, v, causal=causal, level="triton")
    expected_o, expected_lse = truth(q, k, v, causal)
    assert_close(o, expected_o, q.dtype, 4)
    torch.testing.assert_close(lse, expected_lse.float(), rtol=1e-5, atol=1e-4)


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("depth", [64, 128])
def test_the_backward_runs_on_its_results(depth, causal, dtype):
    for queries, keys in ((333, 257), (257, 333)):
        tensors = [t.requires_grad_() for t in make(2, 4, 2, queries, keys, depth, dtype, "cuda")]
        exact = [t.detach().double().requires_grad_() for t in tensors]
        with gluon_launch.gluon_forward():
            o, lse = flash_attention_with_lse(*tensors, causal=causal, level="triton")
        expected_o, expected_lse = truth(*exact, causal)
        do, dlse = torch.randn_like(o), torch.randn_like(lse).masked_fill(expected_lse.isinf(), 0)
        found = torch.autograd.grad((o, lse), tensors, (do, dlse))
        expected = torch.autograd.grad((expected_o, expected_lse), exact, (do.double(), dlse.double()))
        for ours, of_truth in zip(found, expected, strict=True):
            assert_close(ours, of_truth, dtype, 8)
