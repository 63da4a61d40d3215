"""The declaration: what this package offers the harness. Imports nothing but torch and the declaration's types."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kernel_pytorch.harness.contracts import KernelContract
from kernel_pytorch.harness.exemptions import (
    BACKWARD_TIME,
    COMPILED_COUNTED,
    INTERPRETED_FIRST,
    NO_OPERATOR,
    ONE_PIECE,
    PRODUCTS,
    REDUCTIONS,
    Exemption,
)
from kernel_pytorch.harness.technique import (
    Case,
    Cost,
    Direction,
    Given,
    Operation,
    Technique,
    grid,
    point,
)

HERE = "kernel_pytorch.linear_cross_entropy"
IGNORED = -100
CUDA = ("cuda",)
LEVELS = ("reference", "native", "torchscript", "compile", "triton")
ONE_BY_ONE = (4.0, "TorchInductor adds the exponentials of a row one by one on the CPU, eager in a tree")

LINEAR_BUDGETS = {
    "native": (4.0, "adds up exponentials chunk by chunk; a GPU rounds gradients of 16-bit logits to 16 bits"),
    "compile": (4.0, f"{ONE_BY_ONE[1]}; a GPU rounds gradients of 16-bit logits to 16 bits"),
    "triton": (4.0, "adds H products in another order than the reference, and rounds gradients of logits"),
}
LOGITS_BUDGETS = {
    "compile": ONE_BY_ONE,
    "triton": (4.0, "takes exponentials by an instruction that is off by two units in the last place"),
}

OPERATORS = ("reference", "native", "torchscript")
SCRIPTED = ("torchscript",)
# On a CPU the public functions check targets by an operator of this package, which a checkpoint policy sees.
CHECKED = (
    Exemption(("determinism",), None, SCRIPTED),
    Exemption(("determinism",), INTERPRETED_FIRST, SCRIPTED, devices=CUDA),
    Exemption(("selective checkpointing",), None, ("compile",)),
    Exemption(("selective checkpointing",), ONE_PIECE, ("compile",), devices=CUDA),
    Exemption(("opcheck",), None, OPERATORS),
)
LINEAR_EXEMPTIONS = (
    *CHECKED,
    Exemption(("opcheck",), NO_OPERATOR, ("reference", "torchscript"), devices=CUDA),
    # PyTorch's counter knows products; level "native" is an operator of this package.
    Exemption(("FLOP counter",), None, OPERATORS),
    COMPILED_COUNTED,
    Exemption(("batch invariance",), PRODUCTS, (*OPERATORS, "compile")),
    Exemption(("batch invariance",), f"its losses are, not their gradients: {PRODUCTS}", ("triton",)),
    Exemption((BACKWARD_TIME,), "the forward computes the gradients"),
)
LOGITS_EXEMPTIONS = (
    *CHECKED,
    Exemption(("opcheck",), NO_OPERATOR, OPERATORS, devices=CUDA),
    Exemption(("batch invariance",), None, SCRIPTED),
    Exemption(("batch invariance",), REDUCTIONS, ("reference", "torchscript"), devices=CUDA),
    Exemption(
        ("NaN", "infinities"),
        "PyTorch's own cross entropy multiplies the gradient of an ignored token by zero, which leaves its NaN",
        ("native",),
        devices=CUDA,
    ),
)


def _keywords(case: Case, *more: str) -> dict[str, Any]:
    """The keywords that a case names; the others have their defaults, but for the reduction."""
    names = ("label_smoothing", "z_loss", "softcap", *more)
    return {"reduction": _reduction(case), **{name: case.sizes[name] for name in names if name in case.sizes}}


def _reduction(case: Case) -> str:
    return case.sizes.get("reduction", "none")


def _normal(shape: tuple[int, ...], case: Case, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32).to(case.dtype)


def _rows(shape: tuple[int, ...], case: Case, generator: torch.Generator, scale: float) -> Tensor:
    """Normal numbers; where there are millions, the same block of rows again and again, each row scaled anew."""
    rows, columns = torch.Size(shape[:-1]).numel(), shape[-1]
    most = max(64, 2**22 // columns)
    block = _normal((min(rows, most), columns), case, generator) * scale
    if rows <= most:
        return block.view(shape)
    repeated = block.repeat(-(-rows // most), 1)[:rows]
    return repeated.mul_(1.0 + 0.25 * _normal((rows, 1), case, generator)).view(shape)


def _weight(case: Case, generator: torch.Generator) -> Tensor:
    """Rows as layers are initialised: logits are as large as the hidden states."""
    depth = case.shape[-1]
    return _rows((case.words, depth), case, generator, case.sizes.get("scale", 1.0) / math.sqrt(depth))


def _target(case: Case, words: int, generator: torch.Generator) -> Tensor:
    """Words, every seventh of them to be ignored, or what the case names; a shared one for all sequences."""
    shape = case.shape[1:-1] if case.sizes.get("shared_target") else case.shape[:-1]
    target = torch.randint(words, shape, generator=generator, device=generator.device)
    kind = case.sizes.get("target", "some ignored")
    flat = target.view(-1)
    if kind == "some ignored":
        flat[3::7] = IGNORED
    elif kind == "all ignored":
        flat.fill_(IGNORED)
    return target.to(case.sizes.get("target_dtype", torch.int64)).expand(case.shape[:-1])


def linear_cross_entropy_inputs(case: Case, generator: torch.Generator) -> Given:
    """Give hidden `(*shape)`, weight `(words, H)`, target; bias `(words,)` or None, five scalars, chunk."""
    bias = _normal((case.words,), case, generator) if case.sizes.get("bias") else None
    tensors = _normal(case.shape, case, generator), _weight(case, generator), _target(case, case.words, generator)
    return tensors, {"bias": bias, **_keywords(case, "chunk")}


def cross_entropy_inputs(case: Case, generator: torch.Generator) -> Given:
    """Give logits `(*shape)`, target; four scalars."""
    logits = _rows(case.shape, case, generator, case.sizes.get("scale", 4.0))
    return (logits, _target(case, case.shape[-1], generator)), _keywords(case)


def losses_of_mean(arguments: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments that give every token's loss, where the given ones give their mean."""
    return {**arguments, "reduction": "none"} if arguments["reduction"] == "mean" else None


def linear_cross_entropy_cost(case: Case, direction: Direction) -> Cost:
    """Forward: read hidden, weight and target, write a loss each. Backward: read all again, write both gradients.

    One product forward and two backward, as the definition has it: logits that are computed again are not counted.
    """
    tokens, depth, size = torch.Size(case.shape[:-1]).numel(), case.shape[-1], case.dtype.itemsize
    product, logits = 2 * tokens * case.words * depth, tokens * case.words
    data = (tokens * depth + case.words * (depth + bool(case.sizes.get("bias")))) * size
    one = Cost(data + 12 * tokens, product + 4 * logits)
    return direction.cost(one, Cost(2 * data + 16 * tokens, 2 * product + 5 * logits))


def cross_entropy_cost(case: Case, direction: Direction) -> Cost:
    """Forward: read logits and target, write a loss each, two launches. Backward: read logits, write their gradient."""
    tokens, logits = torch.Size(case.shape[:-1]).numel(), torch.Size(case.shape).numel()
    data, alone = logits * case.dtype.itemsize, _reduction(case) == "none"
    # A target that all sequences share is copied for each.
    shared = bool(case.sizes.get("shared_target"))
    one = Cost(data + 12 * tokens, 4 * logits, 2 + shared if alone else None)
    return direction.cost(one, Cost(2 * data + 16 * tokens, 5 * logits, 1 + shared if alone else None))


def _real_target(activations: Tensor, words: int) -> Tensor:
    return torch.randint(words, activations.shape[:1], generator=torch.Generator().manual_seed(0))


def linear_cross_entropy_real(activations: Tensor, dtype: torch.dtype) -> Given:
    """Hidden states as they are, and a vocabulary of 1,000 random words."""
    weight = torch.randn((1000, activations.shape[-1]), generator=torch.Generator().manual_seed(1)) * 0.05
    return (activations.to(dtype), weight.to(dtype), _real_target(activations, 1000)), {}


def cross_entropy_real(activations: Tensor, dtype: torch.dtype) -> Given:
    """Hidden states as logits: a few of them large, as in life."""
    return (activations.to(dtype), _real_target(activations, activations.shape[-1])), {}


F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
LOW = (F32, F16, BF16)
ONE = (F32,)
ALL: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 3.0}

# On the CPU oneDNN takes denormal bfloat16 numbers for zero, so no core case, which those are planted in, is bfloat16.
linear_cross_entropy_tests = grid(
    point("typical", shape=(22, 4, 48), words=193, shared_target=True, core=True, dtypes=(F32, F16),
          reason="no size is a multiple of a tile; one target for all sequences, expanded"),
    point("typical, bfloat16", shape=(6, 13, 40), words=193, dtypes=(BF16,), reason="what networks are trained in"),
    point("mean", shape=(61, 48), words=96, reduction="mean", reason="over the tokens that count"),
    point("mean of everything", shape=(61, 40), words=193, reduction="mean", bias=True, **ALL, core=True, dtypes=ONE,
          reason="every term, and the mean over what counts"),
    point("mean, smoothed", shape=(61, 40), words=193, reduction="mean", bias=True, label_smoothing=0.1, z_loss=1e-3,
          core=True, dtypes=ONE, reason="gradients are computed with the loss"),
    point("mean under a cap", shape=(61, 40), words=193, reduction="mean", bias=True, z_loss=1e-3, softcap=3.0,
          dtypes=(F32, F16), reason="the derivative of the cap belongs to the exponentials"),
    point("everything", shape=(33, 48), words=80, bias=True, **ALL, reason="every term of every gradient"),
    point("sum", shape=(29, 40), words=70, reduction="sum", reason="gradients of one"),
    point("bias", shape=(19, 33), words=37, bias=True, reason="rows of 66 bytes, which no copy engine moves"),
    point("smoothing", shape=(19, 32), words=65, label_smoothing=0.1, reduction="mean", reason="a mean over V"),
    point("all smoothing", shape=(9, 16), words=33, label_smoothing=1.0, dtypes=ONE, reason="no target matters"),
    point("z-loss", shape=(19, 32), words=65, z_loss=1e-2, reduction="mean", reason="a square beside the difference"),
    point("soft cap", shape=(19, 32), words=65, softcap=2.0, scale=4.0, reason="where the cap bends"),
    point("no target counts", shape=(9, 16), words=33, target="all ignored", reduction="mean", bias=True,
          reason="zero, and zero gradients"),
    point("32-bit targets", shape=(9, 16), words=33, target_dtype=torch.int32, dtypes=ONE, reason="loaded as they are"),
    point("chunks", shape=(11, 24), words=100, chunk=7, bias=True, **ALL, reason="many chunks, the last one shorter"),
    point("chunks of one", shape=(5, 8), words=9, chunk=1, dtypes=ONE, reason="as small as they get"),
    point("confident", shape=(33, 24), words=96, scale=12.0, target="words", reason="losses that nearly cancel"),
    point("one word", shape=(7, 8), words=1, dtypes=ONE, reason="loss zero, gradients zero"),
    point("one token", shape=(1, 96), words=300, reason="most of the tile has no row"),
    point("one number", shape=(1, 1), words=2, dtypes=ONE, reason="as small as it gets"),
    point("no tokens", shape=(0, 16), words=8, reduction="mean", bias=True, dtypes=ONE, reason="zero, and zeros"),
    point("many words", shape=(5, 16), words=2500, dtypes=(F32, F16), reason="more tiles than the join takes at once"),
    dtypes=LOW,
)  # fmt: skip

cross_entropy_tests = grid(
    point("typical", shape=(6, 13, 193), shared_target=True, core=True, dtypes=(F32, F16),
          reason="no size is a power of two; one target for all sequences, expanded"),
    point("typical, bfloat16", shape=(6, 13, 193), dtypes=(BF16,), reason="what networks are trained in"),
    point("mean of everything", shape=(61, 100), reduction="mean", **ALL, core=True, dtypes=ONE, reason="every term"),
    point("sum", shape=(29, 70), reduction="sum", dtypes=ONE, reason="gradients of one"),
    point("smoothing", shape=(19, 65), label_smoothing=0.1, reduction="mean", dtypes=(F32, F16), reason="a mean"),
    point("z-loss", shape=(19, 65), z_loss=1e-2, dtypes=(F32, F16), reason="a square beside the difference"),
    point("soft cap", shape=(19, 65), softcap=2.0, dtypes=(F32, F16), reason="where the cap bends"),
    point("no target counts", shape=(9, 33), target="all ignored", reduction="mean", reason="zero, and zero gradients"),
    point("32-bit targets", shape=(9, 33), target_dtype=torch.int32, dtypes=ONE, reason="loaded as they are"),
    point("one word", shape=(7, 1), dtypes=ONE, reason="loss zero, gradient zero"),
    point("no tokens", shape=(0, 8), reduction="mean", dtypes=ONE, reason="zero"),
    point("many short rows", shape=(1031, 5), dtypes=ONE, reason="rows of a program are missing"),
    point("confident", shape=(33, 96), scale=24.0, target="words", reason="losses that nearly cancel"),
    point("two blocks", shape=(3, 4097), reason="one word more than a block"),
    point("three programs", shape=(3, 32769), **ALL, dtypes=(F32, F16), reason="one word more than two programs take"),
    dtypes=LOW,
)  # fmt: skip

MEAN: dict[str, Any] = {"reduction": "mean"}

linear_cross_entropy_bench = grid(
    point("Llama 3.1 8B, 4096 tokens", shape=(4096, 4096), words=128256, **MEAN, devices=CUDA),
    point("Llama 3.1 8B, 64 tokens", shape=(64, 4096), words=128256, **MEAN, devices=CUDA),
    point("Gemma 2 9B, 4096 tokens", shape=(4096, 3584), words=256000, softcap=30.0, **MEAN, devices=CUDA),
    point("Qwen3 0.6B, 8192 tokens", shape=(8192, 1024), words=151936, **MEAN, devices=CUDA),
    point("GPT-2, 8 x 1024 tokens", shape=(8192, 768), words=50257, **MEAN, devices=CUDA),
    # First, for a short run: a processor without bfloat16 instructions takes minutes for the next two.
    point("MiniLM-L6, 64 tokens", shape=(64, 384), words=30522, **MEAN, devices=("cpu",), dtypes=(F32,)),
    point("MiniLM-L6, 256 tokens", shape=(256, 384), words=30522, bias=True, **MEAN, devices=("cpu",), dtypes=(F32,)),
    point("GPT-2, 64 tokens", shape=(64, 768), words=50257, **MEAN),
    point("BERT-base, 256 tokens", shape=(256, 768), words=30522, bias=True, **MEAN),
    dtypes=(BF16,),
)

cross_entropy_bench = grid(
    point("Llama 3.1 8B, 4096 tokens", shape=(4096, 128256), **MEAN, devices=CUDA, dtypes=(BF16, F32)),
    point("Gemma 2 9B, 1024 tokens", shape=(1024, 256000), softcap=30.0, **MEAN, devices=CUDA),
    point("Qwen3 0.6B, 4096 tokens", shape=(4096, 151936), z_loss=1e-4, **MEAN, devices=CUDA),
    point("GPT-2, 8 x 1024 tokens", shape=(8192, 50257), **MEAN, devices=CUDA),
    point("GPT-2, 64 tokens", shape=(64, 50257), **MEAN),
    point("GPT-2, 64 tokens", shape=(64, 50257), **MEAN, devices=("cpu",), dtypes=(F32,)),
    point("BERT-base, 256 tokens", shape=(256, 30522), label_smoothing=0.1, **MEAN),
    dtypes=(BF16,),
)

# In bytes: far from the 255 registers that it could have, ptxas keeps a value or two of a loop on the stack rather than
# lose a resident block. Which configurations are hit changes with its version; what is too large spills hundreds.
TOLERATED_SPILL_BYTES = 32
TENSOR_CORES = {"sm_80": "mma", "sm_90": "wgmma", "sm_100": "tcgen05", "sm_120": "mma"}

technique = Technique(
    name="linear-cross-entropy",
    title="Cross entropy of a linear layer, without its logits",
    paper="https://arxiv.org/abs/2411.09009",
    operations=[
        Operation(
            name="linear_cross_entropy",
            function=f"{HERE}:linear_cross_entropy",
            levels=LEVELS,
            budgets=LINEAR_BUDGETS,
            exemptions=LINEAR_EXEMPTIONS,
            inputs=linear_cross_entropy_inputs,
            cost=linear_cross_entropy_cost,
            test_grid=linear_cross_entropy_tests,
            bench_grid=linear_cross_entropy_bench,
            roles={"data": ("hidden",), "rows": ("target",)},
            averaged=losses_of_mean,
            real_input=linear_cross_entropy_real,
        ),
        Operation(
            name="cross_entropy",
            function=f"{HERE}:cross_entropy",
            levels=(*LEVELS, "cuda"),
            budgets=LOGITS_BUDGETS,
            exemptions=LOGITS_EXEMPTIONS,
            inputs=cross_entropy_inputs,
            cost=cross_entropy_cost,
            test_grid=cross_entropy_tests,
            bench_grid=cross_entropy_bench,
            roles={"data": ("logits",), "shift invariant": ("logits",), "rows": ("target",)},
            averaged=losses_of_mean,
            real_input=cross_entropy_real,
        ),
    ],
    levels=f"{HERE}.levels:LADDER",
    contracts={
        "_forward_kernel": KernelContract(TOLERATED_SPILL_BYTES, min_load_bits=128, matrix_instructions=TENSOR_CORES),
        # Target, sum and incoming gradient of a token are numbers of 64 and 32 bits, beside tiles in 128.
        "_gradient_kernel": KernelContract(
            TOLERATED_SPILL_BYTES, min_load_bits=64, min_store_bits=128, matrix_instructions=TENSOR_CORES
        ),
        # A token has a largest logit and a sum of each part of its row, of 32 bits.
        "_exponentials_kernel": KernelContract(
            TOLERATED_SPILL_BYTES, min_load_bits=64, min_store_bits=128, matrix_instructions=TENSOR_CORES
        ),
        # Exponentials are read in 128 bits; each program also reads six numbers of a token, which are few.
        "_from_exponentials_kernel": KernelContract(TOLERATED_SPILL_BYTES, max_registers=128, min_store_bits=128),
        "_join_kernel": KernelContract(max_registers=128),
        # The gradient of a bias of 30,522 words ends anywhere: no width is promised.
        "_scale_kernel": KernelContract(max_registers=128),
        # Rows of 50257 words begin anywhere: no width is promised.
        "_logits_forward_kernel": KernelContract(TOLERATED_SPILL_BYTES, max_registers=128),
        "_logits_backward_kernel": KernelContract(TOLERATED_SPILL_BYTES, max_registers=128),
    },
    replacements=f"{HERE}.replacements",
)
