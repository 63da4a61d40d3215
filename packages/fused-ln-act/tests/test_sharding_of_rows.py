"""Sharding of the gated, bias and softmax groups: two processes compute what one does, placed as the rules say."""

import pytest
import torch

from kernel_pytorch.fused_ln_act import bias_act, bias_dropout_add, levels, softmax, swiglu
from kernel_pytorch.harness.support import Processes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two processes share a CPU or have a GPU each"),
]

DEVICE = torch.device("cuda" if torch.cuda.device_count() > 1 else "cpu")
TRITON = levels.LADDER.unavailable("triton", DEVICE, torch.float32)
EAGER = [
    "reference",
    "native",
    pytest.param("triton", marks=pytest.mark.skipif(TRITON is not None, reason=str(TRITON))),
]


@pytest.fixture(scope="module")
def processes():
    """Started once for all tests of this file."""
    with Processes(device_type=DEVICE.type) as two:
        yield two


# What runs in both processes.


def placement(text):
    from torch.distributed.tensor import Partial, Replicate, Shard

    word, _, dimension = text.partition(" ")
    return Shard(int(dimension)) if word == "shard" else {"replicate": Replicate(), "partial": Partial()}[word]


def words(tensor):
    """A tensor's placement as the tests write it."""
    (found,) = tensor.placements
    return f"shard {found.dim}" if found.is_shard() else "partial" if found.is_partial() else "replicate"


FUNCTIONS = {
    "swiglu": swiglu,
    "bias_act": lambda x, bias, level: bias_act(x, bias, "gelu", level=level),
    "bias_dropout_add": lambda x, bias, residual, level: bias_dropout_add(x, bias, residual, level=level),
    "softmax": lambda x, mask, level: softmax(x, 0.5, mask, level=level),
}


def sharded(mesh, name, level, shapes, placements):
    """Hold a function and its gradients on DTensors against one process; return where the results were placed."""
    from torch.distributed.tensor import distribute_tensor

    function = FUNCTIONS[name]
    generator = torch.Generator(mesh.device_type).manual_seed(0)
    whole = [torch.randn(s, generator=generator, device=mesh.device_type).requires_grad_() for s in shapes]
    own = [
        distribute_tensor(t.detach(), mesh, [placement(p)]).requires_grad_()
        for t, p in zip(whole, placements, strict=True)
    ]
    expected, found = function(*whole, level=level), function(*own, level=level)
    incoming = torch.randn(expected.shape, generator=generator, device=mesh.device_type)
    theirs = torch.autograd.grad(expected, whole, incoming)
    ours = torch.autograd.grad(found, own, distribute_tensor(incoming, mesh, found.placements))
    for a, b in zip((found, *ours), (expected, *theirs), strict=True):
        torch.testing.assert_close(a.full_tensor(), b)
    return [words(t) for t in (found, *ours)]


# The functions.


@pytest.mark.parametrize("level", EAGER)
@pytest.mark.parametrize("data", ["shard 0", "shard 1", "shard 2", "replicate"])
def test_gate_and_up_may_be_sharded_over_any_dimension(processes, data, level):
    """Over the last one as a column-parallel projection leaves them."""
    for placements in processes.call(sharded, "swiglu", level, [(5, 7, 6)] * 2, [data] * 2):
        assert set(placements) == {data}


@pytest.mark.skipif(TRITON is not None, reason=str(TRITON))
@pytest.mark.parametrize("data", ["shard 0", "shard 1"])
def test_packed_halves_stay_together(processes, data):
    """Cut across its last dimension, a packed input is gathered first."""
    for placements in processes.call(sharded, "swiglu", "triton", [(5, 6)], [data]):
        assert placements[0] == ("shard 0" if data == "shard 0" else "replicate")


@pytest.mark.parametrize("level", EAGER)
@pytest.mark.parametrize("name", ["bias_act", "bias_dropout_add"])
@pytest.mark.parametrize(
    ("data", "of_bias", "gradient"), [("shard 0", "replicate", "partial"), ("shard 1", "shard 0", "shard 0")]
)
def test_bias(processes, data, of_bias, gradient, name, level):
    rows = [(5, 6)] if name == "bias_act" else [(5, 6), (5, 6)]
    shapes = [rows[0], (6,), *rows[1:]]
    for placements in processes.call(sharded, name, level, shapes, [data, of_bias, *[data] * (len(rows) - 1)]):
        assert placements[:2] == [data, data]
        assert placements[2] == gradient


@pytest.mark.parametrize("level", EAGER)
@pytest.mark.parametrize(
    ("data", "mask_shape", "of_mask", "gradient"),
    [
        ("shard 0", (3, 6), "replicate", "partial"),
        ("shard 0", (5, 1, 6), "shard 0", "shard 0"),
        ("shard 1", (3, 6), "shard 0", "shard 0"),
        ("shard 1", (5, 1, 6), "replicate", "partial"),
    ],
)
def test_softmax(processes, data, mask_shape, of_mask, gradient, level):
    for placements in processes.call(sharded, "softmax", level, [(5, 3, 6), mask_shape], [data, of_mask]):
        assert placements == [data, data, gradient]
