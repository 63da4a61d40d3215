"""What this project is about, in three tables and two minutes: `nox -s demo`.

A norm, a gated feed-forward and a whole transformer block, each written out as a textbook has it ("naive"), with the
best that PyTorch offers, through torch.compile, and with the functions of this project. They are held against each
other, timed in turns, and what is printed was measured just now. Without a GPU the sizes are small.
"""

# %% Sizes
from __future__ import annotations

import copy

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from kernel_pytorch.fused_ln_act import patch as patch_feed_forwards
from kernel_pytorch.fused_ln_act import swiglu
from kernel_pytorch.harness.quick import Comparison, compare_implementations
from kernel_pytorch.rmsnorm import patch as patch_norms
from kernel_pytorch.rmsnorm import rms_norm

GPU = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if GPU else ("cpu", torch.float32)
TOKENS, WIDTH, HIDDEN, HEADS = (4096, 2048, 8192, 32) if GPU else (128, 256, 1024, 4)
ROUNDS = 60
EPS = 1e-6
BEST = ("PyTorch", "torch.compile")
"""What a speedup "over the best PyTorch" is over, whichever is faster."""


# %% A norm
def naive_norm(x: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm as the paper writes it, an operation a line."""
    wide = x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return (wide * scale * weight.float()).to(x.dtype)


def norm() -> Comparison:
    """RMSNorm at the levels that run here."""
    compiled = torch.compile(naive_norm, fullgraph=True)
    return compare_implementations(
        {
            "naive": naive_norm,
            "PyTorch": lambda x, weight: F.rms_norm(x, weight.shape, weight, EPS),
            "torch.compile": compiled,
            "ours": lambda x, weight: rms_norm(x, weight, eps=EPS, casting="gemma"),
        },
        torch.randn(TOKENS, WIDTH, device=DEVICE, dtype=DTYPE),
        torch.rand(WIDTH, device=DEVICE, dtype=DTYPE),
        rounds=ROUNDS,
    )


# %% What stands between the products of a gated feed-forward
def naive_gate(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU, an operation a line."""
    return gate * torch.sigmoid(gate) * up


def gate() -> Comparison:
    """SwiGLU at the levels that run here."""
    gate, up = (torch.randn(TOKENS, HIDDEN, device=DEVICE, dtype=DTYPE) for _ in range(2))
    return compare_implementations(
        {
            "naive": naive_gate,
            "PyTorch": lambda gate, up: F.silu(gate) * up,
            "torch.compile": torch.compile(naive_gate, fullgraph=True),
            "ours": swiglu,
        },
        gate,
        up,
        rounds=ROUNDS,
    )


# %% A whole block
class Block(nn.Module):
    """A pre-norm transformer block with a gated feed-forward, as Llama has it, without a rotation."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH, EPS), nn.RMSNorm(WIDTH, EPS)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        """Of tokens `(S, N)`, each of which sees those before it."""
        q, k, v = self.qkv(self.norm1(x)).view(len(x), 3, HEADS, -1).permute(1, 2, 0, 3)
        x = x + self.out(self.attend(q, k, v).transpose(0, 1).reshape(len(x), -1))
        return x + self.mlp(self.norm2(x))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """PyTorch's own attention."""
        return F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]


class Naive(Block):
    """The same, with attention as the paper writes it."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Every score in memory."""
        scores = (q @ k.mT).float() * q.shape[-1] ** -0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        return torch.softmax(scores.masked_fill(hidden, float("-inf")), -1).to(v.dtype) @ v


class FeedForward(nn.Module):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down_proj, self.act_fn = nn.Linear(HIDDEN, WIDTH, bias=False), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        """Of `(..., N)`."""
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def block() -> Comparison:
    """A block as it is, compiled, and with two lines of this project."""
    stock = Block().to(DEVICE, DTYPE)
    naive = copy.deepcopy(stock)
    naive.__class__ = Naive
    ours = copy.deepcopy(stock)
    Console(width=80).print(patch_norms(ours), patch_feed_forwards(ours), sep="\n", highlight=False)
    return compare_implementations(
        {
            "naive": naive,
            "PyTorch": stock,
            "torch.compile": torch.compile(stock, fullgraph=True),
            "ours": ours,
            "ours, compiled": torch.compile(copy.deepcopy(ours), fullgraph=True),
        },
        torch.randn(TOKENS, WIDTH, device=DEVICE, dtype=DTYPE),
        rounds=ROUNDS,
    )


# %% The tables
def shown(title: str, found: Comparison) -> Table:
    """Times, and speedups over naive and over the best PyTorch, of one comparison."""
    table = Table(title=title, title_justify="left", width=80)
    table.add_column("", ratio=1)
    for name in ("time", "x of naive", "x of the best PyTorch"):
        table.add_column(name, justify="right")
    times = {c.name: c.seconds.median for c in found.contenders if c.status == "measured" and c.seconds}
    best = min(time for name, time in times.items() if name in BEST)
    for c in found.contenders:
        if c.name not in times:
            table.add_row(c.name, c.status, "", "")
            continue
        time = times[c.name]
        unit, factor = ("ms", 1e3) if time >= 1e-3 else ("us", 1e6)
        table.add_row(c.name, f"{time * factor:.3g} {unit}", f"{times['naive'] / time:.2f}", f"{best / time:.2f}")
    return table


def main() -> None:
    """Measure and print."""
    torch.manual_seed(0)
    console = Console(width=80)
    with torch.no_grad():
        for title, measure in (
            (f"RMSNorm, {TOKENS} x {WIDTH}", norm),
            (f"SwiGLU, {TOKENS} x {HIDDEN}", gate),
            (f"A transformer block, {TOKENS} tokens of width {WIDTH}", block),
        ):
            console.print(shown(f"{title}, {str(DTYPE).removeprefix('torch.')}", measure()))
    if not GPU:
        console.print("On a CPU the default of most functions is PyTorch's own: there is little to gain, and no loss.")


if __name__ == "__main__":
    main()
