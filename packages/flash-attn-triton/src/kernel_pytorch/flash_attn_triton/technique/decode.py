"""The declaration of `flash_decode`: few new tokens against a cache, without gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernel_pytorch.harness.contracts import KernelContract
from kernel_pytorch.harness.exemptions import COMPILED_COUNTED, Exemption
from kernel_pytorch.harness.technique import Case, Cost, Direction, Given, Operation, grid, point

CUDA = ("cuda",)


def _kv_heads(case: Case) -> int:
    return int(case.sizes.get("kv_heads", case.shape[1]))


def inputs(case: Case, generator: torch.Generator) -> Given:
    """Give q `(B, H, Sq, D)`, caches `(B, Hkv, S, D)` or pages, cache_seqlens `(B,)`, block_table; the case's features.

    Tokens lie before heads where a case says so or has pages, as serving engines keep them. Behind the last valid key
    of a sequence there is NaN where a case says so.
    """
    batch, heads, _, depth = case.shape
    sizes, device = case.sizes, generator.device

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=case.dtype)

    q, page, room = normal(*case.shape), sizes.get("page", 0), sizes["room"]
    lengths = torch.tensor(sizes.get("lengths", (room,) * batch), dtype=torch.int32, device=device)
    table = None
    if page:
        count = -(-room // page)
        # More pages than are needed, in no order.
        shuffled = torch.randperm(batch * count + 3, generator=generator, device=device)[: batch * count]
        table = shuffled.view(batch, count).to(torch.int32)
        caches = [normal(batch * count + 3, page, _kv_heads(case), depth).transpose(1, 2) for _ in range(2)]
    elif sizes.get("tokens_first"):
        caches = [normal(batch, room, _kv_heads(case), depth).transpose(1, 2) for _ in range(2)]
    else:
        caches = [normal(batch, _kv_heads(case), room, depth) for _ in range(2)]
    if sizes.get("dirty"):
        behind = torch.arange(room, device=device) >= lengths.clamp(0, room)[:, None]
        caches = [cache.masked_fill(behind[:, None, :, None], float("nan")) for cache in caches]
    keywords: dict[str, Any] = {n: sizes[n] for n in ("causal", "window", "softcap") if n in sizes}
    if sizes.get("alibi"):
        keywords["alibi_slopes"] = torch.tensor([2.0 ** -(8.0 * (h + 1) / heads) for h in range(heads)]).to(device)
    if sizes.get("sinks"):
        keywords["sinks"] = normal(heads)
    return (q, *caches, lengths, table), keywords


def cost(case: Case, direction: Direction) -> Cost:
    """Read the valid keys and values once, read q, write o; two products. A second kernel combines splits."""
    _, heads, queries, depth = case.shape
    room, window = case.sizes["room"], case.sizes.get("window", (-1, -1))
    lengths = [min(max(n, 0), room) for n in case.sizes.get("lengths", (room,) * case.shape[0])]
    if window[0] >= 0:
        lengths = [min(n, window[0] + queries) for n in lengths]
    keys = sum(lengths)
    of_cache = 2 * keys * _kv_heads(case) * depth
    size = (of_cache + 2 * torch.Size(case.shape).numel()) * case.dtype.itemsize
    return Cost(size, 4 * heads * queries * keys * depth, launches=2)


FULL = (torch.float32,)
LOW = (torch.float32, torch.float16, torch.bfloat16)

TESTS = grid(
    point("typical", shape=(3, 8, 1, 40), kv_heads=2, room=300, lengths=(77, 300, 131), core=True,
          reason="grouped queries, lengths of their own, no size a tile's"),
    point("verifying 4", shape=(2, 8, 4, 96), kv_heads=1, room=300, lengths=(4, 299), core=True,
          reason="MQA, speculative decoding: four queries, each sees one key more"),
    point("pages", shape=(2, 8, 1, 64), kv_heads=1, room=320, page=16, lengths=(33, 320), core=True,
          reason="8 heads to one, pages of 16 in no order"),
    point("nothing and one", shape=(4, 4, 1, 64), kv_heads=2, room=256, lengths=(0, 1, 64, 65), dirty=True,
          reason="lengths 0 and 1, and a tile's and one more; NaN behind them"),
    point("edges of pages", shape=(4, 4, 1, 32), kv_heads=2, room=192, page=48, lengths=(47, 48, 49, 192),
          reason="a page's length, one less and one more; pages cross tiles"),
    point("more queries than keys", shape=(2, 2, 4, 16), room=140, lengths=(2, 0), reason="queries before the start"),
    point("tokens first", shape=(2, 4, 1, 80), kv_heads=4, room=270, lengths=(270, 129), tokens_first=True,
          reason="the layout of models; rows end within a vector's mask"),
    point("full view", shape=(2, 4, 4, 64), kv_heads=2, room=200, lengths=(200, 100), causal=False,
          reason="not causal: all queries see all keys"),
    point("window", shape=(2, 4, 4, 64), kv_heads=2, room=400, lengths=(400, 150), window=(139, -1),
          reason="the left edge crosses tiles, and most splits see none of the rest"),
    point("soft cap", shape=(1, 4, 1, 64), kv_heads=2, room=200, lengths=(190,), softcap=1.5,
          reason="Gemma 2's, low enough to bend"),
    point("ALiBi", shape=(2, 3, 4, 16), room=300, lengths=(290, 17), alibi=True, reason="slopes of three heads"),
    point("sinks", shape=(2, 8, 1, 64), kv_heads=1, room=300, lengths=(300, 0), sinks=True,
          reason="gpt-oss's: counted once, not in every split, and no value of their own"),
    point("all of it", shape=(2, 8, 3, 24), kv_heads=2, room=288, page=32, lengths=(280, 40), window=(150, -1),
          softcap=3.0, alibi=True, sinks=True, reason="every feature at once, in their order, on pages"),
    point("many heads", shape=(1, 71, 1, 64), kv_heads=1, room=130, lengths=(130,), reason="Falcon 7B: two tiles"),
    point("deep", shape=(1, 2, 1, 256), kv_heads=1, room=150, lengths=(150,), reason="the deepest head of the kernels"),
    point("one of each", shape=(1, 1, 1, 1), room=1, reason="softmax of one number"),
    point("one page", shape=(1, 2, 2, 8), kv_heads=1, room=17, page=24, lengths=(17,), reason="a page with room left"),
    dtypes=LOW,
)  # fmt: skip

BENCH = grid(
    point("batch 1, 32 heads, 4096", shape=(1, 32, 1, 128), kv_heads=8, room=4096),
    point("Llama 3.1 8B, 32 x 8192", shape=(32, 32, 1, 128), kv_heads=8, room=8192, devices=CUDA),
    point("Llama 3.1 8B, 32 x 8192, pages of 16", shape=(32, 32, 1, 128), kv_heads=8, room=8192, page=16, devices=CUDA),
    point("Llama 3.1 70B, 32 x 8192", shape=(32, 64, 1, 128), kv_heads=8, room=8192, devices=CUDA),
    point("Qwen3 0.6B, 1 x 32768", shape=(1, 16, 1, 128), kv_heads=8, room=32768, devices=CUDA),
    point("Mistral 7B, 32 x 8192, window 4096", shape=(32, 32, 1, 128), kv_heads=8, room=8192, window=(4095, -1),
          devices=CUDA),
    point("verifying 4, 32 x 8192", shape=(32, 32, 4, 128), kv_heads=8, room=8192, devices=CUDA),
    point("batch 8, 32 heads, 4096", shape=(8, 32, 1, 128), kv_heads=8, room=4096, dtypes=FULL, devices=CUDA),
    dtypes=(torch.bfloat16,),
)  # fmt: skip

COMPILED = (4.0, "TorchInductor adds in another order than PyTorch, and multiplies by reciprocals")
FUSED = (4.0, "weights are rounded to the dtype of the values, and added up tile by tile")

OPERATORS = ("reference", "native", "torchscript", "compile")
EXEMPTIONS = (
    Exemption(("gradients",), "decoding is inference"),
    Exemption(
        tuple(f"case.{name}" for name in ("softcap", "alibi", "sinks")),
        "PyTorch's scaled_dot_product_attention has none",
        ("native",),
    ),
    Exemption(("FLOP counter",), None, OPERATORS[:3]),  # PyTorch's counter knows products
    Exemption(
        ("FLOP counter",),
        "PyTorch's counter has no formula for its attention on the CPU",
        ("native",),
        devices=("cpu",),
    ),
    COMPILED_COUNTED,
    Exemption(("batch invariance",), "PyTorch's products go by the size of the batch", OPERATORS, devices=CUDA),
    Exemption(("batch invariance",), "PyTorch's attention divides its work by the size of the batch", ("native",)),
    Exemption(
        ("batch invariance",),
        "the number of splits goes by the size of the batch, and so does the order of sums",
        ("triton",),
    ),
    Exemption(
        ("FSDP2/DTensor",),
        "the mask made of cache_seqlens is a plain tensor, which PyTorch does not mix with DTensors",
        OPERATORS,
    ),
    Exemption(
        ("infinities",),
        "PyTorch's attention gives zeros for queries whose weights are no numbers",
        ("native",),
        dtypes=(torch.float16, torch.bfloat16),
        devices=("cpu",),
    ),
    Exemption(
        ("denormals",),
        "PyTorch's attention takes what is below 2^-126 for zero on a GPU",
        ("native",),
        dtypes=(torch.bfloat16,),
        devices=CUDA,
    ),
)

CONTRACTS = {
    "_decode_kernel": KernelContract(max_spill_bytes=16, min_load_bits=128, matrix_instructions={"sm_90": "mma"}),
    "_combine_kernel": KernelContract(),
}

OPERATION = Operation(
    name="flash_decode",
    function="kernel_pytorch.flash_attn_triton:flash_decode",
    levels=("reference", "native", "torchscript", "compile", "triton"),
    budgets={"native": FUSED, "compile": COMPILED, "triton": FUSED},
    exemptions=EXEMPTIONS,
    inputs=inputs,
    cost=cost,
    test_grid=TESTS,
    bench_grid=BENCH,
    roles={"data": ("q", "k_cache", "v_cache"), "rows": ("cache_seqlens",)},
)
