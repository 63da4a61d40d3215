"""Functions that overwrite an argument refuse one that overlaps itself, before anything is written, at every level."""

import pytest
import torch

from kernel_pytorch.qkv_fusion import RotaryTable, qkv_norm_rope_cache_, rotary_embedding, rotary_embedding_
from kernel_pytorch.qkv_fusion.overlap import check_no_overlap

LEVELS = (None, "reference", "native", "torchscript", "compile", "triton", "cuda")
COS, SIN = RotaryTable(16)(torch.arange(5))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["q", "k"])
def test_rotation_in_place(name, level):
    given = {"q": torch.randn(4, 5, 4, 16), "k": torch.randn(4, 5, 2, 16)}
    single = torch.randn(1, *given[name].shape[1:])
    before, given[name] = single.clone(), single.expand(given[name].shape)
    with pytest.raises(ValueError, match=rf"^{name}: shape is \(4, 5, \d, 16\) and stride \(0, .*overlap itself"):
        rotary_embedding_(**given, cos=COS, sin=SIN, level=level)
    assert torch.equal(single, before)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["k_cache", "v_cache"])
def test_a_cache(name, level):
    caches = {each: torch.zeros(3, 2, 8, 16) for each in ("k_cache", "v_cache")}
    caches[name] = torch.zeros(1, 2, 8, 16).expand(3, 2, 8, 16)
    lengths, ones = torch.full((3,), 2, dtype=torch.int32), torch.ones(16)
    cos, sin = RotaryTable(16)(lengths[:, None])
    x, weight = torch.randn(3, 1, 32), torch.randn(128, 32)
    with torch.no_grad(), pytest.raises(ValueError, match=rf"^{name}: .*must not overlap itself"):
        qkv_norm_rope_cache_(
            x, weight, None, ones, ones, cos, sin, **caches, cache_seqlens=lengths, num_heads=4, level=level
        )
    assert not caches["k_cache"].any()
    assert not caches["v_cache"].any()


def test_what_overlaps():
    memory = torch.zeros(64)
    for size, stride in (((4, 3), (2, 1)), ((3, 4), (0, 1)), ((5, 4), (1, 1)), ((2, 3, 4), (3, 4, 1))):
        with pytest.raises(ValueError, match=r"^x: "):
            check_no_overlap("x", memory.as_strided(size, stride))
    for size, stride in (((1, 4), (0, 1)), ((4, 3), (3, 1)), ((2, 3), (3, 2)), ((3, 2), (1, 5)), ((0, 4), (0, 1))):
        check_no_overlap("x", memory.as_strided(size, stride))
    check_no_overlap("x", torch.randn(2, 5, 8, 16).transpose(1, 2))
    check_no_overlap("x", torch.randn(2, 5, 24, 16)[:, :, 4:8])


@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compiled(dynamic):
    """Strides are symbolic there; a repeated dimension is not."""
    turn = torch.compile(
        lambda q, k: rotary_embedding_(q, k, COS, SIN, level="native"), backend="eager", dynamic=dynamic, fullgraph=True
    )
    for batch in (2, 3):
        q, k = (torch.randn(batch, 5, 2 * heads, 16)[:, :, :heads] for heads in (4, 2))
        wanted = rotary_embedding(q, k, COS, SIN)
        torch.testing.assert_close(turn(q, k), wanted)
    single = torch.zeros(1, 5, 2, 16)
    with pytest.raises((ValueError, torch._dynamo.exc.Unsupported), match="overlap itself"):
        turn(torch.randn(3, 5, 4, 16), single.expand(3, 5, 2, 16))


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
def test_exported(strict):
    class Turn(torch.nn.Module):
        def forward(self, q, k):
            return rotary_embedding_(q, k, COS, SIN, level="native")

    q, k = torch.randn(2, 5, 4, 16), torch.randn(2, 5, 2, 16)
    batch = torch.export.Dim("batch")
    program = torch.export.export(Turn(), (q, k), dynamic_shapes=({0: batch}, {0: batch}), strict=strict)
    q, k = torch.randn(3, 5, 4, 16), torch.randn(3, 5, 2, 16)
    wanted = rotary_embedding(q, k, COS, SIN)
    torch.testing.assert_close(program.module()(q, k), wanted)
