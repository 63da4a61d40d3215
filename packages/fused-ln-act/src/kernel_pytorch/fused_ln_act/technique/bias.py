"""The operations of the bias group."""

from __future__ import annotations

import torch
from torch import Tensor

from kernel_pytorch.fused_ln_act.rules.activations import FLOPS
from kernel_pytorch.harness.contracts import KernelContract
from kernel_pytorch.harness.technique import Case, Cost, Direction, Exemption, Given, Operation, grid, point

from .common import (
    BENCH,
    BF16,
    CPU,
    CUDA,
    F16,
    F32,
    GELU_OF_INFINITY,
    LOW,
    ONE,
    TOLERATED_SPILL_BYTES,
    WIDE_AND_HALF,
    bytes_of,
    data,
    normal,
    public,
    seed_of,
)

NATIVE = "rounds after every kernel; and the CUDA kernels add rows of the bias's gradient in chains, not a tree"
COMPILE = "TorchInductor adds the rows of the bias's gradient one by one on the CPU, eager in a tree"
BUDGETS = {"native": (4.0, NATIVE), "compile": (4.0, COMPILE)}
# TorchScript supports selective checkpointing if it saves nothing: nothing requests tensors from the second forward.
NOTHING_SAVED = (Exemption(("selective checkpointing",), None, ("torchscript",)),)


def _bias(case: Case, generator: torch.Generator) -> Tensor | None:
    if not case.sizes.get("biased", True):
        return None
    return normal(case.shape[-1:], case.sizes.get("bias_dtype", case.dtype), generator)


def bias_act_inputs(case: Case, generator: torch.Generator) -> Given:
    """Give x `(*shape)`, bias `(N,)` or None, activation."""
    return (data(case, generator), _bias(case, generator), case.activation), {}


def bias_dropout_add_inputs(case: Case, generator: torch.Generator) -> Given:
    """Give x `(*shape)`, bias `(N,)` or None, residual `(*shape)`; p, seed."""
    residual = data(case, generator).to(case.sizes.get("residual_dtype", case.dtype))
    p, seed = case.sizes.get("dropout_p", 0.0), seed_of(case, generator)
    return (data(case, generator), _bias(case, generator), residual), {"p": p, "seed": seed}


def _bias_bytes(case: Case) -> int:
    return bytes_of(case.shape[-1:], case.sizes.get("bias_dtype", case.dtype)) if case.sizes.get("biased", True) else 0


def bias_act_cost(case: Case, direction: Direction) -> Cost:
    """Forward: read x, write y. Backward: read dy and x, write dx, or with "identity" read dy, which is dx.

    The bias is read each way, its gradient written. The last launch of the backward adds the shares of that.
    """
    x, bias = bytes_of(case.shape, case.dtype), _bias_bytes(case)
    value, slope = FLOPS[case.activation]
    elements = torch.Size(case.shape).numel()
    one = Cost(2 * x + bias, elements * (value + (bias > 0)), launches=1)
    passes = 1 if case.activation == "identity" else 3
    launches = 2 if bias else 1
    two = Cost(passes * x + 2 * bias, elements * (slope + 1 + (bias > 0)), launches=launches)
    return direction.cost(one, two)


def bias_dropout_add_cost(case: Case, direction: Direction) -> Cost:
    """Forward: read x and residual, write y. Backward: read dy, which is dresidual, and with dropout write dx.

    The bias is read, its gradient written. The last launch of the backward adds the shares of that.
    """
    x, bias = bytes_of(case.shape, case.dtype), _bias_bytes(case)
    residual = bytes_of(case.shape, case.sizes.get("residual_dtype", case.dtype))
    y = max(x, residual)  # no case pairs float16 with bfloat16
    drops = case.sizes.get("dropout_p", 0.0) > 0.0
    elements = torch.Size(case.shape).numel()
    one = Cost(x + residual + y + bias, elements * (1 + drops + (bias > 0)), launches=1)
    two = Cost(y + (x if drops else 0) + bias, elements * (drops + (bias > 0)), launches=2 if bias else 1)
    return direction.cost(one, two)


def _real_bias(activations: Tensor, dtype: torch.dtype) -> Tensor:
    return normal(activations.shape[-1:], dtype, torch.Generator().manual_seed(0))


def bias_act_real(activations: Tensor, dtype: torch.dtype) -> Given:
    """Hidden states as they are."""
    return (activations.to(dtype), _real_bias(activations, dtype), "gelu"), {}


def bias_dropout_add_real(activations: Tensor, dtype: torch.dtype) -> Given:
    """Hidden states, with those of the neighbouring token as the residual stream."""
    x = activations.to(dtype)
    return (x, _real_bias(activations, dtype), x.roll(1, 0)), {"p": 0.1, "seed": torch.tensor(7, device=x.device)}


bias_act_tests = grid(
    point("gelu", shape=(61, 96), activation="gelu", core=True, reason="the last block of columns has lanes to spare"),
    point("one column", shape=(7, 1), activation="relu_squared", reason="as narrow as it gets", dtypes=ONE),
    point("one row", shape=(1, 257), activation="gelu", reason="a single share: dbias itself", dtypes=WIDE_AND_HALF),
    point("no rows", shape=(0, 64), activation="gelu", reason="nothing to do, dbias all zero", dtypes=ONE),
    point("many short rows", shape=(1031, 16), activation="silu", reason="more rows than tiles at once", dtypes=ONE),
    point("four dimensions", shape=(2, 3, 2, 40), activation="silu", reason="leading dimensions collapse", dtypes=ONE),
    point("long rows", shape=(3, 5000), activation="gelu", reason="more blocks of columns than programs", dtypes=ONE),
    point("512 rows", shape=(512, 96), activation="gelu", reason="one program adds as many rows of the bias gradient",
          dtypes=ONE),
    point("no bias", shape=(5, 100), activation="gelu", biased=False, reason="the activation alone"),
    point("float32 bias", shape=(29, 100), activation="gelu", bias_dtype=F32, reason="master weights, y float16",
          dtypes=(F16, BF16)),
    point("gelu_tanh", shape=(29, 100), activation="gelu_tanh", reason="tanh where gelu has the error function"),
    point("silu", shape=(29, 100), activation="silu", reason="exponentials of both signs"),
    point("relu", shape=(5, 100), activation="relu", reason="no derivative at zero", dtypes=ONE),
    point("relu_squared", shape=(5, 100), activation="relu_squared", reason="grows faster than its input"),
    point("relu_squared, no bias", shape=(5, 100), activation="relu_squared", biased=False, reason="as Nemotron has it",
          dtypes=ONE),
    point("quick_gelu", shape=(5, 100), activation="quick_gelu", reason="CLIP", dtypes=WIDE_AND_HALF),
    point("tanh", shape=(5, 100), activation="tanh", reason="made of exponentials", dtypes=WIDE_AND_HALF),
    point("sigmoid", shape=(5, 100), activation="sigmoid", reason="never zero", dtypes=ONE),
    point("identity", shape=(61, 100), activation="identity", core=True, reason="dx is dy: dbias alone", dtypes=ONE),
    dtypes=LOW,
)  # fmt: skip

bias_dropout_add_tests = grid(
    # First, because the support table tests sharding, and a dropout mask depends on the position in the whole tensor.
    point("no dropout", shape=(61, 96), core=True, reason="dx is dy: only dbias is computed", dtypes=ONE),
    point("dropout", shape=(61, 96), dropout_p=0.1, core=True, reason="dx and dresidual differ by the mask"),
    point("odd columns", shape=(9, 33), dropout_p=0.5, reason="four neighbours share one Philox",
          dtypes=WIDE_AND_HALF),
    point("512 rows", shape=(512, 96), reason="one program adds as many rows of the bias gradient", dtypes=ONE),
    point("no bias", shape=(5, 100), dropout_p=0.3, biased=False, reason="dropout and sum alone"),
    point("nothing but the sum", shape=(5, 100), biased=False, reason="the backward computes nothing", dtypes=ONE),
    point("float32 residual", shape=(4, 100), dropout_p=0.1, residual_dtype=F32, reason="dy is float32, dx is not",
          dtypes=(F16, BF16)),
    point("no rows", shape=(0, 64), dropout_p=0.1, reason="nothing to do", dtypes=ONE),
    point("long rows", shape=(3, 5000), dropout_p=0.9, reason="few are kept, in many blocks of columns", dtypes=ONE),
    dtypes=LOW,
)  # fmt: skip

bias_act_bench = grid(
    point("BERT-base MLP, 1 x 128", shape=(128, 3072), activation="gelu", dtypes=(BF16, F32)),
    point("BERT-base MLP, 128 x 512", shape=(65536, 3072), activation="gelu", devices=CUDA, dtypes=(BF16, F32)),
    point("GPT-2 XL MLP, 1 x 128", shape=(128, 6400), activation="gelu_tanh"),
    point("GPT-2 XL MLP, 1 x 1024", shape=(1024, 6400), activation="gelu_tanh", devices=CUDA),
    point("GPT-2 XL MLP, 32 x 1024", shape=(32768, 6400), activation="gelu_tanh", devices=CUDA),
    point("ViT-L/16 MLP, 64 x 577 tokens", shape=(36928, 4096), activation="gelu", devices=CUDA),
    point(
        "Nemotron-4 15B MLP, 4096 tokens", shape=(4096, 24576), activation="relu_squared", biased=False, devices=CUDA
    ),
    dtypes=BENCH,
)

bias_dropout_add_bench = grid(
    point("BERT-base, 1 x 128", shape=(128, 768), dropout_p=0.1),
    point("BERT-base, 1 x 128", shape=(128, 768), dropout_p=0.1, devices=CPU, dtypes=(F32,)),
    point("BERT-base, 128 x 512", shape=(65536, 768), dropout_p=0.1, devices=CUDA),
    point("GPT-2 XL, 32 x 1024", shape=(32768, 1600), dropout_p=0.1, devices=CUDA),
    dtypes=BENCH,
)

OPERATIONS = [
    Operation(
        name="bias_act",
        **public("bias_act"),
        budgets=BUDGETS,
        inputs=bias_act_inputs,
        cost=bias_act_cost,
        test_grid=bias_act_tests,
        bench_grid=bias_act_bench,
        roles={"data": ("x",)},
        exemptions=(GELU_OF_INFINITY,),
        real_input=bias_act_real,
    ),
    Operation(
        name="bias_dropout_add",
        **public("bias_dropout_add"),
        budgets=BUDGETS,
        exemptions=NOTHING_SAVED,
        inputs=bias_dropout_add_inputs,
        cost=bias_dropout_add_cost,
        test_grid=bias_dropout_add_tests,
        bench_grid=bias_dropout_add_bench,
        roles={"data": ("x", "residual")},
        real_input=bias_dropout_add_real,
    ),
]

CONTRACTS = {
    # With few elements, a thread loads four, and as few as two of the bias: more threads wait for less memory each.
    "_bias_forward_kernel": KernelContract(max_registers=128, min_load_bits=32, min_store_bits=64),
    # A few resident programs of few warps are what its pipeline is made for: every register may be used.
    "_bias_backward_kernel": KernelContract(
        max_spill_bytes=TOLERATED_SPILL_BYTES, min_load_bits=128, min_store_bits=128
    ),
}
