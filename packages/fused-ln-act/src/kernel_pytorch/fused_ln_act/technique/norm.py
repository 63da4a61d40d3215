"""The operations of the norm group."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernel_pytorch.fused_ln_act.rules.activations import FLOPS
from kernel_pytorch.harness.contracts import KernelContract
from kernel_pytorch.harness.exemptions import REDUCTIONS
from kernel_pytorch.harness.technique import Case, Cost, Direction, Exemption, Given, Grid, Operation, grid, point

from .common import (
    BENCH,
    BF16,
    CUDA,
    F16,
    F32,
    HALF,
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

EPS = 1e-5

NATIVE = "rounds after every kernel, and adds rows of the parameters' gradients one by one or in chains, not in a tree"
COMPILE = "TorchInductor adds the rows of the parameters' gradients one by one on the CPU, eager in a tree"
BUDGETS = {"native": (4.0, NATIVE), "compile": (4.0, COMPILE)}


def _parameter(case: Case, generator: torch.Generator, name: str) -> Tensor | None:
    """A weight around one or a bias around zero, as in trained models; None where the case has none."""
    if name in case.sizes.get("without", ()):
        return None
    parameter = normal(case.shape[-1:], torch.float32, generator) * 0.25 + (1.0 if name == "weight" else 0.0)
    return parameter.to(case.sizes.get("parameter_dtype", case.dtype))


def _given(function: str, case: Case, generator: torch.Generator) -> Given:
    """The arguments of a function: tensors by position, the rest by name."""
    tensors: list[Tensor | None] = [data(case, generator)]
    if function.startswith("add_"):
        tensors.append(data(case, generator).to(case.sizes.get("residual_dtype", case.dtype)))
    tensors += [_parameter(case, generator, name) for name in _parameters(function)]
    named: dict[str, Any] = {"eps": EPS}
    if function.endswith("_act"):
        named["activation"] = case.activation
    if function != "layer_norm":
        named |= {"dropout_p": case.sizes.get("dropout_p", 0.0), "seed": seed_of(case, generator)}
    return tuple(tensors), named


def _parameters(function: str) -> tuple[str, ...]:
    return ("weight",) if "rms_norm" in function else ("weight", "bias")


def _real(function: str, activations: Tensor, dtype: torch.dtype) -> Given:
    """Hidden states, with those of the neighbouring token as the residual stream."""
    case = Case("real", dtype, {"shape": tuple(activations.shape), "activation": "gelu"})
    tensors, named = _given(function, case, torch.Generator().manual_seed(0))
    x = activations.to(dtype)
    own = (x, x.roll(1, 0)) if function.startswith("add_") else (x,)
    return (*own, *tensors[len(own) :]), named


def _cost(function: str, case: Case, direction: Direction) -> Cost:
    """Compulsory traffic, arithmetic and launches.

    Forward: read x, write y; with a residual also read it and write h. Backward: read dy and x, write dx; with a
    residual read dy, dh and h, write dx, and dresidual too where dropout makes it another. The parameters are read each
    way, their gradients written. The last launch of the backward adds the shares of those; long rows take one launch
    for the shares and one for dx.
    """
    shape, dropout = case.shape, case.sizes.get("dropout_p", 0.0) > 0.0
    adds = function.startswith("add_")
    x = bytes_of(shape, case.dtype)
    residual = bytes_of(shape, case.sizes.get("residual_dtype", case.dtype)) if adds else 0
    h = max(x, residual)  # no case pairs float16 with bfloat16
    names = [name for name in _parameters(function) if name not in case.sizes.get("without", ())]
    parameters = len(names) * bytes_of(shape[-1:], case.sizes.get("parameter_dtype", case.dtype))
    forward_flops, backward_flops = FLOPS[case.sizes.get("activation", "identity")]
    elements = torch.Size(shape).numel()
    launches = 2 if shape[-1] <= 8192 else 3
    layer, extra = "layer_norm" in function, adds + dropout + ("bias" in names)
    one = Cost(
        x + residual + h + (h if adds else 0) + parameters,
        elements * ((7 if layer else 4) + extra + forward_flops),
        launches=1,
    )
    two = Cost(
        2 * h + (h if adds else 0) + x + (residual if dropout else 0) + 2 * parameters,
        elements * ((13 if layer else 10) + extra + backward_flops),
        launches=launches,
    )
    return direction.cost(one, two)


# The core cases are float32: adversarial inputs of 16 bits make rows of equal numbers, where PyTorch's own kernel on
# the CPU multiplies before it subtracts, and errs by a tenth; it also adds the gradients of parameters in 16 bits, so
# those cases have few rows. Tests plant these adversaries at all other levels.
layer_norm_tests = grid(
    point("typical", shape=(61, 96), core=True, reason="fits in one block with lanes to spare", dtypes=ONE),
    point("16 bits", shape=(13, 96), reason="rounded once", dtypes=HALF),
    point("one row", shape=(1, 257), reason="one more column than a power of two", dtypes=ONE),
    point("no rows", shape=(0, 64), reason="nothing to do, parameters' gradients all zero", dtypes=ONE),
    point("many short rows", shape=(1031, 16), reason="more rows than programs and tiles", dtypes=ONE),
    point("four dimensions", shape=(2, 3, 8, 40), reason="leading dimensions are collapsed", dtypes=ONE),
    point("no weight, no bias", shape=(61, 130), without=("weight", "bias"), reason="both are None", dtypes=ONE),
    point("no weight", shape=(61, 130), without=("weight",), reason="a bias alone", dtypes=ONE),
    point("no bias", shape=(61, 130), without=("bias",), reason="a weight alone", dtypes=ONE),
    point("float32 parameters", shape=(13, 100), parameter_dtype=F32, reason="master weights, y 16-bit", dtypes=HALF),
    point("two blocks", shape=(3, 16385), reason="one column more than the forward keeps in registers"),
    point("backward in blocks", shape=(3, 8193), reason="one column more than the backward keeps", dtypes=ONE),
    point("very long rows", shape=(2, 131072), reason="many blocks of a row", dtypes=ONE),
    dtypes=LOW,
)

add_layer_norm_tests = grid(
    # First, because the support table tests sharding, and a dropout mask depends on the position in the whole tensor.
    point("no dropout", shape=(61, 100), core=True, reason="dx is dresidual", dtypes=ONE),
    point("no dropout, float16", shape=(61, 100), reason="dx is dresidual", dtypes=(F16,)),
    point("typical", shape=(61, 96), core=True, dropout_p=0.1, reason="dx and dresidual differ", dtypes=ONE),
    point("16 bits", shape=(13, 96), dropout_p=0.1, reason="h is rounded before it is normalised", dtypes=HALF),
    point("odd columns", shape=(61, 33), dropout_p=0.5, reason="the last Philox of a row serves one", dtypes=ONE),
    point("float32 residual", shape=(13, 100), residual_dtype=F32, dropout_p=0.1, reason="h is float32", dtypes=HALF),
    point("long rows", shape=(2, 16500), dropout_p=0.1, reason="the sum is made in both walks", dtypes=WIDE_AND_HALF),
    dtypes=LOW,
)

layer_norm_act_tests = grid(
    point("gelu", shape=(61, 96), activation="gelu", core=True, reason="the error function"),
    point("gelu_tanh", shape=(61, 96), activation="gelu_tanh", reason="a sigmoid in the place of its tanh"),
    point("silu, dropout", shape=(61, 96), activation="silu", dropout_p=0.2, reason="dropout behind the activation"),
    point("relu", shape=(61, 100), activation="relu", reason="no derivative at zero"),
    point("relu_squared", shape=(61, 100), activation="relu_squared", reason="grows faster than its input"),
    point("quick_gelu", shape=(61, 100), activation="quick_gelu", reason="CLIP"),
    point("tanh", shape=(61, 100), activation="tanh", reason="made of exponentials and a fraction"),
    point("sigmoid", shape=(61, 100), activation="sigmoid", reason="never zero"),
    point("identity", shape=(61, 100), activation="identity", reason="no activation at all"),
    point("16 bits", shape=(13, 96), activation="gelu", reason="rounded once, behind the activation", dtypes=HALF),
    point("16 bits, dropout", shape=(13, 96), activation="tanh", dropout_p=0.2, reason="and the mask", dtypes=HALF),
    point("float32 parameters", shape=(13, 96), activation="gelu", parameter_dtype=F32, reason="as under autocast",
          dtypes=HALF),
    point("no parameters", shape=(61, 65), activation="gelu", without=("weight", "bias"), reason="both are None"),
    point("no rows", shape=(0, 64), activation="gelu", reason="nothing to do"),
    point("long rows", shape=(2, 16500), activation="gelu", dropout_p=0.1, reason="z is made again"),
    dtypes=ONE,
)  # fmt: skip

add_layer_norm_act_tests = grid(
    point("typical", shape=(61, 96), activation="gelu", core=True, reason="everything but dropout", dtypes=ONE),
    point("16 bits", shape=(13, 96), activation="gelu", reason="h is rounded, y is made of what it was", dtypes=HALF),
    point("dropout", shape=(61, 100), activation="gelu_tanh", dropout_p=0.3, reason="everything at once"),
    point("long rows", shape=(2, 16500), activation="silu", dropout_p=0.1, core=True, reason="everything, walked"),
    dtypes=ONE,
)

rms_norm_act_tests = grid(
    point("typical", shape=(61, 96), activation="silu", core=True, reason="no mean is subtracted", dtypes=ONE),
    point("dropout", shape=(61, 100), activation="relu_squared", dropout_p=0.1, reason="behind the activation"),
    point("float32 weight", shape=(13, 96), activation="silu", parameter_dtype=F32, reason="as under autocast",
          dtypes=HALF),
    point("no weight", shape=(61, 65), activation="gelu", without=("weight",), reason="weight is None", dtypes=ONE),
    point("long rows", shape=(2, 16500), activation="silu", reason="walked without a mean", dtypes=WIDE_AND_HALF),
    dtypes=LOW,
)  # fmt: skip

add_rms_norm_act_tests = grid(
    point("typical", shape=(61, 96), activation="silu", core=True, reason="no mean is subtracted", dtypes=ONE),
    point("dropout", shape=(61, 100), activation="quick_gelu", dropout_p=0.1, reason="dx and dresidual differ"),
    point("long rows", shape=(2, 8200), activation="silu", reason="the backward walks", dtypes=ONE),
    dtypes=LOW,
)

# On a CPU in float32: PyTorch's own LayerNorm in 16 bits errs there by more than any budget allows. And of 128 rows: it
# adds the parameters' gradients row by row, which for 1024 is seven times as far off as the reference's tree.
layer_norm_bench = grid(
    point("BERT-base, 1 x 128", shape=(128, 768), dtypes=(F32,)),
    point("BERT-base, 1 x 128", shape=(128, 768), devices=CUDA),
    point("BERT-base, 8 x 512", shape=(4096, 768), devices=CUDA),
    point("BERT-base, 128 x 512", shape=(65536, 768), devices=CUDA, dtypes=(BF16, F32)),
    point("GPT-2 XL, 1 x 128", shape=(128, 1600), dtypes=(F32,)),
    point("GPT-2 XL, 1 x 1024", shape=(1024, 1600), devices=CUDA),
    point("GPT-2 XL, 32 x 1024", shape=(32768, 1600), devices=CUDA),
    point("ViT-L/16, 64 x 577 tokens", shape=(36928, 1024), devices=CUDA),
    dtypes=BENCH,
)

add_layer_norm_bench = grid(
    point("BERT-base, 1 x 128", shape=(128, 768), dtypes=(F32,)),
    point("BERT-base, 1 x 128", shape=(128, 768), devices=CUDA),
    point("BERT-base, 128 x 512", shape=(65536, 768), devices=CUDA),
    point("GPT-2 XL, 32 x 1024", shape=(32768, 1600), devices=CUDA),
    dtypes=BENCH,
)

layer_norm_act_bench = grid(
    point("BERT-base head, 1 x 128", shape=(128, 768), activation="gelu", dtypes=(F32,)),
    point("BERT-base head, 1 x 128", shape=(128, 768), activation="gelu"),
    point("BERT-base head, 128 x 512", shape=(65536, 768), activation="gelu", devices=CUDA),
    point("ViT-L/16, 64 x 577 tokens", shape=(36928, 1024), activation="gelu_tanh", devices=CUDA),
    dtypes=BENCH,
)

add_layer_norm_act_bench = grid(
    point("GPT-2 XL, 1 x 128", shape=(128, 1600), activation="gelu_tanh", dtypes=(F32,)),
    point("GPT-2 XL, 1 x 128", shape=(128, 1600), activation="gelu_tanh"),
    point("GPT-2 XL, 32 x 1024", shape=(32768, 1600), activation="gelu_tanh", devices=CUDA),
    dtypes=BENCH,
)

rms_norm_act_bench = grid(
    point("Llama 3.1 8B, decode", shape=(1, 4096), activation="silu", dtypes=(F32,)),
    point("Llama 3.1 8B, decode", shape=(1, 4096), activation="silu"),
    point("Llama 3.1 8B, prefill 16384", shape=(16384, 4096), activation="silu", devices=CUDA),
    dtypes=BENCH,
)

add_rms_norm_act_bench = grid(
    point("Llama 3.1 8B, decode", shape=(1, 4096), activation="silu", dtypes=(F32,)),
    point("Llama 3.1 8B, decode", shape=(1, 4096), activation="silu"),
    point("Llama 3.1 8B, prefill 16384", shape=(16384, 4096), activation="silu", devices=CUDA),
    dtypes=BENCH,
)


def _operation(function: str, tests: Grid, bench: Grid) -> Operation:
    def inputs(case: Case, generator: torch.Generator) -> Given:
        """Give x `(*shape)`, residual `(*shape)`, weight and bias `(N,)` or None; eps, activation, dropout_p, seed."""
        return _given(function, case, generator)

    return Operation(
        name=function,
        **public(function),
        budgets=BUDGETS,
        exemptions=(Exemption(("batch invariance",), REDUCTIONS, ("reference",), devices=CUDA),),
        inputs=inputs,
        cost=lambda case, direction: _cost(function, case, direction),
        test_grid=tests,
        bench_grid=bench,
        roles={"data": ("x", "residual") if function.startswith("add_") else ("x",)},
        real_input=lambda activations, dtype: _real(function, activations, dtype),
    )


OPERATIONS = [
    _operation("layer_norm", layer_norm_tests, layer_norm_bench),
    _operation("add_layer_norm", add_layer_norm_tests, add_layer_norm_bench),
    _operation("layer_norm_act", layer_norm_act_tests, layer_norm_act_bench),
    _operation("add_layer_norm_act", add_layer_norm_act_tests, add_layer_norm_act_bench),
    _operation("rms_norm_act", rms_norm_act_tests, rms_norm_act_bench),
    _operation("add_rms_norm_act", add_rms_norm_act_tests, add_rms_norm_act_bench),
]

CONTRACTS = {
    "_forward_kernel": KernelContract(
        max_spill_bytes=TOLERATED_SPILL_BYTES, max_registers=128, min_load_bits=128, min_store_bits=128
    ),
    "_forward_long_kernel": KernelContract(max_spill_bytes=TOLERATED_SPILL_BYTES, max_registers=128),
    # One resident program of at most 16 warps is what its pipeline is made for: every register may be used.
    "_backward_kernel": KernelContract(max_spill_bytes=TOLERATED_SPILL_BYTES, min_load_bits=128, min_store_bits=128),
    "_backward_long_kernel": KernelContract(max_spill_bytes=TOLERATED_SPILL_BYTES, max_registers=128),
    "_parameter_shares_kernel": KernelContract(max_registers=128),
}
