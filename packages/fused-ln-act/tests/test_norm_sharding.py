"""Sharding of the norm: two processes compute what one does, placed as the rules say."""

import pytest
import torch

from kernel_pytorch.fused_ln_act import add_layer_norm_act, add_rms_norm_act, layer_norm, levels
from kernel_pytorch.harness.support import Processes

DEVICE = torch.device("cuda" if torch.cuda.device_count() > 1 else "cpu")
TRITON = levels.LADDER.unavailable("triton", DEVICE, torch.float32)
pytestmark = [
    pytest.mark.skipif(TRITON is not None, reason=str(TRITON)),
    pytest.mark.skipif(torch.cuda.device_count() == 1, reason="two processes share a CPU or have a GPU each"),
]


@pytest.fixture(scope="module")
def processes():
    """Started once for all tests of this file."""
    with Processes(device_type=DEVICE.type) as two:
        yield two


def placement(text):
    from torch.distributed.tensor import Replicate, Shard

    word, _, dimension = text.partition(" ")
    return Shard(int(dimension)) if word == "shard" else Replicate()


def words(tensor):
    """A tensor's placement as the tests write it."""
    (found,) = tensor.placements
    return f"shard {found.dim}" if found.is_shard() else "partial" if found.is_partial() else "replicate"


FUNCTIONS = {
    "layer_norm": (lambda x, w, b: layer_norm(x, w, b, level="triton"), 1, 2),
    "add_layer_norm_act": (
        lambda x, r, w, b: add_layer_norm_act(x, r, w, b, activation="gelu", level="triton"), 2, 2),
    "add_rms_norm_act": (lambda x, r, w: add_rms_norm_act(x, r, w, activation="silu", level="triton"), 2, 1),
    "dropout": (
        lambda x, r, w, b: add_layer_norm_act(
            x, r, w, b, activation="gelu", dropout_p=0.5, seed=seed_like(x), level="triton"), 2, 2),
}  # fmt: skip


def seed_like(x):
    """One seed for all processes, distributed where x is."""
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

    seed = torch.tensor(11, device=x.device)
    return distribute_tensor(seed, x.device_mesh, [Replicate()]) if isinstance(x, DTensor) else seed


def sharded(mesh, name, data):
    """Hold a function and its gradients on DTensors against one process; return where the results were placed."""
    from torch.distributed.tensor import distribute_tensor

    function, rows, parameters = FUNCTIONS[name]
    generator = torch.Generator(mesh.device_type).manual_seed(0)
    shapes = [(5, 3, 6)] * rows + [(6,)] * parameters
    whole = [torch.randn(s, generator=generator, device=mesh.device_type).requires_grad_() for s in shapes]
    own = [
        distribute_tensor(t.detach(), mesh, [placement(data if t.dim() > 1 else "replicate")]).requires_grad_()
        for t in whole
    ]
    expected, found = function(*whole), function(*own)
    expected, found = ((f,) if isinstance(f, torch.Tensor) else tuple(f) for f in (expected, found))
    incoming = [torch.randn(e.shape, generator=generator, device=mesh.device_type) for e in expected]
    theirs = torch.autograd.grad(expected, whole, incoming)
    placed = [distribute_tensor(g, mesh, f.placements) for g, f in zip(incoming, found, strict=True)]
    ours = torch.autograd.grad(found, own, placed)
    for a, b in zip((*found, *ours), (*expected, *theirs), strict=True):
        torch.testing.assert_close(a.full_tensor(), b)
    return [words(found[0]), words(ours[0]), words(ours[rows])]


@pytest.mark.parametrize("data", ["shard 0", "shard 1"])
@pytest.mark.parametrize("name", ["layer_norm", "add_layer_norm_act", "add_rms_norm_act"])
def test_rows_may_be_sharded(processes, name, data):
    """Nothing is sent, and the gradients of the parameters are sums that are still pending."""
    for placements in processes.call(sharded, name, data):
        assert placements == [data, data, "partial"]


def test_a_sharded_row_is_gathered(processes):
    for placements in processes.call(sharded, "layer_norm", "shard 2"):
        assert placements[0] != "shard 2"


def test_dropout_draws_the_mask_of_the_whole(processes):
    """Each process holds a part of the rows, and the result is that of one process with all of them."""
    for placements in processes.call(sharded, "dropout", "shard 0"):
        assert placements[0] == "replicate"
