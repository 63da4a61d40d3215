"""The operation of the softmax group."""

from __future__ import annotations

import torch
from torch import Tensor

from kernel_pytorch.harness.contracts import KernelContract
from kernel_pytorch.harness.technique import Case, Cost, Direction, Given, Operation, grid, point

from .common import BF16, CUDA, F16, F32, LOW, ONE, TOLERATED_SPILL_BYTES, WIDE_AND_HALF, bytes_of, data, normal, public

NEGATIVE = float("-inf")

AS_ROUNDED = (4.0, "makes the gradient of y as it was rounded, where the reference has kept what it was")
BUDGETS = dict.fromkeys(("triton", "cuda"), AS_ROUNDED)


def _causal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """What each position may look at: itself and what lies before it, `(Q, K)`."""
    return torch.ones(shape[-2:], dtype=torch.bool, device=generator.device).tril()


def _mask(case: Case, generator: torch.Generator) -> Tensor | None:
    """The mask of a case, of the kind and the shape that it names."""
    kind = case.sizes.get("mask")
    if kind is None:
        return None
    if kind == "causal":
        return _causal(case.shape, generator)
    shape = case.sizes.get("mask_shape", case.shape)
    if kind == "bool":
        kept = torch.rand(shape, generator=generator, device=generator.device) > 0.3
        kept[:1] = False  # a first row, or a first sentence, that may look at nothing
        return kept
    mask = normal(shape, case.sizes.get("mask_dtype", case.dtype), generator)
    if kind == "infinite":
        mask = mask.masked_fill(mask > 0.5, NEGATIVE)
        mask[:1] = NEGATIVE
    return mask


def softmax_inputs(case: Case, generator: torch.Generator) -> Given:
    """Give x `(*shape)`, scale, mask (broadcasts to the shape) or None."""
    return (data(case, generator), case.sizes.get("scale", 1.0), _mask(case, generator)), {}


def softmax_cost(case: Case, direction: Direction) -> Cost:
    """Forward: read x and mask, write y. Backward: read dy and y, write dx, and dmask where the mask is added.

    That takes a second launch.
    """
    kind = case.sizes.get("mask")
    x = y = bytes_of(case.shape, case.dtype)
    mask, added = 0, False
    if kind is not None:
        added = kind in ("added", "infinite")
        shape = case.shape[-2:] if kind == "causal" else case.sizes.get("mask_shape", case.shape)
        dtype = case.sizes.get("mask_dtype", case.dtype) if added else torch.bool
        mask = bytes_of(shape, dtype)
        if added:
            y = torch.Size(case.shape).numel() * max(case.dtype.itemsize, dtype.itemsize)
    elements = torch.Size(case.shape).numel()
    one = Cost(x + y + mask, elements * (6 + (kind is not None)), launches=1)
    two = Cost(2 * y + x + (mask if added else 0), 5 * elements, launches=1 + added)
    return direction.cost(one, two)


def softmax_real(activations: Tensor, dtype: torch.dtype) -> Given:
    """Scores that hidden states give one another: products of tokens, `(tokens, tokens)`, causal."""
    scores = (activations @ activations.T).to(dtype)
    return (scores, activations.shape[-1] ** -0.5, torch.ones_like(scores, dtype=torch.bool).tril()), {}


softmax_tests = grid(
    point("typical", shape=(61, 96), scale=0.125, core=True, reason="fits in one block with lanes to spare"),
    point("added mask", shape=(5, 2, 33, 40), mask="added", mask_shape=(33, 40), scale=0.3, core=True,
          reason="the mask has a gradient, summed over what it is broadcast over", dtypes=WIDE_AND_HALF),
    point("one column", shape=(7, 1), reason="y is one, dx zero", dtypes=ONE),
    point("one row", shape=(1, 257), reason="one more column than a power of two"),
    point("no rows", shape=(0, 64), mask="bool", mask_shape=(64,), reason="nothing to do", dtypes=ONE),
    point("many short rows", shape=(1031, 5), scale=3.0, reason="rows of a program are missing", dtypes=ONE),
    point("causal", shape=(2, 3, 17, 17), mask="causal", scale=0.125, reason="one mask for all heads"),
    point("padding", shape=(3, 2, 5, 40), mask="bool", mask_shape=(3, 1, 1, 40), scale=0.125, core=True,
          reason="a mask for each sentence, the first all padding: zeros", dtypes=ONE),
    point("mask of everything", shape=(6, 40), mask="infinite", scale=0.5, reason="-inf added, a row of them"),
    point("a bias for each head", shape=(3, 4, 5, 24), mask="added", mask_shape=(1, 4, 5, 24),
          reason="relative positions, learned: dmask summed over sentences", dtypes=WIDE_AND_HALF),
    point("a bias for each key", shape=(3, 4, 5, 24), mask="added", mask_shape=(3, 1, 1, 24),
          reason="summed over the dimensions in the middle", dtypes=ONE),
    point("a bias for each query", shape=(3, 4, 5, 24), mask="added", mask_shape=(4, 5, 1),
          reason="broadcast along the row: changes nothing, and has no gradient", dtypes=ONE),
    point("every other dimension", shape=(2, 3, 2, 3, 2, 9), mask="added", mask_shape=(2, 1, 2, 1, 2, 9),
          reason="more strides than the kernel takes: the mask is copied", dtypes=ONE),
    point("float32 mask", shape=(4, 5, 40), mask="added", mask_shape=(5, 40), mask_dtype=F32, scale=0.125,
          reason="y is float32, dx is not", dtypes=(F16, BF16)),
    point("float16 mask", shape=(4, 5, 40), mask="added", mask_shape=(5, 40), mask_dtype=F16, reason="widened",
          dtypes=ONE),
    point("two blocks", shape=(3, 16385), scale=2.0, core=True, reason="one column more than a block", dtypes=ONE),
    point("two blocks, masked", shape=(3, 16385), mask="bool", scale=2.0, reason="masked lanes", dtypes=(F16,)),
    point("very long rows", shape=(2, 131072), scale=4.0, reason="many blocks of a row", dtypes=ONE),
    dtypes=LOW,
)  # fmt: skip

softmax_bench = grid(
    point("BERT-base, 1 x 12 x 128", shape=(1, 12, 128, 128), scale=0.125, mask="bool", mask_shape=(1, 1, 1, 128)),
    point("BERT-base, 32 x 12 x 512", shape=(32, 12, 512, 512), scale=0.125, devices=CUDA, dtypes=(BF16, F32)),
    point("GPT-2 XL, 1 x 25 x 1024", shape=(1, 25, 1024, 1024), scale=0.125, mask="causal", devices=CUDA),
    point("Llama 3.1 8B, 1 x 32 x 4096", shape=(1, 32, 4096, 4096), scale=128**-0.5, mask="causal", devices=CUDA),
    point("T5-base, 8 x 12 x 512", shape=(8, 12, 512, 512), mask="added", mask_shape=(1, 12, 512, 512), devices=CUDA),
    point("Llama 3.1 8B, sampling 1", shape=(1, 128256), scale=1.25, dtypes=(F32,)),
    point("Llama 3.1 8B, sampling 256", shape=(256, 128256), scale=1.25, dtypes=(F32,), devices=CUDA),
    # Neither scale nor mask: what other libraries have kernels for.
    point("Qwen3 30B-A3B router, 16384 tokens", shape=(16384, 128), dtypes=(F32,), devices=CUDA),
    point("GPT-2 XL, sampling 256", shape=(256, 50257), dtypes=(F32,), devices=CUDA),
    dtypes=(BF16,),
)

OPERATIONS = [
    Operation(
        name="softmax",
        **public("softmax"),
        budgets=BUDGETS,
        inputs=softmax_inputs,
        cost=softmax_cost,
        test_grid=softmax_tests,
        bench_grid=softmax_bench,
        roles={"data": ("x",), "shift invariant": ("x",)},
        real_input=softmax_real,
    ),
]

CONTRACTS = {
    "_softmax_forward_kernel": KernelContract(
        max_spill_bytes=TOLERATED_SPILL_BYTES, max_registers=128, min_load_bits=128, min_store_bits=128
    ),
    "_softmax_forward_long_kernel": KernelContract(max_spill_bytes=TOLERATED_SPILL_BYTES, max_registers=128),
    # Both sums want y and dy in registers: on sm_120 ptxas parks three values of one small configuration.
    "_softmax_backward_kernel": KernelContract(
        max_spill_bytes=48, max_registers=128, min_load_bits=128, min_store_bits=128
    ),
    "_softmax_backward_long_kernel": KernelContract(max_spill_bytes=TOLERATED_SPILL_BYTES, max_registers=128),
    "_mask_gradient_kernel": KernelContract(max_registers=128),
}
