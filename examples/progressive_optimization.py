"""Take one transformer block through every level, with the same weights, and see what each step changes.

After reading it you can tell for each level how many kernels run, how many bytes they move, what is kept for the
backward, and how much time that saves on your machine.

Needs: the packages of this workspace; triton and `./packages/cuda-ops` for the levels of these names. A CPU
is enough; on a GPU the sizes are larger, and level triton is timed. No download.
Time: half a minute with --quick on two cores, two minutes without.

    python examples/progressive_optimization.py --quick

The last lines are a table with a row per step, and sentences that are computed from it.
"""

# %% Imports
# Modules that load Triton are imported in functions: without a GPU its interpreter must be chosen first.
from __future__ import annotations

import argparse
import copy
import importlib.util
import re
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from kernel_pytorch.harness.clock import compare_paired
from kernel_pytorch.harness.interpreter import interpret_without_gpu
from kernel_pytorch.harness.launches import count_launches, watch_device
from kernel_pytorch.harness.quick import compare_implementations

PYTORCH = ("PyTorch", "PyTorch, compiled")
"""The baselines of the last column, whichever is faster."""
KERNELS = re.compile(r"^ +(?:\w+ = )?(?:triton_\w+\.run|cpp_fused\w*|extern_kernels\.\w+|torch\.ops\.[\w.]+)\(", re.M)
"""Calls of kernels in the code that TorchInductor writes."""


# %% Steps
# `use` changes how the block is computed, never its parameters. "naive" is the definition in plain PyTorch, one
# operator per line, in the same dtype; "PyTorch" is what a competent user writes, with PyTorch's own fused operators.
# --8<-- [start:steps]
STEPS = {
    "naive": (None, "reference"),
    "PyTorch": ((), None),
    "native": (None, "native"),
    "triton": (None, "triton"),
    "cuda": (None, "cuda"),
    "default": (None, None),
}


def steps(block: nn.Module) -> dict[str, nn.Module]:
    """The block at each level, each with a copy of the same weights."""
    return {name: copy.deepcopy(block).use(techniques, level) for name, (techniques, level) in STEPS.items()}
    # --8<-- [end:steps]


# %% What a step changes
@dataclass
class Counted:
    """Counts of one forward: kernels, bytes that they read and write, bytes kept for the backward (0: unknown)."""

    kernels: int
    moved: int = 0
    kept: int = 0


def counted(block: nn.Module, x: Tensor, on_gpu: bool) -> Counted:
    """Count on the device: kernels on a GPU, operators of an eager forward on a CPU (each reads and writes memory)."""
    from kernel_pytorch.compile_recipes.memory import saved
    from kernel_pytorch.compile_recipes.recorder import record

    nodes = [node for node in record(block, (x,)).nodes if node.cost.launches]
    kernels = len(nodes)
    if on_gpu:
        with torch.no_grad(), watch_device(x.device) as names:
            block(x)
        kernels = len(names)
    return Counted(kernels, sum(node.cost.bytes for node in nodes), sum(k.bytes for k in saved(block, (x,))))


def counted_compiled(block: nn.Module, x: Tensor) -> Counted:
    """Count the calls in the code that TorchInductor generates, which does not show the bytes."""
    from torch._inductor.utils import run_and_get_code

    with torch.no_grad():
        _, code = run_and_get_code(block, x)
    return Counted(len(KERNELS.findall("\n".join(code))))


# %% The table
# All are timed in turns, after a check against the naive block in float64. The speedups are medians of paired ratios,
# the last with its 99 % interval.
def report(found: dict[str, Counted], compared: dict[str, tuple[str, str, str, str]], notes: list[str]) -> None:
    """Print a row per step."""
    table = Table(title="One block, the same weights", title_justify="left")
    for column in ("step", "kernels", "moved, MiB", "kept, MiB", "time", "x naive", "x best PyTorch", "error"):
        table.add_column(column, justify="left" if column == "step" else "right")
    for name, c in found.items():
        sizes = [f"{size / 2**20:.1f}" if size else "" for size in (c.moved, c.kept)]
        table.add_row(name, str(c.kernels), *sizes, *compared[name])
    Console(width=120).print(table)
    print(*notes, sep="\n")


def sentences(found: dict[str, Counted], ratios: dict[str, tuple[float, float, float]]) -> list[str]:
    """Conclusions from the figures, gains or none."""
    naive, native, default = (found[name] for name in ("naive", "native", "default"))
    lines = [
        f"From naive to native: {naive.kernels} kernels become {native.kernels}, and what they move becomes "
        f"{native.moved / naive.moved:.0%}; the default moves {default.moved / naive.moved:.0%}."
    ]
    for name in ("default", "default, compiled"):
        ratio, low, high = ratios[name]
        verdict = "faster" if low > 1 else "slower" if high < 1 else "unsure: the interval holds 1"
        lines.append(f"{name} against the best PyTorch: {ratio:.2f}x ({low:.2f} to {high:.2f}), {verdict}.")
    return lines


# %% Everything
def main(argv: list[str] | None = None) -> dict[str, Counted]:
    """Count, compare and print; return the counts by step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds")
    arguments = parser.parse_args(argv)
    interpret_without_gpu()  # before anything loads Triton, which TorchInductor does
    from kernel_pytorch.models import TransformerBlock
    from kernel_pytorch.qkv_fusion import RotaryTable

    on_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    dim, heads, tokens = (2048, 32, 4096) if on_gpu else (128, 4, 64) if arguments.quick else (512, 8, 512)
    torch.manual_seed(0)
    rotary = RotaryTable(dim // heads)
    block = TransformerBlock(dim, heads, num_kv_heads=heads // 2, rotary=rotary).to(device, dtype)
    x = torch.randn(1, tokens, dim, device=device, dtype=dtype)
    blocks, notes = steps(block), []
    if not importlib.util.find_spec("kernel_pytorch.cuda_ops"):
        blocks.pop("cuda")
        notes.append("cuda is left out: pip install ./packages/cuda-ops")
    if not importlib.util.find_spec("triton"):
        blocks.pop("triton")
        notes.append("triton is left out: pip install triton")
    elif not (on_gpu or arguments.quick):
        blocks.pop("triton")
        notes.append("triton is left out: without a GPU it runs in an interpreter, which --quick shows.")
    found = {name: counted(each, x, on_gpu) for name, each in blocks.items()}
    if "triton" in blocks and not on_gpu:  # the interpreter is for checking: its time says nothing
        triton = blocks.pop("triton")
        with torch.no_grad(), count_launches() as names:
            off = float((triton(x) - blocks["naive"](x)).abs().max())
        ran = f"{len(names)} kernels ran in Triton's interpreter, off by {off:.0e}"
        notes.append(f"triton: {ran}; no time without a GPU.")
    for name in ("PyTorch", "default"):
        compiled = torch.compile(copy.deepcopy(blocks[name]), fullgraph=True)
        found[f"{name}, compiled"] = counted_compiled(compiled, x)
        blocks[f"{name}, compiled"] = compiled
    result = compare_implementations(blocks, x, rounds=20 if arguments.quick else 60)
    measured = {c.name: c for c in result.contenders if c.status == "measured" and c.seconds}
    best = min(PYTORCH, key=lambda name: measured[name].seconds.median)
    compared, ratios = dict.fromkeys(found, ("", "", "", "not timed")), {}
    for name, c in measured.items():
        over = [compare_paired(measured[base].samples, c.samples).speedup for base in ("naive", best)]
        ratios[name] = (over[1].median, over[1].low, over[1].high)
        shown = [f"{over[0].median:.2f}", f"{over[1].median:.2f} ({over[1].low:.2f} to {over[1].high:.2f})"]
        compared[name] = (f"{c.seconds.median * 1e3:.3g} ms", *shown, f"{c.relative_error:.0e}")
    report(found, compared, [*notes, *sentences(found, ratios)])
    return found


if __name__ == "__main__":
    main()
