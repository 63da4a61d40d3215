"""What the declarations of all operations share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernel_pytorch.harness.technique import Case
from kernel_pytorch.qkv_fusion.levels import LADDER

PACKAGE = "kernel_pytorch.qkv_fusion"
CUDA = ("cuda",)
EPS = 1e-6
THETA = 10000.0
LOW = (torch.float32, torch.float16, torch.bfloat16)
SOME = (torch.float32, torch.float16)  # of what is no core case: float16 is what the interpreter computes rightly
BENCH = (torch.bfloat16,)
BOTH = (torch.bfloat16, torch.float32)


def public(function: str) -> dict[str, Any]:
    """The public function of that name and its levels, as fields of an operation."""
    return {"function": f"{PACKAGE}:{function}", "levels": LADDER.levels(function)}


def data(shape: tuple[int, ...], case: Case, generator: torch.Generator) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(shape, generator=generator, device=generator.device).to(case.dtype)


def keys_shape(case: Case) -> tuple[int, ...]:
    """Shape of the keys where queries are `(..., S, H, D)`."""
    return (*case.shape[:-2], case.sizes["k_heads"], case.shape[-1])


def tables(case: Case, tokens: tuple[int, ...], rotated: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions from `case.start` on, `(S, R/2)`.

    Where the case is `batched`, every sequence has a table, `(..., S, R/2)`; where it has `positions`, S is that.
    """
    shape: tuple[int, ...] = tokens if case.sizes.get("batched", False) else tokens[-1:]
    if "positions" in case.sizes:
        shape = (case.sizes["positions"],)
    places = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape) + case.sizes.get("start", 0)
    angles = places.unsqueeze(-1) * THETA ** (-torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)
    dtype = case.sizes.get("table_dtype", torch.float32)
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def position_ids(case: Case, tokens: tuple[int, ...], generator: torch.Generator) -> dict[str, Any]:
    """The keyword of that name, where a case has `positions`."""
    if "positions" not in case.sizes:
        return {}
    drawn = torch.randint(case.sizes["positions"], tokens, generator=generator, device=generator.device)
    return {"position_ids": drawn}


def table_bytes(case: Case, tokens: tuple[int, ...], rotated: int) -> int:
    """Bytes that one read of cosines and sines moves: with `positions`, at most one row per token."""
    shape = tokens if case.sizes.get("batched", False) or "positions" in case.sizes else tokens[-1:]
    return torch.Size(shape).numel() * rotated * case.sizes.get("table_dtype", torch.float32).itemsize


def rotated(case: Case, columns: int) -> int:
    """How many columns of a head are rotated."""
    return case.sizes.get("rotated", columns)


def norm_weights(case: Case, columns: int, generator: torch.Generator) -> list[Tensor]:
    """Norm weights of queries and of keys: around one as in trained models, or around zero where an offset is added."""
    around, dtype = 1.0 - case.sizes.get("offset", 0.0), case.sizes.get("weight_dtype", case.dtype)
    drawn = [torch.randn(columns, generator=generator, device=generator.device) for _ in range(2)]
    return [(each * 0.25 + around).to(dtype) for each in drawn]


def real_heads(activations: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states seen as heads of 32, the model's own head size, and the angles of their positions."""
    x = activations.to(dtype).unflatten(-1, (-1, 32))
    return x, *tables(Case("real", dtype, {"shape": tuple(x.shape)}), tuple(x.shape[:-2]), 32, x.device)
