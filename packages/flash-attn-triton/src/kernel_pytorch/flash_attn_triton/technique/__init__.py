"""The declaration: what this package offers the harness. Imports nothing but torch and the declaration's types."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from kernel_pytorch.harness.contracts import KernelContract
from kernel_pytorch.harness.exemptions import COMPILED_COUNTED, Exemption
from kernel_pytorch.harness.implementation import Level, PublicLevel, imported
from kernel_pytorch.harness.technique import Operation, Technique, grid, point

from . import decode, inputs
from .decode import COMPILED, CUDA, FULL, LOW

HERE = "kernel_pytorch.flash_attn_triton"
LEVELS = ("reference", "native", "torchscript", "compile", "triton", "cuda")


@dataclass(frozen=True)
class GluonForward(PublicLevel):
    """Level "triton" with the forward kernel in Gluon, whether or not the level takes it by itself."""

    partial: ClassVar[bool] = True

    def why_absent(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """It is for one architecture, and has no interpreter."""
        found = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        return None if found == (9, 0) else "the Gluon forward is for compute capability 9.0"

    def load(self) -> Callable[..., Any]:
        """The public function; what that kernel cannot run raises NotImplementedError."""
        function, asked = super().load(), imported(f"{HERE}.kernels.gluon_launch:gluon_forward")

        def call(*arguments: Any) -> Any:
            with asked():
                return function(*arguments)

        return call

    def bound_to(self, arguments: Sequence[Any]) -> Callable[[], Any]:
        """A call with what chooses the kernel around it."""
        return functools.partial(self.load(), *arguments)


def _summands(arguments: dict[str, Any]) -> dict[str, int]:
    """Gradients of keys and values add up what comes from all queries of their group of heads."""
    q, k = arguments["q"], arguments["k"]
    return dict.fromkeys(("k", "v"), q.shape[1] // k.shape[1] * q.shape[2])


flash_attention_tests = grid(
    point("typical", shape=(3, 4, 33, 40), kv_heads=2, keys=77, core=True, reason="grouped queries, no size a tile's"),
    point("causal", shape=(2, 2, 70, 64), causal=True, core=True, reason="the diagonal crosses tiles"),
    point("whole tiles", shape=(1, 2, 64, 64), keys=128, reason="nothing is masked"),
    point("decoding", shape=(2, 8, 1, 128), kv_heads=2, keys=200, causal=True, reason="the last query sees all keys"),
    point("blind queries", shape=(1, 2, 37, 16), keys=9, causal=True, reason="queries that see no key: zeros"),
    point("steep", shape=(1, 2, 40, 64), keys=200, gain=4.0, reason="scores to 20: tiles outweigh those before"),
    point("one of each", shape=(1, 1, 1, 1), reason="softmax of one number"),
    point("odd depth", shape=(1, 3, 17, 19), reason="rows end within a vector"),
    point("deep", shape=(1, 1, 20, 256), causal=True, reason="the deepest head of the CUDA kernels"),
    dtypes=LOW,
)

flash_attention_with_lse_tests = grid(
    point("plain", shape=(3, 4, 33, 40), kv_heads=2, keys=77, core=True, reason="lse has a gradient too"),
    point("causal", shape=(1, 2, 70, 64), causal=True, reason="the diagonal crosses tiles"),
    point("window", shape=(1, 2, 90, 32), keys=100, window=(21, 9), reason="both edges cross tiles; some lie inside"),
    point("sliding", shape=(1, 2, 130, 16), causal=True, window=(37, -1), reason="Mistral's: causal with a left edge"),
    point("soft cap", shape=(1, 2, 40, 64), keys=50, softcap=1.5, reason="Gemma 2's, low enough to bend"),
    point("ALiBi", shape=(2, 3, 40, 16), keys=50, causal=True, alibi=True, reason="slopes of three heads"),
    point("sinks", shape=(1, 4, 40, 64), kv_heads=2, causal=True, sinks=True, reason="gpt-oss's"),
    point("dropout", shape=(1, 2, 35, 16), keys=41, dropout=0.25, reason="the mask of a seed, at every level the same"),
    point(
        "all of it", shape=(1, 4, 67, 24), kv_heads=2, keys=75, causal=True, window=(40, -1), softcap=3.0, alibi=True,
        sinks=True, dropout=0.1, core=True, reason="every feature at once, in their order",
    ),
    dtypes=LOW,
)  # fmt: skip

flash_attention_masked_tests = grid(
    point("bias", shape=(3, 4, 33, 40), kv_heads=2, keys=50, mask=(3, 4, 33, 50), core=True, reason="not broadcast"),
    point("bias of heads", shape=(2, 3, 40, 16), mask=(1, 3, 40, 40), reason="T5: a sum over batches"),
    point("bias of keys", shape=(2, 2, 20, 16), keys=35, mask=(2, 1, 1, 35), reason="a sum over heads and queries"),
    point("padding", shape=(2, 2, 37, 32), mask=(2, 1, 1, 37), boolean=True, reason="keys that no query sees"),
    point("bools", shape=(1, 2, 37, 32), keys=70, mask=(1, 1, 37, 70), boolean=True, causal=True, core=True,
          reason="beside a causal mask"),
    dtypes=LOW,
)  # fmt: skip

flash_attention_varlen_tests = grid(
    point(
        "ragged", shape=(4, 24), kv_heads=2, queries=(5, 33, 40), lengths=(9, 33, 3), core=True, reason="any lengths"
    ),
    point("causal", shape=(2, 64), queries=(1, 70, 17), lengths=(50, 70, 17), causal=True, reason="decoding too"),
    point("empty", shape=(2, 16), queries=(0, 7, 0, 3), lengths=(4, 0, 0, 9), reason="no queries, no keys, neither"),
    dtypes=LOW,
)

flash_attention_bench = grid(
    point("BERT, 16 x 128", shape=(16, 12, 128, 64)),
    point("GPT-2, 1024", shape=(1, 12, 1024, 64), causal=True),
    point("Llama 3.1 8B, prefill 512", shape=(1, 32, 512, 128), kv_heads=8, causal=True),
    point("Llama 3.1 8B, decode at 4096", shape=(1, 32, 1, 128), kv_heads=8, keys=4096, causal=True),
    point("Llama 3.1 8B, prefill 4096", shape=(1, 32, 4096, 128), kv_heads=8, causal=True, devices=CUDA,
          dtypes=(torch.bfloat16, torch.float16)),
    point("Llama 3.1 70B, 16 x 1024", shape=(16, 64, 1024, 128), kv_heads=8, causal=True, devices=CUDA),
    point("32 heads of 128, 8192", shape=(1, 32, 8192, 128), devices=CUDA),
    point("32 heads of 128, 8192, causal", shape=(1, 32, 8192, 128), causal=True, devices=CUDA),
    point("32 heads of 64, 8192", shape=(1, 32, 8192, 64), devices=CUDA),
    point("32 heads of 64, 8192, causal", shape=(1, 32, 8192, 64), causal=True, devices=CUDA),
    *[point(f"8192, window {n}", shape=(1, 32, 8192, 128), kv_heads=8, causal=True, window=(n - 1, -1), devices=CUDA)
      for n in (128, 1024, 4096)],
    *[point(f"prefill of a chunk of {n}", shape=(1, 32, n, 128), kv_heads=8, keys=8192, causal=True, devices=CUDA)
      for n in (128, 1024)],
    point("window 512", shape=(1, 16, 4096, 64), causal=True, window=(511, -1), dtypes=FULL, devices=CUDA),
    point("prefill of a chunk", shape=(1, 16, 1024, 64), keys=4096, causal=True, dtypes=FULL, devices=CUDA),
    point("Phi-2, 2048", shape=(1, 32, 2048, 80), causal=True, devices=CUDA),
    point("Phi-3 mini, 2048", shape=(1, 32, 2048, 96), causal=True, devices=CUDA),
    point("16 heads of 192, 2048", shape=(1, 16, 2048, 192), causal=True, devices=CUDA),
    point("Gemma 2B, 2048", shape=(1, 8, 2048, 256), kv_heads=1, causal=True, devices=CUDA),
    point("ViT-B/16, 32 x 197", shape=(32, 12, 197, 64), devices=CUDA),
    point("BERT, 8 x 512", shape=(8, 12, 512, 64), devices=CUDA),
    dtypes=(torch.bfloat16,),
)  # fmt: skip

flash_attention_with_lse_bench = grid(
    point("Gemma 2 9B, prefill 1024", shape=(1, 16, 1024, 256), kv_heads=8, causal=True, softcap=50.0, devices=CUDA),
    point("gpt-oss 20B, 1024", shape=(1, 64, 1024, 64), kv_heads=8, causal=True, window=(127, -1), sinks=True,
          devices=CUDA),
    point("MPT 7B, prefill 256", shape=(1, 32, 256, 128), causal=True, alibi=True),
    point("MPT 7B, prefill 2048", shape=(1, 32, 2048, 128), causal=True, alibi=True, devices=CUDA),
    point("part of a sequence, 4096", shape=(1, 32, 4096, 128), kv_heads=8, devices=CUDA),
    dtypes=(torch.bfloat16,),
)  # fmt: skip

flash_attention_masked_bench = grid(
    point("T5 base, 8 x 128", shape=(8, 12, 128, 64), mask=(1, 12, 128, 128)),
    point("BERT padded, 16 x 128", shape=(16, 12, 128, 64), mask=(16, 1, 1, 128), boolean=True),
    point("T5 large, 8 x 512", shape=(8, 16, 512, 64), mask=(1, 16, 512, 512), devices=CUDA),
    point("BERT padded, 16 x 512", shape=(16, 12, 512, 64), mask=(16, 1, 1, 512), boolean=True, devices=CUDA),
    point("Llama padded, 4 x 2048", shape=(4, 32, 2048, 128), kv_heads=8, mask=(4, 1, 1, 2048), boolean=True,
          causal=True, devices=CUDA),
    dtypes=(torch.bfloat16,),
)  # fmt: skip

flash_attention_varlen_bench = grid(
    point("BERT unpadded", shape=(12, 64), queries=(128, 17, 64, 96), lengths=(128, 17, 64, 96)),
    *[point(f"{n} sequences of {least} to {most}", shape=(16, 128), kv_heads=4, sequences=(n, least, most), causal=True,
            devices=CUDA) for n, least, most in ((16, 64, 2048), (64, 16, 512), (256, 5, 60))],
    point("encoder, 64 sequences", shape=(12, 64), sequences=(64, 16, 512), devices=CUDA),
    point("64 sequences", shape=(8, 64), sequences=(64, 16, 512), causal=True, dtypes=FULL, devices=CUDA),
    dtypes=(torch.bfloat16,),
)  # fmt: skip

SPILLS = KernelContract(max_spill_bytes=64)
GLUON = KernelContract(  # once an item, outside its loop over keys
    max_spill_bytes=72, max_registers=168, min_load_bits=128, matrix_instructions={"sm_90": "wgmma"}
)

REMADE = (4.0, "the backward makes the probabilities again of their rounded logsumexp")
GROUPED = (4.0, "PyTorch's product of a matrix, as of the heads of a group, adds in another order than of a row")

OPERATORS = ("reference", "native", "torchscript")
NATIVE, TRITON = ("native",), ("triton",)
COMMON = (
    Exemption(
        ("batch invariance",),
        "PyTorch's products, in the backward at least, go by the size of the batch",
        (*OPERATORS, "compile", "cuda"),
        devices=CUDA,
    ),
    Exemption(("FLOP counter",), None, OPERATORS),  # PyTorch's counter knows products
    COMPILED_COUNTED,
    Exemption(
        ("double backward",),
        "the gradients are kernels, which have no gradient; level 'reference' has one",
        TRITON,
    ),
    Exemption(
        ("opcheck",),
        "it asks for a gradient of the operator of the gradients; the tests check the other operator",
        TRITON,
    ),
)
# PyTorch computes attention by the formula where a bias needs its gradient, which has none of these.
FUSED_ON_CPU = (
    Exemption(
        ("FLOP counter",), "PyTorch's counter has no formula for its attention on the CPU", NATIVE, devices=("cpu",)
    ),
    Exemption(
        ("double backward",), "PyTorch's attention on the CPU has no second derivative", NATIVE, devices=("cpu",)
    ),
    Exemption(
        ("FSDP2/DTensor",), "PyTorch has no sharding rule for its attention on the CPU", NATIVE, devices=("cpu",)
    ),
)
PACKED = (
    Exemption(("FSDP2/DTensor",), "sequences lie in one dimension, and cu_seqlens counts in the whole of it"),
    Exemption(("batch invariance",), "rows are tokens, and a sequence is not the same without some of them"),
)
NO_WINDOW = Exemption(("case.window",), "the C++ kernel has none", ("cuda",))
INPUTS = (
    Exemption(
        ("outlier channels", "large mean"),
        "scores of 20,000 and more, which float32 rounds by a thousandth: a softmax of them, or what a backward makes"
        " again of its logsumexp, has three digits or none",
        arguments=("q", "k"),
    ),
    Exemption(
        ("large mean",),
        "next to 10,000 neighbours are 8 and 64 apart: values are all but equal, and gradients cancel",
        arguments=("v",),
        dtypes=(torch.float16, torch.bfloat16),
    ),
    Exemption(
        ("denormals",),
        "PyTorch's attention takes what is below 2^-126 for zero on a GPU",
        arguments=("q", "k", "v"),
        dtypes=(torch.bfloat16,),
        devices=CUDA,
    ),
    Exemption(
        ("denormals",),
        "oneDNN's attention takes what is below 2^-126 for zero on some processors",
        ("native", "compile"),
        dtypes=(torch.bfloat16,),
        devices=("cpu",),
    ),
    Exemption(
        ("infinities",),
        "PyTorch's attention gives zeros for queries whose weights are no numbers on some processors",
        ("native",),
        dtypes=(torch.float16, torch.bfloat16),
        devices=("cpu",),
    ),
    Exemption(
        ("imitated activations",),
        "tokens are much alike, so that gradients of scores cancel, and PyTorch's attention keeps fewer digits of them",
        ("native", "compile"),
    ),
    Exemption(
        ("imitated activations",),
        "weights and gradients of scores are rounded to be multiplied, which PyTorch's attention does too",
        ("triton", "triton (Gluon)"),
        dtypes=(torch.bfloat16,),
        instead="native",
    ),
)


def _with_gluon(function: str, levels: Sequence[str]) -> list[str | PublicLevel]:
    return [*levels, GluonForward("triton (Gluon)", Level.TRITON, f"{HERE}:{function}", *REMADE)]


LENGTH = "kernels of ours are faster at this length and slower at others, and no default depends on the length"
ONE_QUERY = "flash_decode is for one query"
SLOW_DEFAULTS = {
    "flash_attention: Llama 3.1 8B, prefill 4096 1x32x4096x128 kv_heads=8 causal=True float16": LENGTH,
    "flash_attention_masked: T5 base, 8 x 128 8x12x128x64 mask=[1, 12, 128, 128] bfloat16": LENGTH,
    "flash_attention_masked: T5 large, 8 x 512 8x16x512x64 mask=[1, 16, 512, 512] bfloat16": LENGTH,
    "flash_attention_masked: BERT padded, 16 x 128 16x12x128x64 mask=[16, 1, 1, 128] boolean=True bfloat16": LENGTH,
    # On a CPU.
    "flash_attention: Llama 3.1 8B, prefill 512 1x32x512x128 kv_heads=8 causal=True bfloat16": LENGTH,
    "flash_attention: Llama 3.1 8B, decode at 4096 1x32x1x128 kv_heads=8 keys=4096 causal=True bfloat16": ONE_QUERY,
}

BUDGETS = {"native": REMADE, "compile": COMPILED, "triton": REMADE, "cuda": GROUPED}

technique = Technique(
    name="flash-attn-triton",
    title="Flash attention, with window, soft cap, ALiBi, sinks, dropout and bias",
    paper="https://arxiv.org/abs/2205.14135",
    operations=[
        Operation(
            name="flash_attention",
            function=f"{HERE}:flash_attention",
            levels=_with_gluon("flash_attention", LEVELS),
            budgets=BUDGETS,
            exemptions=(*COMMON, *FUSED_ON_CPU, NO_WINDOW, *INPUTS),
            inputs=inputs.flash_attention_inputs,
            cost=inputs.flash_attention_cost,
            test_grid=flash_attention_tests,
            bench_grid=flash_attention_bench,
            roles={"data": ("q", "k", "v")},
            summands=_summands,
            real_input=inputs.flash_attention_real,
            in_parts=inputs.by_group(f"{HERE}.levels.reference:flash_attention"),
        ),
        Operation(
            name="flash_attention_with_lse",
            function=f"{HERE}:flash_attention_with_lse",
            levels=_with_gluon("flash_attention_with_lse", ("reference", "torchscript", "compile", "triton")),
            budgets={"compile": COMPILED, "triton": REMADE},
            exemptions=COMMON,
            inputs=inputs.flash_attention_inputs,
            cost=inputs.flash_attention_cost,
            test_grid=flash_attention_with_lse_tests,
            bench_grid=flash_attention_with_lse_bench,
            roles={"rows": ("q", "k", "v"), "constant": ("alibi_slopes",)},
            summands=_summands,
            in_parts=inputs.by_group(f"{HERE}.levels.reference:flash_attention_with_lse"),
        ),
        Operation(
            name="flash_attention_masked",
            function=f"{HERE}:flash_attention_masked",
            levels=("reference", "native", "torchscript", "compile", "triton"),
            budgets={"native": REMADE, "compile": COMPILED, "triton": REMADE},
            exemptions=COMMON,
            roles={"rows": ("q", "k", "v", "mask")},
            inputs=inputs.flash_attention_masked_inputs,
            cost=inputs.flash_attention_cost,
            test_grid=flash_attention_masked_tests,
            bench_grid=flash_attention_masked_bench,
            summands=_summands,
        ),
        Operation(
            name="flash_attention_varlen",
            function=f"{HERE}:flash_attention_varlen",
            levels=("reference", "native", "torchscript", "compile", "triton"),
            budgets={"native": REMADE, "compile": COMPILED, "triton": REMADE},
            exemptions=(*COMMON, *FUSED_ON_CPU, *PACKED),
            inputs=inputs.flash_attention_varlen_inputs,
            cost=inputs.flash_attention_varlen_cost,
            test_grid=flash_attention_varlen_tests,
            bench_grid=flash_attention_varlen_bench,
            summands=lambda arguments: dict.fromkeys(("k", "v"), arguments["q"].shape[0]),
            in_parts=inputs.by_group(f"{HERE}.levels.reference:flash_attention_varlen"),
        ),
        decode.OPERATION,
    ],
    levels=f"{HERE}.levels:LADDER",
    contracts={
        "_forward_kernel": SPILLS,
        "hopper_forward_kernel": GLUON,
        "dkdv_kernel": SPILLS,
        # Tiles of sm_90 that spill; on an H200 they were no slower than the smaller tiles that they replace. Narrow
        # windows and packed sequences spill most; packed ones took 0.12 to 0.42 of native's time on an H100.
        "dkdv_kernel<* ROWS=64 COLUMNS=128 *>": KernelContract(max_spill_bytes=840),
        "dkdv_kernel<* ROWS=32 COLUMNS=64 DEPTH=256 *>": KernelContract(max_spill_bytes=324),
        "dq_kernel": SPILLS,
        "dbias_kernel": SPILLS,
        "_delta_kernel": KernelContract(),
        **decode.CONTRACTS,
    },
    replacements=f"{HERE}.replacements",
    slow_defaults=SLOW_DEFAULTS,
)
