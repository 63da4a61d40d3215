"""What PyTorch's attention gets on a GPU begins at 16 bytes, wherever the caller's tensors begin."""

import pytest
import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional as F

from kernel_pytorch.flash_attn_triton import (
    alignment,
    flash_attention,
    flash_attention_masked,
    flash_attention_varlen,
    flash_decode,
)
from kernel_pytorch.flash_attn_triton._core.call_kinds import has_plain_memory
from kernel_pytorch.flash_attn_triton.levels import native

STOCK = F.scaled_dot_product_attention


def at_odd_address(x: torch.Tensor) -> torch.Tensor:
    """The same numbers in a contiguous view of a buffer that begins one element earlier."""
    flat = torch.empty(x.numel() + 1, dtype=x.dtype)
    flat[1:] = x.reshape(-1)
    return flat[1:].view(x.shape)


@pytest.fixture
def seen(monkeypatch):
    """Run the code for GPUs; collects the addresses that PyTorch's attention and its backward get."""
    found: list[int] = []

    def spy(q, k, v, attn_mask=None, **options):
        found.extend(t.data_ptr() for t in (q, k, v, attn_mask) if t is not None and has_plain_memory(t))
        y = STOCK(q, k, v, attn_mask=attn_mask, **options)
        if y.requires_grad and has_plain_memory(y):
            y.register_hook(lambda dy: found.append(dy.data_ptr()))
        return y

    monkeypatch.setattr(native, "_is_on_gpu", lambda q: True)
    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    return found


CUT = torch.tensor([0, 5, 8])
CALLS = {
    "full": lambda q, k, v, bias: flash_attention(q, k, v, level="native"),
    "causal": lambda q, k, v, bias: flash_attention(q, k, v, causal=True, level="native"),
    "window": lambda q, k, v, bias: flash_attention(q, k, v, window=(2, 0), level="native"),
    "bias": lambda q, k, v, bias: flash_attention_masked(q, k, v, bias, level="native"),
    "bools": lambda q, k, v, bias: flash_attention_masked(q, k, v, bias.detach() > 0, level="native"),
    "packed": lambda q, k, v, bias: flash_attention_varlen(
        *(t.flatten(1, 2)[0].view(8, 4, 16) for t in (q, k, v)), CUT, CUT, 5, 5, level="native"
    ),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_attention_and_its_gradients_get_aligned_memory(name, dtype, seen):
    given = [torch.randn(1, 4, 8, 16).to(dtype) for _ in range(3)] + [torch.randn(1, 4, 8, 8).to(dtype)]
    results = []
    for place in (torch.clone, at_odd_address):
        tensors = [place(t).requires_grad_() for t in given]
        y = CALLS[name](*tensors)
        y.backward(place(torch.ones_like(y)))
        results.append([y, *[t.grad for t in tensors if t.grad is not None]])
    assert len(seen) > 6
    assert not [address for address in seen if address % 16]
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_decoding_gets_aligned_memory(seen):
    q, cache = at_odd_address(torch.randn(2, 4, 1, 16)), at_odd_address(torch.randn(2, 2, 9, 16))
    flash_decode(q, cache, cache, torch.tensor([9, 4], dtype=torch.int32), level="native")
    assert seen
    assert not [address for address in seen if address % 16]


def test_aligned_memory_is_not_copied():
    x = torch.randn(2, 5, 4, 16)
    assert alignment.aligned(x) is x
    heads_first = x.transpose(1, 2)
    assert alignment.aligned(heads_first) is heads_first
    assert alignment.aligned(at_odd_address(x)) is not x
    assert alignment.aligned(x[..., 4:]).data_ptr() == x[..., 4:].data_ptr()
    assert alignment.aligned(x[..., 1:]).data_ptr() % 16 == 0


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("transform", ["vmap", "grad"])
def test_transforms_of_torch_func(transform, seen):
    x = at_odd_address(torch.randn(3, 1, 2, 8, 16))
    call = CALLS["full"]
    if transform == "vmap":
        found = torch.vmap(lambda t: call(t, t, t, None))(x)
        torch.testing.assert_close(found, torch.stack([call(t, t, t, None) for t in x]))
    else:
        found = torch.func.grad(lambda t: call(t, t, t, None).sum())(x[0])
        assert found.isfinite().all()


@pytest.mark.parametrize("dynamic", [False, True])
def test_views_inside_of_a_compiled_graph_are_copied(dynamic):
    copies = []

    def backend(graph, inputs):
        def count(inner, _):
            copies.append(sum("flash_attention_copied" in str(node.target) for node in inner.graph.nodes))
            return make_boxed_func(inner.forward)

        return aot_autograd(fw_compiler=count)(graph, inputs)

    torch._dynamo.reset()
    compiled = torch.compile(
        lambda flat, first: alignment.aligned(flat[first : first + 64].view(4, 16)) * 2.0,
        backend=backend, fullgraph=True, dynamic=dynamic,
    )  # fmt: skip
    flat = torch.randn(80, requires_grad=True)
    for first in (4, 5):
        torch.testing.assert_close(compiled(flat, first), flat[first : first + 64].view(4, 16) * 2.0)
    compiled(flat, 5).sum().backward()
    assert flat.grad.sum() == 128.0
    assert max(copies) == 1
    assert dynamic or min(copies[:1]) == 0


@pytest.mark.filterwarnings("ignore:.isinstance.treespec:FutureWarning")
def test_traced_calls_of_any_address_are_right(seen):
    """The operator that Dynamo traces decides by the storage offset, in export and in eager mode too."""

    class Attend(torch.nn.Module):
        def forward(self, flat):
            q = flat[1:].view(1, 2, 8, 16)
            return CALLS["causal"](q, q, q, None)

    flat = torch.randn(257)
    exported = torch.export.export(Attend(), (flat,))
    torch.testing.assert_close(exported.module()(flat), Attend()(flat))
    lowered = exported.run_decompositions()
    assert any("flash_attention_copied" in str(node.target) for node in lowered.graph.nodes)
    torch.testing.assert_close(lowered.module()(flat), Attend()(flat))
