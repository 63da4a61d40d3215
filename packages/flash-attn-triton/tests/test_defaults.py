"""A kernel is the default where records say that it is right and faster, and where PyTorch needs a mask tensor."""

from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from kernel_pytorch.flash_attn_triton import (
    flash_attention,
    flash_attention_masked,
    flash_attention_varlen,
    flash_attention_with_lse,
    flash_decode,
)
from kernel_pytorch.flash_attn_triton._core import levels
from kernel_pytorch.flash_attn_triton._core.levels import Default
from kernel_pytorch.flash_attn_triton.levels import ALWAYS, CAUSAL_MASK, LADDER
from kernel_pytorch.harness.availability import default_for
from kernel_pytorch.harness.discovery import discover
from kernel_pytorch.harness.implementation import imported

GPU = torch.device("cuda", 0)


@pytest.fixture
def capability(monkeypatch):
    """Says which compute capability the GPU has that fake tensors are on."""

    def be(*found):
        monkeypatch.setattr(levels, "compute_capability", lambda device: found)
        LADDER.forget()

    be(9, 0)
    yield be
    LADDER.forget()


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """Fake ones, on a GPU."""
    with FakeTensorMode():
        return [torch.empty(shape, dtype=dtype, device=GPU) for shape in shapes]


def attend(queries: int, keys: int, dtype: torch.dtype = torch.bfloat16, depth: int = 64, **options) -> str:
    q, k, v = tensors((1, 4, queries, depth), (1, 2, keys, depth), (1, 2, keys, depth), dtype=dtype)
    return LADDER.default_of(lambda: flash_attention(q, k, v, **options))


def masked(queries: int = 5, **options) -> str:
    q, k, v = tensors((1, 4, queries, 64), (1, 2, 7, 64), (1, 2, 7, 64))
    (bias,) = tensors((1, 1, 1, 7), dtype=torch.float32)
    return LADDER.default_of(lambda: flash_attention_masked(q, k, v, bias, **options))


def packed(dtype: torch.dtype = torch.bfloat16) -> str:
    q, k, v = tensors(*[(9, 2, 64)] * 3, dtype=dtype)
    (starts,) = tensors((3,), dtype=torch.int32)
    return LADDER.default_of(lambda: flash_attention_varlen(q, k, v, starts, starts, 5, 5))


def with_lse() -> str:
    return LADDER.default_of(lambda: flash_attention_with_lse(*tensors(*[(1, 2, 9, 64)] * 3)))


def decode(dtype: torch.dtype = torch.bfloat16) -> str:
    q, k, v = tensors((2, 4, 1, 64), (2, 2, 90, 64), (2, 2, 90, 64), dtype=dtype)
    (lengths,) = tensors((2,), dtype=torch.int32)
    return LADDER.default_of(lambda: flash_decode(q, k, v, lengths))


NATIVE: dict[str, Callable[[], str]] = {
    "full": lambda: attend(9, 20),
    "causal": lambda: attend(9, 9, causal=True),
    "causal, one query": lambda: attend(1, 20, causal=True),
    "a mask": masked,
    "a mask, causal": lambda: masked(causal=True),
    "a mask, causal, one query": lambda: masked(1, causal=True),
}
TRITON: dict[str, Callable[[], str]] = {
    "causal, fewer queries": lambda: attend(9, 20, causal=True),
    "window": lambda: attend(9, 9, causal=True, window=(3, 0)),
    "soft cap": lambda: attend(9, 9, softcap=2.0),
    "ALiBi": lambda: attend(9, 9, alibi_slopes=tensors((4,))[0]),
    "sinks": lambda: attend(9, 9, sinks=tensors((4,))[0]),
    "dropout": lambda: attend(9, 9, dropout_p=0.5, seed=tensors((), dtype=torch.int64)[0]),
    "deterministic": lambda: attend(9, 9, deterministic=True),
    "a mask, window": lambda: masked(window=(3, 0)),
    "lse": with_lse,
    "packed": packed,
    "packed, float32": lambda: packed(torch.float32),
    "decode": decode,
    "decode, float32": lambda: decode(torch.float32),
}


@pytest.mark.parametrize("name", [*NATIVE, *TRITON])
@pytest.mark.parametrize("found", [(9, 0), (8, 0), (12, 0)])
def test_native_is_the_default_where_pytorch_needs_no_mask_tensor(name, found, capability):
    capability(*found)
    assert (NATIVE | TRITON)[name]() == ("native" if name in NATIVE else "triton")


def test_on_capability_9_0_the_causal_mask_of_float32_stays_pytorchs(capability):
    assert attend(9, 20, dtype=torch.float32, causal=True) == "native"
    assert attend(9, 20, dtype=torch.float32, causal=True, window=(3, 0)) == "triton"
    assert attend(9, 20, dtype=torch.float32, causal=True, softcap=2.0) == "triton"
    capability(8, 0)
    assert attend(9, 20, dtype=torch.float32, causal=True) == "triton"


def test_without_the_kernels_it_is_native_and_the_reference_for_what_native_lacks(capability):
    capability(7, 5)
    assert {name: call() for name, call in NATIVE.items()} == dict.fromkeys(NATIVE, "native")
    lacking = {"soft cap", "ALiBi", "sinks", "dropout", "deterministic", "lse"}
    wanted = {name: "reference" if name in lacking else "native" for name in TRITON}
    assert {name: call() for name, call in TRITON.items()} == wanted


def test_what_the_kernels_lack_is_native_or_the_reference(capability):
    assert attend(9, 9, causal=True, window=(3, 0), depth=264) == "native"
    assert attend(9, 20, causal=True, dtype=torch.float64) == "native"
    assert attend(9, 9, softcap=2.0, depth=264) == "reference"


def default_of_case(operation, case):
    """The level that a call with the arguments of a case takes on a GPU, asked with fake tensors."""
    with FakeTensorMode():
        arguments, keywords = operation.inputs(case, torch.Generator())
        arguments, keywords = tree_map_only(torch.Tensor, lambda t: t.to(GPU), (arguments, keywords))
        return LADDER.default_of(lambda: imported(operation.function)(*arguments, **keywords))


def test_every_benchmark_case_has_the_default_of_a_users_call(capability):
    technique = discover().get("flash-attn-triton")
    for operation in technique.operations:
        for case in operation.bench_grid.cases("cuda"):
            found = default_of_case(operation, case)
            sizes = case.sizes
            fewer = sizes.get("keys", 1) > case.shape[-2] > 1
            mask = "window" in sizes or (sizes.get("causal") and fewer and case.dtype is not torch.float32)
            assert found == ("triton" if mask or operation.name in ALWAYS else "native"), case.label


def test_tables_name_the_features_and_what_was_not_measured(capability):
    technique = discover().get("flash-attn-triton")

    def said(function, level):
        operation = technique.operation(function)
        return default_for(technique, operation, operation.implementation(level), GPU)

    assert said("flash_attention", "native") == "yes"
    assert said("flash_attention", "triton").startswith("with window, causal mask tensor, softcap,")
    assert said("flash_attention", "triton").endswith(" (not measured here)")
    assert said("flash_attention", "cuda") == ""
    assert said("flash_attention_varlen", "triton") == "yes"
    capability(8, 0)
    assert said("flash_attention_varlen", "triton") == "yes (not measured here)"


@pytest.mark.parametrize("strict", [False, True])
def test_sizes_that_export_leaves_open_choose_no_level(strict, monkeypatch):
    """Equal sizes are a fact of the call that was traced; only those that are equal in all calls need no mask."""

    class Attend(torch.nn.Module):
        def forward(self, q, k=None):
            k = q if k is None else k
            return flash_attention(q, k, k, causal=True)

    row = Default("reference", None, device="cpu", features=[CAUSAL_MASK])
    monkeypatch.setattr(LADDER, "defaults", (row,))
    q, k = torch.randn(1, 2, 6, 8), torch.randn(1, 2, 6, 8)
    queries, keys = torch.export.Dim("queries", min=2, max=64), torch.export.Dim("keys", min=2, max=64)
    open_sizes = torch.export.export(Attend(), (q, k), dynamic_shapes=({2: queries}, {2: keys}), strict=strict)
    for sizes in ((6, 6), (3, 7), (7, 3)):
        q, k = (torch.randn(1, 2, size, 8) for size in sizes)
        torch.testing.assert_close(open_sizes.module()(q, k), flash_attention(q, k, k, causal=True, level="reference"))
    one_size = torch.export.export(Attend(), (q,), dynamic_shapes=({2: queries},), strict=strict)
    called = [str(node.target) for node in one_size.graph.nodes]
    assert any("scaled_dot_product_attention" in name for name in called)
    assert not any("scaled_dot_product_attention" in str(node.target) for node in open_sizes.graph.nodes)


@pytest.mark.parametrize("sizes", [(6, 6), (4, 6)])
def test_one_compiled_graph_serves_other_sizes(sizes):
    torch._dynamo.reset()
    graphs = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(
        lambda q, k: flash_attention(q, k, k, causal=True), fullgraph=True, dynamic=True, backend=graphs
    )
    for factor in (1, 2, 3):
        q, k = (torch.randn(1, 2, size * factor, 8) for size in sizes)
        torch.testing.assert_close(compiled(q, k), flash_attention(q, k, k, causal=True, level="reference"))
    assert graphs.frame_count == 1
