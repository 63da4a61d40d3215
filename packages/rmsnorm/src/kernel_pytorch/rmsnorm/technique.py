"""The declaration: what this package offers the harness. Imports nothing but torch and the declaration's types."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernel_pytorch.harness.contracts import KernelContract
from kernel_pytorch.harness.technique import (
    Case,
    Cost,
    Direction,
    Exemption,
    Given,
    Operation,
    Technique,
    grid,
    point,
)

HERE = "kernel_pytorch.rmsnorm"
EPS = 1e-6


LEVELS = ("reference", "native", "torchscript", "compile", "triton", "cuda")
BUDGETS = {
    "native": (4.0, "the CUDA kernel of F.rms_norm adds the rows of dweight in long chains, not in a tree"),
    "compile": (4.0, "TorchInductor adds the rows of the weight gradient one by one on the CPU, eager in a tree"),
    "cuda": (4.0, "dweight adds rows in another order: of a few numbers the definition's happen to err less"),
}
WIDENED = (Exemption(("autocast",), "TorchScript's own autocast widens the sum to float32", ("torchscript",)),)


def _keywords(case: Case) -> dict[str, Any]:
    return {"eps": EPS, "offset": _offset(case), "casting": case.sizes.get("casting", "llama")}


def _offset(case: Case) -> float:
    return case.sizes.get("offset", 0.0)


def _weight(case: Case, shape: tuple[int, ...], generator: torch.Generator) -> Tensor | None:
    """Around one as in trained models, or around zero where an offset brings it back."""
    if not case.sizes.get("affine", True):
        return None
    weight = torch.randn(shape, generator=generator, device=generator.device) * 0.25 + (1.0 - _offset(case))
    return weight.to(case.sizes.get("weight_dtype", case.dtype))


def _data(case: Case, generator: torch.Generator) -> Tensor:
    return torch.randn(case.shape, generator=generator, device=generator.device).to(case.dtype)


def rms_norm_inputs(case: Case, generator: torch.Generator) -> Given:
    """Give x `(*shape)`, weight `(N,)` or None; eps, offset, casting."""
    return (_data(case, generator), _weight(case, case.shape[-1:], generator)), _keywords(case)


def add_rms_norm_inputs(case: Case, generator: torch.Generator) -> Given:
    """Give x `(*shape)`, residual `(*shape)`, weight `(N,)` or None; eps, offset, casting."""
    residual = _data(case, generator).to(case.sizes.get("residual_dtype", case.dtype))
    return (_data(case, generator), residual, _weight(case, case.shape[-1:], generator)), _keywords(case)


def head_rms_norm_inputs(case: Case, generator: torch.Generator) -> Given:
    """Give x `(..., H, D)`, weight `(H, D)`; eps, offset, casting."""
    return (_data(case, generator), _weight(case, case.shape[-2:], generator)), _keywords(case)


def _cost(case: Case, direction: Direction, weight_shape: tuple[int, ...], forward: int, backward: int) -> Cost:
    """Traffic of `forward` or `backward` passes over the data, plus the weight; four and eleven FLOPs an element."""
    elements = torch.Size(case.shape).numel()
    size = case.dtype.itemsize
    weight = torch.Size(weight_shape).numel() * case.sizes.get("weight_dtype", case.dtype).itemsize
    one = Cost(forward * elements * size + weight, 4 * elements, launches=1)
    # weight read, dweight written. The last launch adds the shares of dweight. Long rows take one for them and dx each,
    # and so do rows that are no multiple of 16 bytes, at level "cuda".
    launches = 2 if case.shape[-1] <= 8192 and case.shape[-1] * size % 16 == 0 else 3
    two = Cost(backward * elements * size + 2 * weight, 11 * elements, launches=launches)
    return direction.cost(one, two)


def rms_norm_cost(case: Case, direction: Direction) -> Cost:
    """Forward: read x, write y. Backward: read dy and x, write dx."""
    return _cost(case, direction, case.shape[-1:], forward=2, backward=3)


def add_rms_norm_cost(case: Case, direction: Direction) -> Cost:
    """Forward: read x and residual, write y and h. Backward: read dy, dh and h, write dx, which is dresidual too."""
    return _cost(case, direction, case.shape[-1:], forward=4, backward=4)


def head_rms_norm_cost(case: Case, direction: Direction) -> Cost:
    """As `rms_norm`, with one weight row a head."""
    return _cost(case, direction, case.shape[-2:], forward=2, backward=3)


def _real_weight(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return (1.0 + 0.25 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(dtype)


def rms_norm_real(activations: Tensor, dtype: torch.dtype) -> Given:
    """Hidden states as they are."""
    return (activations.to(dtype), _real_weight(activations.shape[-1:], dtype)), {"eps": EPS}


def add_rms_norm_real(activations: Tensor, dtype: torch.dtype) -> Given:
    """Hidden states, with those of the neighbouring token as the residual stream."""
    x = activations.to(dtype)
    return (x, x.roll(1, 0), _real_weight(activations.shape[-1:], dtype)), {"eps": EPS}


def head_rms_norm_real(activations: Tensor, dtype: torch.dtype) -> Given:
    """Hidden states seen as heads of 32, the model's own head size."""
    x = activations.to(dtype).unflatten(-1, (-1, 32))
    return (x, _real_weight(x.shape[-2:], dtype)), {"eps": EPS}


LOW = (torch.float32, torch.float16, torch.bfloat16)

rms_norm_tests = grid(
    point("typical", shape=(61, 96), core=True, reason="fits in one block with lanes to spare"),
    point("one column", shape=(7, 1), reason="mean of one number; dx cancels"),
    point("one row", shape=(1, 257), reason="one more column than a power of two"),
    point("no rows", shape=(0, 64), reason="nothing to do, weight gradient all zero"),
    point("many short rows", shape=(1031, 16), reason="more rows than programs and tiles; a prime number of them"),
    point("four dimensions", shape=(2, 3, 2, 40), reason="leading dimensions are collapsed"),
    point("no weight", shape=(4, 130), affine=False, reason="weight is None"),
    point("gemma", shape=(61, 100), casting="gemma", offset=1.0, core=True, reason="one rounding; weight around zero"),
    point("none", shape=(4, 100), casting="none", reason="every product rounded"),
    point("offset, llama", shape=(4, 100), offset=1.0, reason="offset + weight is rounded to the weight's dtype"),
    point("float32 weight", shape=(4, 100), weight_dtype=torch.float32, reason="master weights: y is float32"),
    point("bfloat16 weight", shape=(4, 100), weight_dtype=torch.bfloat16, dtypes=[torch.float32], reason="promoted"),
    point("two blocks", shape=(3, 16385), reason="one column more than the forward keeps in registers"),
    point("backward in blocks", shape=(3, 8193), reason="one column more than the backward keeps in registers"),
    point("very long rows", shape=(2, 262144), dtypes=[torch.float32], reason="the promised minimum"),
    dtypes=LOW,
)

add_rms_norm_tests = grid(
    point("typical", shape=(61, 96), core=True, reason="fits in one block with lanes to spare"),
    point("one column", shape=(7, 1), reason="mean of one number; dx cancels"),
    point("many short rows", shape=(515, 16), reason="more rows than programs and tiles"),
    point("no weight", shape=(2, 3, 65), affine=False, reason="weight is None"),
    point("gemma", shape=(4, 100), casting="gemma", offset=1.0, reason="one rounding; weight around zero"),
    point("float32 residual", shape=(4, 100), residual_dtype=torch.float32, reason="the sum is float32"),
    point("long rows", shape=(2, 20000), reason="the sum is stored in the first walk and used in the second"),
    dtypes=LOW,
)

head_rms_norm_tests = grid(
    point("typical", shape=(31, 4, 64), core=True, reason="heads a power of two"),
    point("one head", shape=(5, 1, 64), reason="the same as rms_norm"),
    point("three heads", shape=(2, 7, 3, 33), reason="no size a power of two"),
    point("no tokens", shape=(0, 2, 8), reason="nothing to do, weight gradient all zero"),
    point("long heads", shape=(2, 2, 17000), reason="rows are walked in blocks, weights per head"),
    point("gemma", shape=(6, 4, 32), casting="gemma", offset=1.0, reason="one rounding; weight around zero"),
    dtypes=LOW,
)

CUDA, CPU = ("cuda",), ("cpu",)
BENCH = (torch.bfloat16,)
BOTH = (torch.bfloat16, torch.float32)

rms_norm_bench = grid(
    point("Llama 3.1 8B, decode", shape=(1, 4096)),
    point("Llama 3.1 8B, prefill 512", shape=(512, 4096)),
    point("Llama 3.1 8B, prefill 512", shape=(512, 4096), devices=CPU, dtypes=(torch.float32,)),
    point("Llama 3.1 8B, prefill 2048", shape=(2048, 4096)),
    point("Llama 3.1 8B, prefill 16384", shape=(16384, 4096), devices=CUDA, dtypes=BOTH),
    point("Qwen3 0.6B, prefill 2048", shape=(2048, 1024)),
    point("Qwen3 0.6B, prefill 32768", shape=(32768, 1024), devices=CUDA),
    point("Gemma 2 9B, prefill 1024", shape=(1024, 3584), casting="gemma", offset=1.0),
    point("Gemma 2 9B, prefill 16384", shape=(16384, 3584), casting="gemma", offset=1.0, devices=CUDA),
    point("DeepSeek-V3, decode 64", shape=(64, 7168)),
    point("DeepSeek-V3, prefill 8192", shape=(8192, 7168), devices=CUDA),
    dtypes=BENCH,
)

add_rms_norm_bench = grid(
    point("Llama 3.1 8B, decode", shape=(1, 4096)),
    point("Llama 3.1 8B, prefill 512", shape=(512, 4096)),
    point("Llama 3.1 8B, prefill 512", shape=(512, 4096), devices=CPU, dtypes=(torch.float32,)),
    point("Llama 3.1 8B, prefill 16384", shape=(16384, 4096), devices=CUDA),
    point("DeepSeek-V3, prefill 8192", shape=(8192, 7168), devices=CUDA),
    dtypes=BENCH,
)

head_rms_norm_bench = grid(
    point("Qwen3 0.6B queries, decode", shape=(1, 16, 128)),
    point("Qwen3 0.6B queries, prefill 1024", shape=(1024, 16, 128)),
    point("Qwen3 0.6B queries, prefill 1024", shape=(1024, 16, 128), devices=CPU, dtypes=(torch.float32,)),
    point("Qwen3 0.6B keys, prefill 1024", shape=(1024, 8, 128)),
    point("Qwen3 0.6B queries, prefill 32768", shape=(32768, 16, 128), devices=CUDA),
    dtypes=BENCH,
)

# In bytes: far from the 255 registers that it could have, ptxas keeps a value or two of a loop on the stack rather than
# lose a resident block. Which configurations are hit changes with its version; what is too large spills hundreds.
TOLERATED_SPILL_BYTES = 32

technique = Technique(
    name="rmsnorm",
    title="RMSNorm, with residual add, and per head",
    paper="https://arxiv.org/abs/1910.07467",
    operations=[
        Operation(
            name="rms_norm",
            function=f"{HERE}:rms_norm",
            levels=LEVELS,
            budgets=BUDGETS,
            inputs=rms_norm_inputs,
            cost=rms_norm_cost,
            test_grid=rms_norm_tests,
            bench_grid=rms_norm_bench,
            roles={"data": ("x",)},
            real_input=rms_norm_real,
        ),
        Operation(
            name="add_rms_norm",
            function=f"{HERE}:add_rms_norm",
            levels=LEVELS,
            budgets=BUDGETS,
            exemptions=WIDENED,
            inputs=add_rms_norm_inputs,
            cost=add_rms_norm_cost,
            test_grid=add_rms_norm_tests,
            bench_grid=add_rms_norm_bench,
            roles={"data": ("x", "residual")},
            real_input=add_rms_norm_real,
        ),
        Operation(
            name="head_rms_norm",
            function=f"{HERE}:head_rms_norm",
            levels=LEVELS,
            budgets=BUDGETS,
            inputs=head_rms_norm_inputs,
            cost=head_rms_norm_cost,
            test_grid=head_rms_norm_tests,
            bench_grid=head_rms_norm_bench,
            roles={"data": ("x",)},
            real_input=head_rms_norm_real,
        ),
    ],
    levels=f"{HERE}.levels:LADDER",
    contracts={
        "_forward_kernel": KernelContract(max_registers=128, min_load_bits=128, min_store_bits=128),
        "_forward_long_kernel": KernelContract(max_spill_bytes=TOLERATED_SPILL_BYTES, max_registers=128),
        # One resident program of at most 16 warps is what its pipeline is made for: every register may be used.
        "_backward_kernel": KernelContract(min_load_bits=128, min_store_bits=128),
        "_backward_long_kernel": KernelContract(max_spill_bytes=TOLERATED_SPILL_BYTES, max_registers=128),
        "_weight_shares_kernel": KernelContract(max_registers=128),
        # It stores the sum over a tile: one row, too short for wide stores.
        "_add_shares_kernel": KernelContract(max_registers=128, min_load_bits=128),
    },
    replacements=f"{HERE}.replacements",
)
