"""Take a slow model that does not compile, and mend it line by line with `doctor`, counts and the profiler.

After reading it you can read a report of `doctor`, decide what to change first, check that each change keeps the
result, and measure the speedup of all changes together.

Needs: `pip install ./harness ./packages/compile-recipes`. A CPU is enough; a GPU is used where there is one. No
download: the texts are lines of Python's own source. Time: half a minute with --quick on two cores, two without.

    python examples/debugging.py --quick

The last lines are a table with a row per step, the times of the first and the last, and a sentence about them. The same
report of your own model: `kernel-pytorch doctor your_file.py:factory`.
"""

# %% Imports
from __future__ import annotations

import argparse
import copy
import logging
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernel_pytorch.compile_recipes import CompilerOptimizationAssistant, assert_ready
from kernel_pytorch.compile_recipes.guard import counts_of
from kernel_pytorch.compile_recipes.report import summary
from kernel_pytorch.harness import compare_implementations, profile_module

LOG = logging.getLogger("model")
EPS = 1e-6


# %% The model as it was found
# It encodes texts: embeddings, layers of attention, a mean over the tokens. The result is correct, but every method has
# a costly habit: a value that Python reads, a formula by hand, a loop over texts.
class Found(nn.Module):
    """Tokens `(batch, length)`, 0 for padding, to vectors `(batch, width)`."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.norms = nn.ParameterList(torch.ones(width) for _ in range(layers))
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width, bias=False) for _ in range(layers))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.heads, self.count = 4, 0

    def forward(self, tokens: Tensor) -> Tensor:
        """Encode."""
        self.note()
        mask = tokens != 0
        x = self.embedding(tokens)
        for weight, qkv in zip(self.norms, self.qkv, strict=True):
            q, k, v = qkv(self.norm(x, weight)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            x = x + self.attend(q, k, v, mask[:, None, None]).transpose(1, 2).flatten(-2)
        return self.limit(self.pool(x, mask))

    def note(self) -> None:
        """Count the calls."""
        self.count += 1
        LOG.debug("call %d", self.count)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm."""
        return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """Attention."""
        scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~mask, float("-inf"))
        return torch.softmax(scores, -1) @ v

    def pool(self, x: Tensor, mask: Tensor) -> Tensor:
        """The mean of the tokens of each text."""
        return torch.stack([text[kept].mean(0) for text, kept in zip(x, mask, strict=True)])

    def limit(self, x: Tensor) -> Tensor:
        """At most 2 in size."""
        largest = x.abs().max().item()
        return x * (2 / largest) if largest > 2 else x


# %% Step 1: values stay in tensors
# `doctor` lists graph breaks first: a counter on the module recompiles at each call, `.item()` and a branch break.
class Tensors(Found):
    """No value goes to Python."""

    def note(self) -> None:
        """Count in a buffer; the caller does the logging."""
        self.calls += 1

    def limit(self, x: Tensor) -> Tensor:
        """The same, with a factor of 1 where nothing is too large."""
        return x * (2 / x.abs().max().clamp(min=2))


# %% Step 2: shapes follow from shapes
# The size of `x[mask]` depends on the values, and the loop is unrolled for each batch size.
class Masked(Tensors):
    """No loop over texts."""

    def pool(self, x: Tensor, mask: Tensor) -> Tensor:
        """A sum over tokens that are there, divided by their number."""
        kept = mask[..., None].to(x.dtype)
        return (x * kept).sum(1) / kept.sum(1)


# %% Step 3: one operator for a formula
# Now there is one graph, and the report's first lines are about its content: a norm and an attention by hand.
class Operators(Masked):
    """PyTorch's own kernels."""

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm."""
        return F.rms_norm(x, weight.shape, weight, EPS)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """Attention."""
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


STEPS = {"as found": Found, "tensors": Tensors, "masks": Masked, "operators": Operators}


# %% Real texts
def texts(rows: int, length: int) -> Tensor:
    """Lines of the source of argparse, `(rows, length)`, padded with zeros behind."""
    lines = [line.encode()[:length] for line in Path(argparse.__file__).read_text("utf-8").splitlines() if line.strip()]
    batch = torch.zeros(rows, length, dtype=torch.int64)
    for row, line in enumerate(lines[:rows]):
        batch[row, : len(line)] = torch.tensor(list(line))
    return batch


# %% Examine each step
# After each change: check the result, then count. A change that improves no count is not worth its lines.
def examine(model: nn.Module, first: nn.Module, tokens: Tensor, more: Tensor) -> tuple[dict[str, int], list[str]]:
    """(counts, first lines of the report) of a model; raises where its result is not that of the first."""
    torch.testing.assert_close(model(tokens), first(tokens), rtol=1e-4, atol=1e-5)
    report = CompilerOptimizationAssistant().analyze_component(model, tokens, shapes=[(tokens,), (more,)])
    return counts_of(report), summary(report)


# %% Everything
def main(argv: list[str] | None = None) -> dict[str, dict[str, int]]:
    """Fix the model, and print the effect of each step; return the counts by step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a small model and few rounds")
    quick = parser.parse_args(argv).quick
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    width, layers, rows, length = (64, 2, 16, 48) if quick else (256, 4, 64, 80)
    first = Found(width, layers).to(device)
    tokens, more = texts(rows, length).to(device), texts(rows // 2, length).to(device)
    found, models = {}, {}
    for name, kind in STEPS.items():
        model = models[name] = copy.deepcopy(first)
        model.__class__ = kind  # the same weights
        found[name], lines = examine(model, first, tokens, more)
        print(f"\n{name}:", *lines, sep="\n  ")
    torch._dynamo.mark_dynamic(tokens, 0)
    assert_ready(models["operators"], tokens, shapes=[(more,)], breaks=0, graphs=1)  # into a test of your project
    columns = ("breaks", "graphs", "recompiles", "operators", "saved_bytes")
    print(f"\n{'step':10}", *(f"{column:>12}" for column in columns))
    for name, counts in found.items():
        print(f"{name:10}", *(f"{counts.get(column, 0):12,}" for column in columns))
    timed = {  # as it was found, it would compile several graphs in each of eight calls, and then run in eager
        "as found": models["as found"],
        "mended": models["operators"],
        "mended, compiled": torch.compile(models["operators"], fullgraph=True),
    }
    compared = compare_implementations(timed, tokens, rounds=20 if quick else 60)
    print(compared.table())
    print(profile_module(models["operators"], tokens, backward=True).table(top=5))
    best = compared["mended, compiled"].comparison
    assert best is not None
    s = best.speedup
    print(f"Mended and compiled: {s.median:.2f}x ({s.low:.2f} to {s.high:.2f}) of the model as it was found.")
    return found


if __name__ == "__main__":
    main()
