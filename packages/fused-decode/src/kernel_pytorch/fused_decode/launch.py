"""Launches of the kernels of a decoding step, into memory that the caller may give: what the decoder captures.

The public functions allocate their results; a captured step writes into memory that it keeps, has one `Workspace`, and
asks for programmatic dependent launch (`pdl`). What a call computes is the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._core.device import on_device
from ._core.sizes import cdiv, exceeds_int32, next_power_of_2
from .decoder.sampling import CANDIDATES, STEPS, Sampling
from .kernels import configurations
from .kernels.attention import attention_kernel
from .kernels.draw import draw_kernel
from .kernels.greedy import greedy_kernel
from .kernels.linear import rows_kernel, vector_kernel
from .kernels.rows import add_norm_kernel, embed_kernel

MOST_ROWS = 16

Given = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""What a product reads and writes: x, weight, out, norm_weight, norm_bias, bias, residual."""


class Workspace:
    """Scratch memory of kernels that split their sums: partial sums, and counters that are 0 between launches.

    Two streams must not share one. It grows at the first call that needs more, so a step runs once before it is
    captured; captured launches keep the memory that they were captured with.

    Args:
        device: of the tensors.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.partials = torch.empty(0, dtype=torch.float32, device=device)
        self.counters = torch.zeros(0, dtype=torch.int32, device=device)
        self._kept: list[Tensor] = []

    def reserve(self, partials: int, counters: int) -> tuple[Tensor, Tensor]:
        """Have at least so many float32 partial sums and int32 counters, and return both tensors."""
        if self.partials.numel() < partials:
            self._kept.append(self.partials)
            self.partials = self.partials.new_empty(partials)
        if self.counters.numel() < counters:
            self._kept.append(self.counters)
            self.counters = self.counters.new_zeros(next_power_of_2(counters))
        return self.partials, self.counters

    def of_shares(self, tiles: int, splits: int, columns: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Partial sums and sums of squares of the shares of tiles `(columns, rows)`, and a counter of each tile.

        One share needs no counters, and so no kernel that clears them.
        """
        sums = tiles * splits * columns * rows if splits > 1 else 0
        partials, counters = self.reserve(sums + tiles * splits * rows, tiles if splits > 1 else 0)
        return partials, partials[sums:], counters


def _options(pdl: bool) -> dict[str, bool]:
    return {"launch_pdl": True} if pdl else {}


def project(
    x: Tensor, weight: Tensor, out: Tensor | None = None, *, norm: str | None = None,
    norm_weight: Tensor | None = None, norm_bias: Tensor | None = None, norm_offset: float = 0.0, eps: float = 1e-6,
    bias: Tensor | None = None, gated: str | None = None, residual: Tensor | None = None, softcap: float | None = None,
    workspace: Workspace | None = None, pdl: bool = False,
) -> Tensor:  # fmt: skip
    """`norm(x) @ weight.T + bias`, gated, plus a residual, capped: each part is optional.

    Args:
        x: `(rows, K)`, contiguous, 1 to 16 rows.
        weight: `(N, K)`, contiguous; `(2 N, K)` when gated, the rows of the gate first.
        out: `(rows, N)`, contiguous; it may be `residual`.
        norm: "rms", `x * rsqrt(mean(x^2) + eps) * (norm_offset + norm_weight)`, or "layer".
        norm_weight: `(K,)`; so is `norm_bias`, of "layer" alone.
        bias: `(N,)`, or `(2 N,)` when gated.
        gated: "silu", "gelu" or "gelu_tanh": `act(first half) * second half`.
        residual: `(rows, N)`, contiguous.
        softcap: `softcap * tanh(y / softcap)`, last.
        workspace: scratch memory; None: memory of this call.
        pdl: launch before the kernel ahead has ended: compute capability 9.0 and later.
    """
    n = weight.shape[0] // (2 if gated else 1)
    if out is None:
        out = x.new_empty(x.shape[0], n)
    constants = {
        "NORM": norm or "none", "OFFSET": norm_offset, "EPS": eps, "GATED": gated or "none", "SOFTCAP": softcap or 0.0,
        "HAS_BIAS": bias is not None, "HAS_RESIDUAL": residual is not None, "PDL": pdl,
    }  # fmt: skip
    given = (x, weight, out, norm_weight, norm_bias, bias, residual)
    with on_device(x):
        if x.shape[0] <= configurations.VECTOR_ROWS:
            _vector(given, n, constants)
        elif takes_ring(x, weight, norm):
            _ring(given, n, constants, workspace or Workspace(x.device))
        else:
            _rows(given, n, constants, workspace or Workspace(x.device))
    return out


def _vector(given: Given, n: int, constants: dict[str, Any]) -> None:
    x, weight, *_ = given
    m, k = x.shape
    c = configurations.vector(n, k, constants["GATED"] != "none", x.device)
    vector_kernel[(cdiv(n, c.columns),)](
        *given, m, n,
        K=k, ROWS=next_power_of_2(m), COLUMNS=c.columns, BLOCK=c.block, HAS_NORM_BIAS=given[4] is not None,
        LONG_OFFSETS=exceeds_int32(weight), **constants, num_warps=c.warps, **_options(constants["PDL"]),
    )  # fmt: skip


def _rows(given: Given, n: int, constants: dict[str, Any], workspace: Workspace) -> None:
    x, weight, *_ = given
    m, k = x.shape
    c = configurations.rows(n, k, constants["GATED"] != "none", x.element_size(), x.device)
    # The interpreter's products, and those of float32, have no side of 8.
    narrow = m <= 8 and x.element_size() == 2 and configurations.architecture(x.device) is not None
    tiles, padded = cdiv(n, c.columns), 8 if narrow else 16
    rows_kernel[(tiles, c.splits)](
        *given, *workspace.of_shares(tiles, c.splits, weight.shape[0] // n * c.columns, padded), m, n,
        K=k, ROWS=padded, COLUMNS=c.columns, BLOCK=c.block, SPLITS=c.splits, HAS_NORM_BIAS=given[4] is not None,
        SCALED_AFTER=constants["NORM"] == "rms" and x.dtype == torch.bfloat16, EARLY=c.early,
        LONG_OFFSETS=exceeds_int32(weight), **constants, num_warps=c.warps, num_stages=c.stages,
        **_options(constants["PDL"]),
    )  # fmt: skip


def takes_ring(x: Tensor, weight: Tensor, norm: str | None) -> bool:
    """Whether `ring_kernel` multiplies 3 and more rows.

    It is for Hopper and bfloat16, scales sums after the product, and copies rows of 16 bytes and their multiples.
    """
    copied = x.shape[1] % 8 == 0 and weight.data_ptr() % 16 == 0 and x.shape[1] <= configurations.LONGEST_RING
    return copied and x.dtype == torch.bfloat16 and norm != "layer" and configurations.architecture(x.device) == 90


def _ring(given: Given, n: int, constants: dict[str, Any], workspace: Workspace) -> None:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from .kernels.ring import blocks_of, ring_kernel

    x, weight, out, norm_weight, _, bias, residual = given
    m, k = x.shape
    padded = 8 if m <= 8 else 16
    c = configurations.ring(padded, n, k, constants["GATED"] != "none", x.device)
    tiles, block = cdiv(n, c.columns), [c.columns, c.block]
    ring_kernel[(c.programs,)](
        x, TensorDescriptor(weight, list(weight.shape), [k, 1], block, blocks_of(*block)), out, norm_weight, bias,
        residual, *workspace.of_shares(tiles, c.splits, weight.shape[0] // n * c.columns, padded), m, n,
        K=k, ROWS=padded, WARPS=4, STAGES=c.stages, SPLITS=c.splits, **constants, num_warps=4,
        **_options(constants["PDL"]),
    )  # fmt: skip


def attend(
    qkv: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, cos: Tensor, sin: Tensor,
    out: Tensor | None = None, *, num_heads: int, scale: float | None = None, window: int | None = None,
    softcap: float | None = None, q_norm: Tensor | None = None, k_norm: Tensor | None = None, norm_offset: float = 0.0,
    eps: float = 1e-6, sinks: Tensor | None = None, block_table: Tensor | None = None,
    workspace: Workspace | None = None, pdl: bool = False,
) -> Tensor:  # fmt: skip
    """Rotate q and k, write the new key and value into the cache, and attend to all keys that the token sees.

    Args:
        qkv: `(rows, (H + 2 HK) D)`, contiguous.
        k_cache: `(rows, HK, L, D)`, contiguous, or pages `(n, HK, page, D)` with a `block_table`; so is `v_cache`.
        lengths: int32 `(rows,)`: tokens in the cache, which is the position of the new one. Below 0, or past the last
            slot or position: nothing is written, and the row of the result is 0.
        cos: float32 `(positions, rotary_dim / 2)`; so is `sin`.
        out: `(rows, H D)`, contiguous.
        num_heads: H.
        scale: of the scores; `D ** -0.5` by default.
        window: keys that a token sees, itself included; the slot of a position is then `position % L`.
        softcap: of the scores, after `scale`.
        q_norm: `(D,)`, weight of an RMSNorm of each head of q; `k_norm` of k. Both or neither.
        sinks: `(H,)`: a further logit of each head, without a value.
        block_table: int32 `(rows, n)`: the page of each `page` positions.
        workspace, pdl: as in `project`.
    """
    batch, (kv_heads, page, depth) = qkv.shape[0], k_cache.shape[1:]
    paged = block_table is not None
    capacity, stride = (page, 0) if block_table is None else (page * block_table.shape[1], block_table.stride(0))
    group = num_heads // kv_heads
    if out is None:
        out = qkv.new_empty(batch, num_heads * depth)
    c = configurations.attention(batch, kv_heads, group, depth, capacity, qkv.element_size(), qkv.device)
    padded, parts = max(16, next_power_of_2(depth)), batch * kv_heads * c.splits * group
    scratch = Workspace(qkv.device) if workspace is None else workspace
    partials, counters = scratch.reserve(parts * (padded + 2), batch * kv_heads if c.splits > 1 else 0)
    with on_device(qkv):
        attention_kernel[(batch, kv_heads, c.splits)](
            qkv, k_cache, v_cache, lengths, cos, sin, out, q_norm, k_norm, sinks, block_table,
            partials, partials[parts * padded :], partials[parts * (padded + 1) :], counters,
            capacity, stride, kv_heads * page * depth, k_cache.shape[0], (window or 1) - 1, cos.shape[0],
            H=num_heads, HK=kv_heads, D=depth, ROTARY=2 * cos.shape[1], SPLITS=c.splits, COLUMNS=c.columns,
            DEPTH=padded, HEADS=max(16, next_power_of_2(group)), GROUP=next_power_of_2(group),
            SCALE=depth**-0.5 if scale is None else scale, SOFTCAP=softcap or 0.0, WINDOW=window is not None,
            PAGE=page if paged else 0, HAS_NORM=q_norm is not None, OFFSET=norm_offset, EPS=eps,
            HAS_SINKS=sinks is not None, PDL=pdl, num_warps=c.warps, num_stages=c.stages, **_options(pdl),
        )  # fmt: skip
    return out


def add_norm(
    y: Tensor, norm_weight: Tensor, residual: Tensor | None = None, out: Tensor | None = None, *,
    norm_offset: float = 0.0, eps: float = 1e-6, pdl: bool = False,
) -> Tensor:  # fmt: skip
    """`residual + rms_norm(y)`: y `(rows, N)` may be some columns of a wider tensor, and `out` may be y."""
    rows, n = y.shape
    if out is None:
        out = y.new_empty(rows, n)
    with on_device(y):
        add_norm_kernel[(rows,)](
            y, norm_weight, residual, out, y.stride(0), out.stride(0), N=n, BLOCK=next_power_of_2(n),
            OFFSET=norm_offset, EPS=eps, HAS_RESIDUAL=residual is not None, PDL=pdl, num_warps=8, **_options(pdl),
        )  # fmt: skip
    return out


def embed(
    tokens: Tensor, table: Tensor, out: Tensor | None = None, *, scale: float | None = None, pdl: bool = False
) -> Tensor:
    """`table[tokens]` of int64 tokens `(rows,)`, times `scale`, which is first rounded to the dtype of the table."""
    rows, n = tokens.shape[0], table.shape[1]
    if out is None:
        out = table.new_empty(rows, n)
    factor = 1.0 if scale is None else torch.tensor(scale).to(table.dtype).item()
    with on_device(table):
        embed_kernel[(rows, cdiv(n, 1024))](
            tokens, table, out, N=n, BLOCK=1024, SCALE=factor, PDL=pdl, num_warps=4, **_options(pdl)
        )
    return out


def greedy(
    logits: Tensor, tokens: Tensor, history: Tensor, lengths: Tensor, ends: Tensor, *,
    workspace: Workspace | None = None, pdl: bool = False,
) -> None:  # fmt: skip
    """Choose the token of the largest logit, the lowest of several, and prepare the next step; all in place.

    Args:
        logits: `(rows, V)`, contiguous.
        tokens: int64 `(rows,)`: gets the next tokens, 0 for logits that are no numbers.
        history: int64 `(rows, slots)`, in pinned memory of the host or on the GPU: gets the token of each row in use at
            the row's length, -1 for logits that are no numbers.
        lengths: int32 `(rows,)`: grows by 1; becomes -1 where the token ends the row or is none. Below 0: not in use.
        ends: int64 `(n,)`, a power of two: the tokens that end a row.
        workspace, pdl: as in `project`.
    """
    rows, size = logits.shape
    block = 4096 if logits.is_cuda else 64
    tiles = cdiv(size, block)
    scratch = Workspace(logits.device) if workspace is None else workspace
    partials, counters = scratch.reserve(2 * rows * tiles, rows)
    with on_device(logits):
        greedy_kernel[(rows, tiles)](
            logits, tokens, history, lengths, ends, partials, partials[rows * tiles :].view(torch.int32), counters,
            V=size, BLOCK=block, TILES=tiles, ALL_TILES=next_power_of_2(tiles), SLOTS=history.shape[1],
            ENDS=ends.numel(), PDL=pdl, num_warps=8, **_options(pdl),
        )  # fmt: skip


def draw(logits: Tensor, sampling: Sampling, tokens: Tensor, history: Tensor, lengths: Tensor, ends: Tensor) -> None:
    """Draw the token of each row among its `CANDIDATES` largest logits, and prepare the next step; all in place.

    A draw is as in `Sampling.draw`, but for rows of which more than `CANDIDATES` tokens are left by top-k and top-p.

    Args:
        logits: `(rows, V)`.
        sampling: seed, step, temperature, top_k and top_p, as tensors; its step is counted.
        tokens, history, lengths, ends: as in `greedy`.
    """
    rows, size = logits.shape
    values, indices = logits.topk(min(CANDIDATES, size))
    with on_device(logits):
        draw_kernel[(rows,)](
            values, indices, sampling.seed, sampling.step, sampling.temperature, sampling.top_k, sampling.top_p,
            tokens, history, lengths, ends, K=values.shape[1], BLOCK=next_power_of_2(values.shape[1]),
            SLOTS=history.shape[1], ENDS=ends.numel(), STEPS=STEPS, num_warps=8,
        )  # fmt: skip
    sampling.step.add_(1)
