"""What this project is about, in four tables and three sentences: attention, a block, a norm and a projection.

After reading it you can compare a function of any technique with PyTorch's own on your machine, and see its speedup.

Needs: the packages of this workspace, no GPU, no download; a minute on two cores with `--quick`, two without.
Run: `nox -s demo`, or `python examples/demo.py --quick`. It ends with three sentences that begin with "Fastest".

Each function is called at every level that runs here. "naive" is level `reference`: the formula, one operation per
line, in the same dtype. "PyTorch" is level `native`, PyTorch's own operators; the best PyTorch is the faster of that
and `torch.compile`. "default" is a call without a level. All are checked against the formula in float64 before and
after they are timed in turns; all printed figures are measured in this run.

This project began with a claim: 3.7x of naive for attention, 3.2x for a block, 3.0x for a norm, 2.5x for a projection.
On an H100 (4 x 2,048 tokens, width 2,048, bfloat16, torch 2.11) the default is at 69.7x, 15.6x and 10.9x of naive for
the first three, mostly because naive attention stores all scores; of the best PyTorch that is 1.00x, 1.03x and 1.05x.
The claim for the projection does not hold: three products, or one of the joined weights, take the same time, since each
alone fills that GPU.
"""

# %% Sizes
# On a GPU the sizes of a small Llama in bfloat16. On a CPU they are smaller, in float32: there most functions default
# to PyTorch's own, and there is little to gain.
from __future__ import annotations

import argparse
import copy
import statistics
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from kernel_pytorch.flash_attn_triton import flash_attention
from kernel_pytorch.harness.quick import Comparison, compare_implementations
from kernel_pytorch.models import TransformerBlock
from kernel_pytorch.qkv_fusion import qkv_projection
from kernel_pytorch.rmsnorm import rms_norm

LEVELS = {"naive": "reference", "PyTorch": "native", "torch.compile": "compile", "TorchScript": "torchscript"}
LEVELS |= {"Triton": "triton", "CUDA C++": "cuda", "default": None}
BEST = ("PyTorch", "torch.compile")


@dataclass(frozen=True)
class Sizes:
    """Device, dtype, number of sequences, tokens per sequence, heads, channels per head, rounds of timing."""

    device: str
    dtype: torch.dtype
    batch: int
    tokens: int
    heads: int
    head_dim: int
    rounds: int

    def tensor(self, *shape: int) -> torch.Tensor:
        """Normal values."""
        return torch.randn(shape, device=self.device, dtype=self.dtype)


def sizes(quick: bool) -> Sizes:
    """Sizes for this machine."""
    if torch.cuda.is_available():
        return Sizes("cuda", torch.bfloat16, 4, 2048, 16, 128, 20 if quick else 60)
    return Sizes("cpu", torch.float32, 1, 128 if quick else 512, 4, 64, 12 if quick else 30)


# %% Every level of a function
# A level that cannot run here raises an error with the reason. Each is tried once, and the table shows the reasons.
def compare(
    implementations: Mapping[str, Callable[..., Any]], *args: Any, rounds: int
) -> tuple[Comparison, dict[str, str]]:
    """Time the implementations that run here; return the reasons of the others too."""
    reasons = {}
    for name, function in implementations.items():
        try:
            function(*args)
        except (RuntimeError, ValueError, ImportError) as error:
            reasons[name] = str(error).splitlines()[0]
    here = {name: function for name, function in implementations.items() if name not in reasons}
    return compare_implementations(here, *args, rounds=rounds), reasons


def at_levels(function: Callable[..., Any], **options: Any) -> dict[str, Callable[..., Any]]:
    """A function of one technique at each level."""
    return {name: partial(function, level=level, **options) for name, level in LEVELS.items()}


# %% Attention, a norm and a projection
# The naive attention stores the scores of every query with every key, which flash attention avoids.
def attention(s: Sizes) -> tuple[Comparison, dict[str, str]]:
    """Causal self-attention."""
    q, k, v = (s.tensor(s.batch, s.heads, s.tokens, s.head_dim) for _ in range(3))
    return compare(at_levels(flash_attention, causal=True), q, k, v, rounds=s.rounds)


def norm(s: Sizes) -> tuple[Comparison, dict[str, str]]:
    """RMSNorm."""
    width = s.heads * s.head_dim
    return compare(at_levels(rms_norm, eps=1e-6), s.tensor(s.batch * s.tokens, width), s.tensor(width), rounds=s.rounds)


def projection(s: Sizes) -> tuple[Comparison, dict[str, str]]:
    """Queries, keys and values of one input, with a quarter as many heads of keys and values."""
    heads = {"num_heads": s.heads, "num_kv_heads": s.heads // 4, "head_dim": s.head_dim}
    weight = s.tensor((s.heads + 2 * (s.heads // 4)) * s.head_dim, s.heads * s.head_dim)
    x = s.tensor(s.batch, s.tokens, s.heads * s.head_dim)
    return compare(at_levels(qkv_projection, **heads), x, weight, rounds=s.rounds)


# %% A whole block
# The same weights each time. `use` chooses the techniques of a model and their level; `techniques=()` is plain PyTorch,
# as a competent user writes it.
# --8<-- [start:block]
def block(s: Sizes) -> tuple[Comparison, dict[str, str]]:
    """A transformer block with RMSNorm and a gated feed-forward."""
    stock = TransformerBlock(s.heads * s.head_dim, s.heads, techniques=()).to(s.device, s.dtype)
    found = {name: copy.deepcopy(stock).use(level=level) for name, level in LEVELS.items()}
    found["PyTorch"] = stock
    found["torch.compile"] = torch.compile(copy.deepcopy(stock), fullgraph=True)
    found["default, compiled"] = torch.compile(copy.deepcopy(stock).use(), fullgraph=True)
    return compare(found, s.tensor(s.batch, s.tokens, s.heads * s.head_dim), rounds=s.rounds)


# --8<-- [end:block]
# %% The tables and conclusions
def times(found: Comparison) -> dict[str, float]:
    """Median seconds of those that were timed and are correct."""
    return {c.name: c.seconds.median for c in found.contenders if c.status == "measured" and c.seconds}


def best_of(found: Comparison) -> float:
    """Seconds of the best PyTorch."""
    return min(time for name, time in times(found).items() if name in BEST)


def shown(title: str, found: Comparison, reasons: Mapping[str, str]) -> Table:
    """Times, speedups over naive and over the best PyTorch, and errors."""
    table = Table(title=title, title_justify="left", width=80)
    table.add_column("", ratio=1)
    for name in ("time", "x of naive", "x of best PyTorch", "error"):
        table.add_column(name, justify="right")
    measured = times(found)
    for c in found.contenders:
        if c.name not in measured:
            table.add_row(c.name, c.status)
            continue
        time, error = measured[c.name], "" if c.relative_error is None else f"{c.relative_error:.0e}"
        ratios = (f"{measured['naive'] / time:.2f}", f"{best_of(found) / time:.2f}")
        table.add_row(c.name, f"{time * 1e3:.3g} ms" if time >= 1e-3 else f"{time * 1e6:.3g} us", *ratios, error)
    why = [f"{c.name}: {c.reason}" for c in found.contenders if c.reason]
    table.caption = "\n".join([*(f"not here, {name}: {reason}" for name, reason in reasons.items()), *why]) or None
    table.caption_justify = "left"
    return table


def insights(tables: Mapping[str, Comparison]) -> list[str]:
    """Three sentences."""
    fastest = {title: min(times(found), key=times(found).__getitem__) for title, found in tables.items()}
    gains = {title: times(found)["naive"] / times(found)[fastest[title]] for title, found in tables.items()}
    lost = {title: times(found)["default"] / min(times(found).values()) - 1 for title, found in tables.items()}
    over_best = {title: best_of(found) / times(found)["default"] for title, found in tables.items()}
    worst = max(lost, key=lost.__getitem__)
    parts = statistics.geometric_mean(gain for title, gain in gains.items() if title != "block")
    return [
        "Fastest: " + ", ".join(f"{title} {fastest[title]} ({gains[title]:.2f}x of naive)" for title in tables) + ".",
        "Fastest without choosing: the default is at "
        + ", ".join(f"{over_best[title]:.2f}x of the best PyTorch in {title}" for title in tables)
        + f"; it gives away most in {worst}, {lost[worst]:.0%}.",
        f"Fastest in a model: attention, norm and projection gain {parts:.2f}x over naive on average, the block of "
        f"them {gains['block']:.2f}x.",
    ]


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller sizes on a CPU, fewer rounds on a GPU")
    parser.add_argument("--out", type=Path, help="folder that gets the figures as JSON, one file a table")
    options = parser.parse_args(argv)
    warnings.filterwarnings("ignore", ".torch.jit.*deprecated")
    torch.manual_seed(0)
    s, console, tables = sizes(options.quick), Console(width=80, highlight=False), {}
    width = s.heads * s.head_dim
    with torch.no_grad():
        for title, measure in {"attention": attention, "block": block, "norm": norm, "projection": projection}.items():
            tables[title], reasons = measure(s)
            what = f"{title}: {s.batch} x {s.tokens} tokens, width {width}, {str(s.dtype).removeprefix('torch.')}"
            console.print(shown(f"{what}, {tables[title].device}", tables[title], reasons))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        for title, found in tables.items():
            (options.out / f"{title}.json").write_text(found.to_json(), encoding="utf-8")
        console.print(f"written: {options.out}")
    print(*insights(tables), sep="\n")


if __name__ == "__main__":
    main()
