"""A technique whose kernels are wrong on purpose, each in one way, and one whose kernels are right.

Triton reads a kernel's source from its file, so these live in one. `test_static.py` installs them as two techniques.
"""

from typing import ClassVar

import torch
import triton
import triton.language as tl

from kernel_pytorch.harness.contracts import KernelContract
from kernel_pytorch.harness.technique import (
    Cost,
    Implementation,
    Level,
    Operation,
    Technique,
    grid,
    point,
)


@triton.jit
def _scale_kernel(x_ptr, y_ptr, scale, elements, BLOCK: tl.constexpr):
    """As it should be: wide, and whatever the type of scale is, float32."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + index, mask=index < elements).to(tl.float32)
    tl.store(y_ptr + index, (x * scale.to(tl.float32)).to(y_ptr.dtype.element_ty), mask=index < elements)


@triton.jit
def _spilling_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    """One warp holds 256 numbers a thread until it knows their sum."""
    index = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + index)
    tl.store(y_ptr + index, x - tl.sum(x, axis=0))


@triton.jit
def _rounding_kernel(x_ptr, y_ptr, SIZE: tl.constexpr):
    """A product of float32 in Triton's default precision, tf32."""
    index = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    x = tl.load(x_ptr + index)
    tl.store(y_ptr + index, tl.dot(x, x))


@triton.jit
def _promoting_kernel(x_ptr, y_ptr, scale, elements, BLOCK: tl.constexpr):
    """The sum of scalars is taken in the type that they came in."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + index, mask=index < elements)
    tl.store(y_ptr + index, x * (scale * scale + 1.0).to(tl.float32), mask=index < elements)


@triton.jit
def _narrow_kernel(x_ptr, y_ptr, elements, stride, BLOCK: tl.constexpr):
    """With a stride that is known only when it runs, nothing can be wide."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + index * stride, mask=index < elements)
    tl.store(y_ptr + index * stride, x, mask=index < elements)


@triton.jit
def _product_kernel(x_ptr, y_ptr, depth, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """x (M, depth) times x (depth, N): `wgmma` wants 64 rows, and every stage wants its tiles in shared memory."""
    row, column, inner = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :], tl.arange(0, K)
    total = tl.zeros([M, N], dtype=tl.float32)
    for start in range(0, depth, K):
        a = tl.load(x_ptr + row * depth + start + inner[None, :])
        b = tl.load(x_ptr + (start + inner[:, None]) * N + column)
        total = tl.dot(a, b, total)
    tl.store(y_ptr + row * N + column, total.to(y_ptr.dtype.element_ty))


@triton.jit
def _hoarding_kernel(x_ptr, y_ptr, depth, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """`_product_kernel` under a name of its own."""
    _product_kernel(x_ptr, y_ptr, depth, M, N, K)


@triton.jit
def _rare_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    """Launched by one case alone, which is neither core nor bench."""
    index = tl.arange(0, BLOCK)
    tl.store(y_ptr + index, tl.load(x_ptr + index))


@triton.jit
def _broken_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    """Does not compile: there are no ranges of three."""
    index = tl.arange(0, BLOCK)
    tl.store(y_ptr + index, tl.load(x_ptr + index))


def reference(x):
    return x.clone()


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        y = torch.empty_like(x)
        _scale_kernel[(triton.cdiv(x.numel(), 1024),)](x, y, scale, x.numel(), BLOCK=1024)
        return y

    @staticmethod
    def backward(ctx, dy):
        dx = torch.empty_like(dy)
        _scale_kernel[(triton.cdiv(dy.numel(), 512),)](dy, dx, ctx.scale, dy.numel(), BLOCK=512)
        return dx, None


def scale(x):
    if x.numel() == 7:
        _rare_kernel[(1,)](x, x, BLOCK=1)
    return Scale.apply(x, 2.5)


def spilling(x):
    _spilling_kernel[(1,)](x, x, BLOCK=8192, num_warps=1)
    return x.detach()


def rounding(x):
    _rounding_kernel[(1,)](x, x, SIZE=32)
    return x.detach()


def promoting(x):
    _promoting_kernel[(1,)](x, x, 2.5, x.numel(), BLOCK=1024)
    return x.detach()


def narrow(x):
    _narrow_kernel[(1,)](x, x, x.numel(), 3, BLOCK=1024)
    return x.detach()


def missing(x):
    _product_kernel[(1,)](x.half(), x.half(), 4096, M=16, N=64, K=64, num_warps=4)
    return x.detach()


def hoarding(x):
    _hoarding_kernel[(1,)](x.half(), x.half(), 4096, M=128, N=256, K=64, num_warps=8, num_stages=6)
    return x.detach()


def broken(x):
    _broken_kernel[(1,)](x, x, BLOCK=3)
    return x.detach()


def raising(x):
    raise RuntimeError("on purpose")


def refusing(x):
    raise NotImplementedError("a kernel for another case")


class Picky(Implementation):
    """One of several kernels, which may say no."""

    partial: ClassVar[bool] = True


def inputs(case, generator):
    """Give x (*shape)."""
    return (torch.randn(case.shape, generator=generator, device=generator.device).to(case.dtype),), {}


def operation(name):
    return Operation(
        name=name,
        levels=[
            Implementation("reference", Level.REFERENCE, "planted_kernels:reference"),
            Implementation("triton", Level.TRITON, f"planted_kernels:{name}"),
            Picky("picky", Level.TRITON, "planted_kernels:refusing"),
        ],
        inputs=inputs,
        cost=lambda case, direction: Cost(0),
        test_grid=grid(
            point("typical", shape=(64, 64), core=True),
            point("seven", shape=(7,)),
            point("six", shape=(6,)),
            dtypes=[torch.float32],
        ),
        bench_grid=grid(point("large", shape=(512, 512)), dtypes=[torch.float32]),
    )


def technique(name, operations, contracts):
    return Technique(
        name=name,
        title=name,
        paper="",
        operations=[operation(each) for each in operations],
        levels="planted_kernels",
        contracts=contracts,
    )


right = technique("right", ["scale"], {"_scale_kernel": KernelContract(min_load_bits=128, min_store_bits=128)})
wrong = technique(
    "wrong",
    ["scale", "spilling", "rounding", "promoting", "narrow", "missing", "hoarding", "broken", "raising"],
    {
        "_scale_kernel": KernelContract(max_registers=8),
        "_narrow_kernel": KernelContract(min_load_bits=128, min_store_bits=128),
        "_product_kernel": KernelContract(matrix_instructions={"sm_90": "wgmma"}),
        "_absent_kernel": KernelContract(),
    },
)
