"""Attention of one new token of each sequence to its cache: inputs, cost and grids."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor

from kernel_pytorch.harness.contracts import KernelContract
from kernel_pytorch.harness.exemptions import Exemption
from kernel_pytorch.harness.technique import Case, Cost, Direction, Given, Operation, grid, point

from .common import BENCH, CUDA, EXEMPTIONS, LOW, SOME, TENSOR_CORES, norm_weight, normal, public

THETA = 10000.0


def angles(positions: int, rotated: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines `(positions, rotated / 2)` in float32."""
    turns = THETA ** (-torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
    found = torch.arange(positions, dtype=torch.float64).unsqueeze(1) * turns
    return found.cos().to(device, torch.float32), found.sin().to(device, torch.float32)


def inputs(case: Case, generator: torch.Generator) -> Given:
    """Give qkv `(rows, (H + 2 HK) D)`, caches `(rows, HK, L, D)` or pages, lengths, cos and sin; the case's features.

    A case has shape `(rows, H, D)`. Slots that hold no key hold NaN where it says so.
    """
    (rows, heads, depth), sizes, device = case.shape, case.sizes, generator.device
    kv_heads, room, page = sizes.get("kv_heads", heads), sizes["room"], sizes.get("page", 0)
    lengths = torch.tensor(sizes.get("lengths", (room - 1,) * rows), dtype=torch.int32, device=device)
    shape, table = (rows, kv_heads, room, depth), None
    if page:
        count = room // page
        # More pages than are needed, in no order.
        shuffled = torch.randperm(rows * count + 3, generator=generator, device=device)[: rows * count]
        shape, table = (rows * count + 3, kv_heads, page, depth), shuffled.view(rows, count).to(torch.int32)
    caches = [normal(shape, case, generator) for _ in range(2)]
    if sizes.get("dirty"):
        empty = torch.arange(room, device=device) >= lengths[:, None]
        caches = [cache.masked_fill(empty[:, None, :, None], float("nan")) for cache in caches]
    qkv = normal((rows, (heads + 2 * kv_heads) * depth), case, generator)
    keywords: dict[str, Any] = {n: sizes[n] for n in ("scale", "window", "softcap", "norm_offset") if n in sizes}
    if sizes.get("norm"):
        keywords |= {name: norm_weight(depth, case, generator) for name in ("q_norm", "k_norm")}
    if sizes.get("sinks"):
        keywords["sinks"] = normal((heads,), case, generator).float()
    if table is not None:
        keywords["block_table"] = table
    turns = angles(sizes.get("positions", room), sizes.get("rotated", depth), device)
    return (qkv, *caches, lengths, *turns), {"num_heads": heads, **keywords}


def cost(case: Case, direction: Direction) -> Cost:
    """Read the keys and values that are seen, once, and qkv; write the new ones and the result. Two products.

    Where programs share the keys of a head, another kernel clears their counters.
    """
    (rows, heads, depth), sizes = case.shape, case.sizes
    kv_heads, room = sizes.get("kv_heads", heads), sizes["room"]
    seen = [n + 1 for n in sizes.get("lengths", (room - 1,) * rows) if n >= 0]
    keys = sum(min(n, sizes.get("window", n)) for n in seen)
    elements = 2 * keys * kv_heads * depth + rows * 2 * (heads + 2 * kv_heads) * depth
    return Cost(elements * case.dtype.itemsize, 4 * keys * heads * depth, launches=2)


TESTS = grid(
    point("typical", shape=(3, 8, 40), kv_heads=2, room=77, lengths=(40, 76, 3), core=True,
          reason="grouped queries, lengths of their own, no size a tile's"),
    point("one row", shape=(1, 4, 64), kv_heads=4, room=64, lengths=(63,), core=True,
          reason="every head has a key; the last slot is filled"),
    point("first token", shape=(2, 4, 32), kv_heads=2, room=40, lengths=(0, 17), dirty=True,
          reason="a token that sees itself alone; NaN in what is not written"),
    point("inactive", shape=(4, 4, 32), kv_heads=2, room=40, lengths=(-1, 17, 40, -7), dirty=True,
          reason="rows without a token, before the first and behind the last slot"),
    point("none active", shape=(2, 4, 32), kv_heads=2, room=40, lengths=(-1, -1), reason="nothing to write"),
    point("beyond the angles", shape=(2, 2, 32), room=40, positions=20, lengths=(19, 20), reason="few angles"),
    point("all rows", shape=(16, 4, 16), kv_heads=1, room=33, lengths=tuple(range(1, 33, 2)), reason="MQA; 16 rows"),
    point("window", shape=(3, 4, 64), kv_heads=2, room=100, window=37, lengths=(90, 36, 5),
          reason="the left edge crosses tiles; one that is not full yet"),
    point("ring", shape=(3, 4, 32), kv_heads=2, room=48, window=48, positions=300, lengths=(47, 48, 250),
          reason="all slots full, the first written again, several times around"),
    point("ring with room", shape=(2, 4, 32), kv_heads=2, room=64, window=20, positions=300, lengths=(70, 131),
          reason="a window across the seam"),
    point("pages", shape=(3, 8, 64), kv_heads=1, room=96, page=16, lengths=(33, 95, 15), core=True,
          reason="pages in no order; the edges of one"),
    point("inactive pages", shape=(3, 4, 32), kv_heads=2, room=48, page=24, lengths=(-1, 24, 48),
          reason="a row without a token has pages that are another's"),
    point("ring of pages", shape=(2, 4, 32), kv_heads=2, room=48, page=16, window=33, positions=200, lengths=(100, 20),
          reason="both"),
    point("norms", shape=(2, 4, 64), kv_heads=2, room=50, lengths=(44, 7), norm=True, reason="Qwen 3's"),
    point("norms with an offset", shape=(2, 4, 40), kv_heads=2, room=50, lengths=(44, 7), norm=True, norm_offset=1.0,
          reason="Gemma 3's; no power of two"),
    point("partial rotation", shape=(2, 4, 64), kv_heads=2, room=50, lengths=(44, 7), rotated=24, reason="GPT-NeoX's"),
    point("soft cap", shape=(2, 4, 64), kv_heads=2, room=60, lengths=(50, 9), softcap=1.5, scale=0.2,
          reason="Gemma 2's, low enough to bend; a scale"),
    point("sinks", shape=(3, 8, 64), kv_heads=1, room=70, lengths=(60, 0, -1), sinks=True, reason="gpt-oss's"),
    point("all of it", shape=(3, 8, 24), kv_heads=2, room=64, page=16, window=40, softcap=3.0, sinks=True, norm=True,
          norm_offset=1.0, rotated=16, positions=200, lengths=(130, 63, 2), reason="every feature at once"),
    point("deep", shape=(1, 2, 256), kv_heads=1, room=30, lengths=(25,), dtypes=SOME, reason="the deepest head"),
    point("narrow", shape=(2, 2, 2), room=5, lengths=(4, 1), dtypes=SOME, reason="a head of one pair"),
    dtypes=LOW,
)  # fmt: skip

MODELS = {"Llama 3.2 1B": (32, 8, 64), "Llama 3 8B": (32, 8, 128)}
BENCH_CASES = grid(
    *[
        point(f"{model}, {rows} x {room}", shape=(rows, heads, depth), kv_heads=kv_heads, room=room,
              **cast(Any, {} if (depth, rows) == (64, 1) else {"devices": CUDA}))
        for model, (heads, kv_heads, depth) in MODELS.items() for rows in (1, 8) for room in (1024, 8192)
    ],
    point("Llama 3 8B, 8 x 8192, pages of 16", shape=(8, 32, 128), kv_heads=8, room=8192, page=16, devices=CUDA),
    point("Gemma 3 4B, 1 x 8192, window 1024", shape=(1, 8, 256), kv_heads=4, room=1024, window=1024, positions=8192,
          lengths=(8000,), norm=True, norm_offset=1.0, devices=CUDA),
    dtypes=BENCH,
)  # fmt: skip

PLAIN = "caches are written in place, and made of plain tensors are masks and slots: PyTorch has no such DTensors"
_EXEMPTIONS = (
    *EXEMPTIONS,
    Exemption(
        ("FLOP counter",),
        "PyTorch's counter has no formula for its attention on the CPU",
        ("native",),
        devices=("cpu",),
    ),
    Exemption(("batch invariance",), "the number of shares goes by that of the rows", ("triton",), devices=CUDA),
    Exemption(("FSDP2/DTensor",), PLAIN),
    Exemption(
        ("outlier channels", "large mean"),
        "scores of 20,000 and more: rounded to 16 bits, queries and keys leave no digit of a softmax of them",
        arguments=("qkv", "k_cache"),
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

E = math.e
OPERATIONS = [
    Operation(
        name="rotary_cache_attention",
        **public("rotary_cache_attention"),
        exemptions=_EXEMPTIONS,
        inputs=inputs,
        cost=cost,
        test_grid=TESTS,
        bench_grid=BENCH_CASES,
        roles={"data": ("qkv", "k_cache", "v_cache"), "rows": ("lengths",), "written": ("k_cache", "v_cache")},
        known=[
            # A quarter turn makes (1, 0) of q and k to (0, 1); scores are 1 with the new key and 0 with the old one.
            (
                (
                    [[1.0, 0.0, 1.0, 0.0, 5.0, 6.0]], [[[[1.0, 0.0], [9.0, 9.0]]]], [[[[1.0, 2.0], [9.0, 9.0]]]],
                    torch.tensor([1], dtype=torch.int32), [[1.0], [0.0]], [[0.0], [1.0]],
                ),
                {"num_heads": 1, "scale": 1.0},
                (
                    [[(1 + 5 * E) / (1 + E), (2 + 6 * E) / (1 + E)]],
                    [[[[1.0, 0.0], [0.0, 1.0]]]], [[[[1.0, 2.0], [5.0, 6.0]]]],
                ),
            ),
        ],
    ),
]  # fmt: skip

CONTRACTS = {"attention_kernel": KernelContract(min_load_bits=128, matrix_instructions=TENSOR_CORES)}
